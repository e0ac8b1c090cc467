"""What a user sees while a run goes on: at once on a terminal, at every client, and not too much in a pipe."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from potluck.cli.compare import _Several
from potluck.cli.display import Display
from potluck.cli.terminal import line_of
from potluck.core.tasks.metric import ACCURACY
from potluck.engine.answers.events import ClientEnd
from potluck.experiment.running.several import Ended, News
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.watching.observers import EvaluationStart, RoundStart, RunStart
from potluck.experiment.watching.progress import ProgressFile, Standing
from potluck.records import Progress, RoundRecord, duration


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def record(number, accuracy=None):
    filled = dict.fromkeys(RoundRecord.__dataclass_fields__)
    metrics = {"personal": {"accuracy": accuracy}} if accuracy is not None else None
    sent = {"bytes_down": 1_000_000, "bytes_up": 500_000, "loss_local": 0.25, "metrics": metrics}
    return RoundRecord(**{**filled, "round": number, "cohort": [0, 1], "replied": [0, 1], "failed": {}, **sent})


def client(number, done, of=2, work="training", loss=0.5):
    return ClientEnd(number, work, 1, "local_update", done - 1, done, of, loss, None, 1.0)


START = RunStart("fedavg", rounds=4, rounds_done=0, clients=3, cohort_size=2, metric=ACCURACY)


def test_standing__counts_clients_within_the_round_and_estimates_what_is_left():
    clock = Clock()
    standing = Standing(clock)
    standing.on_run_start(START)
    assert (standing.progress.share, standing.progress.seconds_left) == (0, None)
    standing.on_round_start(RoundStart(1, (0, 1)))
    assert standing.progress.words == "client 0/2"
    clock.now += 2
    standing.on_client_end(client(1, 1, loss=1.0))
    assert standing.progress.words == "client 1/2"
    assert standing.progress.share == pytest.approx(1 / 5)  # two train, three are evaluated
    assert standing.progress.seconds_left == pytest.approx(2 / (1 / 5) * (4 - 1 / 5))
    standing.on_client_end(client(1, 2, loss=0.5))
    assert (standing.progress.words, standing.progress.loss) == ("server", 0.75)
    standing.on_evaluation_start(EvaluationStart(1, 3))
    standing.on_client_end(client(1, 1, 3, "evaluation", None))
    assert (standing.progress.words, standing.progress.loss) == ("evaluating 1/3", 0.75)
    clock.now += 8
    standing.on_round_end(record(1, 0.5))
    assert standing.progress.share == 1
    assert standing.progress.seconds_left == pytest.approx(30)
    assert line_of(standing.progress, ended=True) == "round 1/4  loss 0.25  accuracy 50.0 %  1.5 MB  30 s left"
    standing.on_round_start(RoundStart(2, (0, 1)))
    standing.on_client_end(client(2, 1))
    assert standing.progress.share == pytest.approx(1 + 1 / 3)  # as many as the round before had


def test_standing__never_goes_back_when_a_method_asks_twice():
    standing = Standing(Clock())
    standing.on_run_start(START)
    standing.on_round_start(RoundStart(1, (0, 1)))
    shares = []
    for exchange in range(5):
        for done in (1, 2):
            standing.on_client_end(replace(client(1, done), exchange=exchange))
            shares.append(standing.progress.share)
    assert shares == sorted(shares)
    assert shares[-1] < 1


def test_standing__of_a_resumed_run_counts_its_own_pace_alone():
    clock = Clock()
    standing = Standing(clock)
    standing.on_run_start(replace(START, rounds_done=2))
    standing.on_round_start(RoundStart(3, (0, 1)))
    clock.now += 10
    standing.on_round_end(record(3))
    assert standing.progress.seconds_left == pytest.approx(10)


def test_display__in_a_pipe_has_a_line_a_round_and_between_at_most_one_in_ten_seconds(capsys):
    clock = Clock()
    with Display(clock) as display:
        display.on_run_start(START)
        display.on_round_start(RoundStart(1, (0, 1)))
        for done in range(1, 101):
            clock.now += 0.5
            display.on_client_end(client(1, done, of=100))
        display.on_round_end(record(1, 0.5))
        display.on_round_end(record(2, 0.6))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[1] for line in lines[:5]] == [f"client {done}/100" for done in (20, 40, 60, 80)] + [
        "server"
    ]
    assert [line.split("  ")[0] for line in lines[5:]] == ["round 1/4", "round 2/4"]
    assert "accuracy 60.0 %" in lines[-1]


def test_progress_file__is_written_at_most_once_a_second_and_never_in_part(tmp_path):
    clock, seen = Clock(), []
    file = ProgressFile(tmp_path, clock)
    file.on_run_start(START)
    file.on_round_start(RoundStart(1, (0, 1)))
    for done in range(1, 31):
        clock.now += 0.125
        file.on_client_end(client(1, done, of=30))
        seen.append(Progress.read(tmp_path).done)
    assert set(seen) == {0, 8, 16, 24}
    assert seen == sorted(seen)
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59, "59 s"), (65, "1:05 min"), (3599.6, "1:00 h"), (7500, "2:05 h")]
)
def test_duration__has_the_units_that_matter(seconds, words):
    assert duration(seconds) == words


def test_a_comparison_has_a_line_for_each_run_that_goes_on():
    experiments = [resolve({"method": {"name": "fedavg"}, "run": {"rounds": 4, "seed": seed}}) for seed in range(3)]
    console = Console(file=StringIO(), force_terminal=True, width=120)
    going = Progress(method="fedavg", phase="training", round=2, rounds=4, done=3, of=10, share=1.3)
    with _Several([f"fedavg, seed {seed}" for seed in range(3)], 12, console) as shown:
        shown.show(News(0, 1, progress=going))
        shown.show(News(1, 0, progress=replace(going, round=1, share=0.3)))
        shown.show(News(2, 4, Ended(experiments[2], Path("run"))))
        lines = [task.fields["line"] for task in shown._bar.tasks]
        assert lines[0] == "1/3 runs"
        assert lines[1].startswith("fedavg, seed 0:  round 2/4  client 3/10")
        assert lines[2].startswith("fedavg, seed 1:  round 1/4")
        assert shown._bar.tasks[0].completed == pytest.approx(1.3 + 0.3 + 4)
        shown.show(News(0, 4, Ended(experiments[0], Path("run"))))
        assert shown._bar.tasks[0].fields["line"] == "2/3 runs"
        assert len(shown._bar.tasks) == 2


def on_a_terminal(*words, cwd):
    """What a command writes to a terminal, in pieces, each with whether torch was loaded by then."""
    pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    ours, theirs = pty.openpty()
    code = "import sys; from potluck.cli import main; sys.argv[0] = 'potluck'; main()"
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=cwd, env=environment, stdout=theirs, stderr=theirs, stdin=theirs
    )
    os.close(theirs)
    pieces = []
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not piece:
            break
        loaded = Path(f"/proc/{process.pid}/maps")
        with_torch = loaded.exists() and "libtorch" in loaded.read_text()
        pieces.append((re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", piece.decode(errors="replace")), with_torch))
    os.close(ours)
    assert process.wait() == 0, "".join(text for text, _ in pieces)
    return pieces


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of a process's libraries")
def test_a_terminal_has_the_first_word_before_torch_is_loaded_and_every_client(tmp_path):
    words = ["run", "fedavg", "run.rounds=1", "run.workers=1", "federation.clients=3", "federation.train_fraction=0.2"]
    pieces = on_a_terminal(*words, "federation.models=[{name='cnn2',width=4}]", cwd=tmp_path)
    first, with_torch = pieces[0]
    assert first.strip().startswith("starting")
    assert not with_torch
    text = "".join(text for text, _ in pieces)
    stages = ["starting", "reading digits", "trying the models", "round 1/1", "all clients"]
    places = [text.index(words) for words in stages]
    assert places == sorted(places)


@pytest.mark.slow
def test_an_error_on_a_terminal_stands_alone_on_its_line(tmp_path):
    pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    assert pty
    code = "import sys; from potluck.cli import main; sys.argv[0] = 'potluck'; main()"
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code, "run", "fedinn"], stderr=theirs, cwd=tmp_path)
    process.wait()
    os.close(theirs)
    said = os.read(ours, 65536).decode()
    os.close(ours)
    assert said.splitlines()[-1].rpartition("\x1b[2K")[2].startswith("potluck: unknown method 'fedinn'")
