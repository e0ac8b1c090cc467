"""`potluck watch` says what the files of a run say, and ends when the run does."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from potluck.cli.watch import is_held, look, screen, watch_to_the_end
from potluck.experiment.federation.assemble import Assembly
from potluck.experiment.running.execute import execute, holding, prepare
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.watching.observers import Observer
from potluck.records import Progress
from potluck.testing.worlds import World, toy_federation

ASSEMBLY = Assembly(toy_federation(World(clients=2, architectures=1)), "data", "parts")


def run(folder, *observers, rounds=2):
    words = ["method.training.epochs=1", "run.executor=sequential", "run.common_test=false", f"run.rounds={rounds}"]
    experiment = experiment_for("local", words)
    with holding(folder):
        return execute(prepare(experiment, ASSEMBLY, folder), experiment, folder, *observers)[0]


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "runs" / "mine"
    place.mkdir(parents=True)
    return place


def test_look__follows_a_run_client_by_client_and_says_how_it_ended(folder):
    seen = []
    result = run(folder, Observer.of(on_client_end=lambda event: seen.append((event, look(folder)))))
    assert {run.state for _, run in seen} == {"running"}
    assert [len(run.records) for event, run in seen] == [event.round - 1 for event, _ in seen]
    assert {run.progress.rounds for _, run in seen} == {2}
    ended = look(folder)
    assert (ended.state, ended.records) == ("finished", tuple(result.rounds))
    assert ended.line.startswith("finished  round 2/2  loss ")
    assert f"accuracy {100 * result.rounds[-1].value('personal', 'accuracy'):.1f} %" in ended.line
    assert not (folder / "progress.json").exists()
    assert not list(folder.glob("*.tmp"))


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [(KeyboardInterrupt(), "interrupted", ""), (ValueError("no luck"), "failed", "ValueError: no luck")],
)
def test_look__says_why_a_run_did_not_finish(error, state, words, folder):
    def stop(record):
        raise error

    with pytest.raises(type(error)):
        run(folder, Observer.of(on_round_end=stop))
    seen = look(folder)
    assert (seen.state, seen.progress.round, seen.progress.rounds) == (state, 1, 2)
    assert words in seen.line
    assert not (folder / "progress.json").exists()


def test_look__a_run_whose_process_was_killed_does_not_count_as_running(folder):
    pytest.importorskip("fcntl", reason="this system has no file locks")
    left = []

    def copy(event):
        left.append((folder / "progress.json").read_bytes())
        left.append((folder / "manifest.json").read_bytes())

    run(folder, Observer.of(on_client_end=copy))
    (folder / "progress.json").write_bytes(left[-2])
    (folder / "manifest.json").write_bytes(left[-1])
    assert look(folder).state == "killed"
    with holding(folder):
        assert look(folder).state == "running"


def test_is_held__takes_the_lock_from_nobody(folder):
    pytest.importorskip("fcntl", reason="this system has no file locks")
    assert not is_held(folder)
    with holding(folder):
        assert is_held(folder)
        assert is_held(folder)
    assert not is_held(folder)
    with holding(folder):
        pass


def test_watch__prints_the_state_once_for_each_change_and_ends_with_the_run(folder, capsys):
    """Without a terminal. Here it is the run that goes on while the command waits."""
    run(folder, rounds=1)

    def first_look(record):
        with pytest.raises(Stop):
            watch_to_the_end([folder], sleep=stop)

    def stop(seconds):
        raise Stop

    run(folder, Observer.of(on_round_end=first_look), rounds=2)
    (first,) = capsys.readouterr().out.splitlines()
    assert first.startswith("round ")
    (folder / "manifest.json").rename(folder / "later")  # as it was a moment ago, held by another process
    manifest = json.loads((folder / "later").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "status": "running"}))
    waits = []
    held = holding(folder)
    held.__enter__()

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            (folder / "later").replace(folder / "manifest.json")
            held.__exit__(None, None, None)

    watch_to_the_end([folder], sleep=wait)
    assert len(waits) == 3
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["round", "finished"]


def test_watch__of_a_folder_of_runs_has_a_line_for_each(folder, capsys):
    run(folder, rounds=1)
    other = folder.parent / "other"
    other.mkdir()
    run(other, rounds=2)
    (folder.parent / "notes").mkdir()
    watch_to_the_end([folder.parent])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["mine", "other"]
    assert "round 2/2" in lines[1]


def marked(folder, **facts):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, **facts}))


@pytest.mark.parametrize(
    ("status", "code"), [("finished", 0), ("failed", 1), ("interrupted", 1), pytest.param("running", 1, id="killed")]
)
def test_watch__exits_with_1_if_the_run_did_not_finish(status, code, folder, potluck):
    run(folder, rounds=1)
    marked(folder, status=status, reason="ValueError: no luck")
    outcome = potluck(f"watch {folder}")
    assert (outcome.code, outcome.err) == (code, "")
    assert potluck(f"watch {folder} --once").code == 0


def test_watch__of_a_folder_counts_what_ran_while_it_was_watched(folder, potluck):
    run(folder, rounds=1)
    marked(folder, status="failed")
    now = folder.parent / "now"
    now.mkdir()
    run(now, rounds=1)
    assert potluck(f"watch {folder.parent}").code == 0  # an older failure
    marked(now, status="running")
    held = holding(now)
    held.__enter__()

    def fail(seconds):
        marked(now, status="failed", reason="ValueError: no luck")
        held.__exit__(None, None, None)

    assert not watch_to_the_end([folder.parent], sleep=fail)


def text_of(group, width=120):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(group)
    return console.export_text()


def test_shown__of_one_run_lists_its_rounds(folder):
    result = run(folder)
    text = text_of(screen([look(folder)]))
    for record in result.rounds:
        assert f"{record.loss_local:.4g}" in text
    assert "accuracy, own test parts" in text
    assert "finished  round 2/2" in text


def test_shown__of_many_runs_has_those_that_go_on_first(folder):
    run(folder, rounds=1)
    ended = look(folder)
    many = [replace(ended, name=f"run-{number}") for number in range(30)]
    many[3] = replace(ended, name="lively", state="running", progress=Progress(round=1, rounds=9, phase="training"))
    text = text_of(screen(many, height=16))
    assert text.index("lively") < text.index("run-29")
    assert "client 0/0" in text
    assert "and 20 more that have ended" in text


@pytest.mark.parametrize("make", [lambda place: None, lambda place: place.mkdir(), lambda place: place.write_text("")])
def test_watch__what_is_no_run_is_one_line(make, potluck, tmp_path):
    make(tmp_path / "nothing")
    outcome = potluck("watch nothing")
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("potluck: nothing: expected a folder that `potluck run` made")
    assert outcome.err.count("\n") == 1


def test_watch__a_damaged_run_is_one_line(folder, potluck):
    run(folder, rounds=1)
    (folder / "manifest.json").write_text("{")
    outcome = potluck(f"watch {folder}")
    assert outcome.code == 2
    assert "cannot be read" in outcome.err


def test_watch_starts_without_torch():
    code = "import sys, potluck.cli.watch; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_progress_of_another_version_does_not_count(folder):
    (folder / "progress.json").write_text(json.dumps({"later": 1}))
    assert Progress.read(folder) is None


def test_watch__a_finished_run_with_other_records_is_damaged_and_not_finished(folder, potluck):
    run(folder, rounds=1)
    place = folder / "rounds.jsonl"
    place.write_text(place.read_text().replace('"accuracy_personal_worst": 0', '"accuracy_personal_worst": 1'))
    outcome = potluck(f"watch {folder}")
    assert outcome.code == 1
    assert "damaged" in outcome.out
    assert "rounds.jsonl, line 1, is damaged: it is not what the run wrote" in outcome.out
    place.write_text("")
    assert "rounds.jsonl, which is missing or empty, is damaged" in potluck(f"watch {folder} --once").out
