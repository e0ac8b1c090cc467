import json
import logging
from dataclasses import replace

import pytest

from potluck.analysis.read import read_runs
from potluck.analysis.tables import warnings_of
from potluck.engine.executors.choice import ChosenExecutor
from potluck.engine.executors.metered import Meter
from potluck.engine.executors.sequential import Sequential
from potluck.experiment.budgets.apart import Belongings
from potluck.experiment.budgets.watch import BudgetWatch
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.budget import Budget
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.watching.observers import RoundStart, RunStart
from potluck.records import BUDGETS

MIB = 2**20


@pytest.fixture(scope="module")
def federation():
    return assemble(experiment_for("fedavg", ["federation.clients=2"])).federation


def begin(watch, folder, rounds_done=0):
    watch.on_run_start(RunStart("fedavg", 9, rounds_done, 2, 2, None, folder=folder))


def play(watch, number, *meters):
    """A round in which client 1 made calls that took this."""
    watch.on_round_start(RoundStart(number, (0, 1)))
    for meter in meters:
        watch.note(1, meter)
    watch.on_round_end(type("Record", (), {"round": number}))


def test_a_round_takes_the_most_memory_of_its_calls_and_the_seconds_of_all(federation, tmp_path, caplog):
    own = Belongings.of(federation, 1).nbytes
    watch = BudgetWatch([Budget((1,), "pi-4", memory_mib=8 + own / MIB, seconds=5.0)], federation)
    begin(watch, tmp_path)
    play(watch, 1, Meter(8 * MIB, 2.0, 0, 0, 0), Meter(3 * MIB, 3.0, 0, 0, 0))
    assert not (tmp_path / BUDGETS).exists()
    assert not caplog.messages
    play(watch, 2, Meter(9 * MIB, 2.0, 0, 0, 0), Meter(3 * MIB, 4.0, 0, 0, 0))
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("round 2: client 1 (pi-4) exceeded its budget: memory")
    assert caplog.messages[1].endswith("seconds 6 of 5 s, 1 too much")


def test_a_client_is_warned_of_once_and_its_rounds_are_counted_over_a_resumed_run(federation, tmp_path, caplog):
    for done in (0, 2):
        watch = BudgetWatch([Budget((1,), seconds=1.0)], federation)
        begin(watch, tmp_path, done)
        play(watch, done + 1, Meter(0, 2.0, 0, 0, 0))
        play(watch, done + 2, Meter(0, 3.0, 0, 0, 0))
    assert len(caplog.messages) == 1
    [line] = json.loads((tmp_path / BUDGETS).read_text())["lines"]
    assert line == "client 1 exceeded its budget in 4 rounds, first in round 1: seconds 3 of 1 s, 2 too much at most"


def test_an_undone_round_does_not_count(federation, tmp_path, caplog):
    watch = BudgetWatch([Budget((1,), seconds=3.0)], federation)
    begin(watch, tmp_path)
    watch.note(1, Meter(0, 2.0, 0, 0, 0))
    play(watch, 1, Meter(0, 2.0, 0, 0, 0))
    assert not caplog.messages


def test_what_stacks_is_not_measured_and_says_so(federation, tmp_path):
    watch = BudgetWatch([Budget((1,), seconds=3.0)], federation)
    choice = ChosenExecutor(Sequential(), "stacked", 1, "")
    assert watch.watched(choice, lambda: None) is choice
    begin(watch, tmp_path)
    [line] = json.loads((tmp_path / BUDGETS).read_text())["lines"]
    assert line == watch.problem
    assert "clients' work is stacked" in line


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["sequential", "workers"])
def test_a_run_says_in_log_and_report_who_exceeds_and_computes_the_same(tmp_path, caplog, executor):
    """Client 1's network alone has 34 MiB of weights, and Adam two moments and a gradient of each."""
    models = "federation.models=['mlp2', {name='mlp2', width=3000}]"
    plain = experiment_for(
        "local", ["federation.clients=2", models, "run.rounds=1", f"run.executor={executor}", "run.workers=2"]
    )
    budgets = tuple(Budget((client,), memory_mib=100.0) for client in (0, 1))
    lines = []
    caplog.set_level(logging.WARNING)
    for name, made in (("plain", plain), ("watched", replace(plain, run=replace(plain.run, budgets=budgets)))):
        folder = tmp_path / name
        folder.mkdir()
        execute(prepare(made, assemble(made), folder), made, folder)
        lines.append((folder / "rounds.jsonl").read_bytes())
    assert lines[0] == lines[1]
    assert [one for one in caplog.messages if "exceeded" in one] == [
        one for one in caplog.messages if one.startswith("round 1: client 1 exceeded its budget: memory")
    ]
    [said] = warnings_of(read_runs([tmp_path / "watched"]).runs)
    assert said.startswith("client 1 exceeded its budget in 1 round, first in round 1: memory")
    assert not (tmp_path / "plain" / BUDGETS).exists()
