"""`potluck compare` and `potluck sweep`, from the command line to the table."""

import csv
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from potluck.cli.compare import run_names_of
from potluck.experiment.settings.presets import experiment_for
from potluck.methods import local

SMALL = "federation.clients=3 federation.train_fraction=0.1 run.rounds=2 \"federation.models=[{name='cnn2',width=4}]\""
SWEEP = """\
[federation]
clients = 3
train_fraction = 0.1
models = [{ name = "cnn2", width = 4 }]

[run]
rounds = 3

[sweep]
seeds = 2
"method.name" = ["local", "fedavg"]
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("compare", "compare: name methods, TOML files or folders of runs"),
        ("compare nomethod", "unknown method 'nomethod'"),
        (
            "compare fedavg --measure best",
            "--measure best: expected one of validation, personal, pooled, common, global",
        ),
        ("compare fedavg --table t.xls", "t.xls: a table is written as .md, .csv, .tex"),
        ("compare empty", "empty: found no run with a finished round"),
        ("compare empty run.rounds=2", "run.rounds=2: finished runs are compared as they are; name a method too"),
        ("compare s.toml --on s.toml", "s.toml: with --on name methods"),
        ("compare fedavg --on plain.toml run.rounds=x", "plain.toml, fedavg: run.rounds"),
        ("sweep none.toml", "none.toml: no such file"),
        ("sweep plain.toml", "plain.toml: it has no table [sweep]"),
        ("sweep s.toml sweep.seeds=0", "s.toml: sweep.seeds: expected how many"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_runs(potluck, tmp_path, line, expected):
    (tmp_path / "empty").mkdir()
    (tmp_path / "s.toml").write_text(SWEEP)
    (tmp_path / "plain.toml").write_text("[run]\nrounds = 2\n")
    outcome = potluck(line)
    assert outcome.code == 2
    assert expected in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_compare__runs_what_is_missing_and_prints_one_table(potluck, tmp_path):
    potluck(f"run fedavg {SMALL} run.seed=1")
    command = f"compare local fedavg {SMALL} --seeds 2 --target 0.05 --table t.csv"
    first = potluck(command)
    assert first.code == 0, first.err
    assert first.err.count(": finished") == 4
    assert len(list((tmp_path / "runs").glob("*/manifest.json"))) == 4  # the run that was there is one of them
    for expected in (
        "accuracy, after the last evaluated round",
        "local",
        "fedavg",
        "difference",
        "until accuracy 5.0 %",
    ):
        assert expected in first.out
    lines = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    assert [(line["experiment"], line["seeds"]) for line in lines] == [("local", "2"), ("fedavg", "2")]
    again = potluck(command)
    assert (again.out, len(list((tmp_path / "runs").glob("*/manifest.json")))) == (first.out, 4)
    stored = potluck("compare runs --against fedavg")
    assert stored.code == 0
    assert "difference from fedavg within a seed" in stored.out


@pytest.mark.slow
def test_compare__no_name_is_cut_off_where_there_is_no_terminal(potluck, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    method = "a_method_whose_name_is_longer_than_most"
    (tmp_path / f"{method}.py").write_text(Path(local.__file__).read_text())
    for name in (f"{method}.py", "local"):
        assert potluck(f"run {name} {SMALL} run.rounds=1 federation.clients=2").code == 0
    outcome = potluck("compare runs --target 0.05")
    assert outcome.code == 0, outcome.err
    heading, _, row, *_ = outcome.out.splitlines()[2:]
    assert "own test parts (%)" in heading
    assert row.split()[0] == method
    assert "until accuracy 5.0 %, own test parts" in outcome.out


@pytest.mark.slow
def test_compare__of_another_federation_has_a_part_of_its_own(potluck, tmp_path):
    (tmp_path / "f.toml").write_text(SWEEP[: SWEEP.index("[sweep]")])
    potluck(f"run local {SMALL} federation.clients=2 run.rounds=3")
    outcome = potluck("compare fedavg runs --on f.toml --to other")
    assert outcome.code == 0, outcome.err
    assert "clients=2" in outcome.out
    assert "clients=3" in outcome.out
    assert "difference" not in outcome.out  # there is no pair


@pytest.mark.slow
def test_compare__one_that_cannot_run_stays_visible(potluck, tmp_path):
    outcome = potluck(f"compare local fedmd {SMALL}")
    assert outcome.code == 1
    assert "Not finished: fedmd, seed 0: fedmd cannot run here: it needs public data" in outcome.out
    assert "local" in outcome.out
    assert [path.parent.name.split("-")[2] for path in (tmp_path / "runs").glob("*/manifest.json")] == ["local"]


@pytest.mark.slow
def test_sweep__killed_and_started_again_ends_with_the_same_table(potluck, tmp_path):
    (tmp_path / "s.toml").write_text(SWEEP)
    whole = potluck("sweep s.toml --to whole --table whole.csv")
    assert whole.code == 0, whole.err
    command = [sys.executable, "-c", "from potluck.cli import main; main()", *shlex.split("sweep s.toml run.rounds=3")]
    for stop in (signal.SIGKILL, signal.SIGINT):
        sweep = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True)
        began = time.monotonic()
        while not list((tmp_path / "runs" / "s").glob("*/rounds.jsonl")) and time.monotonic() - began < 120:
            time.sleep(0.05)
        sweep.send_signal(stop)
        sweep.communicate(timeout=120)
        deadline = time.monotonic() + 60  # killed, it could not end its processes: they end when they next report
        while processes_in(sweep.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not processes_in(sweep.pid)
    rest = potluck("sweep s.toml --table rest.csv")
    assert rest.code == 0, rest.err
    assert without_times(tmp_path / "rest.csv") == without_times(tmp_path / "whole.csv")
    assert len(list((tmp_path / "runs" / "s").glob("*/manifest.json"))) == 4


def test_names__of_planned_runs_are_those_of_their_tables():
    experiments = [experiment_for("fedavg", [f"method.training.lr={rate}"]) for rate in (0.1, 0.2)]
    assert run_names_of([*experiments, experiment_for("local", ["run.seed=3"])]) == [
        "fedavg, lr=0.1, seed 0",
        "fedavg, lr=0.2, seed 0",
        "local, seed 3",
    ]


def processes_in(session):
    """The living processes of a session."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != session:
            try:
                if os.getsid(int(entry)) == session:
                    found.append(int(entry))
            except ProcessLookupError:
                pass
    return found


def without_times(path):
    lines = list(csv.DictReader(path.read_text().splitlines()))
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]


@pytest.mark.slow
def test_sweep__tunes_at_each_point_and_shows_the_best(potluck, tmp_path):
    search = '[sweep.search]\ntrials = 2\ntogether = 2\n"method.training.lr" = [0.0, 0.01]\n'
    (tmp_path / "s.toml").write_text(
        SWEEP.replace("seeds = 2", "seeds = 1").replace("rounds = 3", "rounds = 4") + search
    )
    outcome = potluck("sweep s.toml")
    assert outcome.code == 0, outcome.err
    assert "Best of local: method.training.lr=" in outcome.out
    again = potluck("sweep s.toml")
    assert again.out == outcome.out
