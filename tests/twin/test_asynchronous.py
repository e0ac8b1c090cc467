"""Runs whose rounds are asynchronous, by the clock of a twin."""

import re
from itertools import islice, pairwise
from pathlib import Path

import pytest

from potluck.analysis.read import costs, read_run
from potluck.cli.twin import course_of
from potluck.core.ground.errors import CheckpointError, ConfigError
from potluck.engine.rounds.asynchrony.departures import Departures
from potluck.engine.rounds.asynchrony.rules import Asynchrony
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.asynchrony import check_asynchronous
from potluck.experiment.running.foresee import foresee
from potluck.experiment.settings.resolve import resolve
from potluck.methods import get_method, list_methods
from potluck.testing.checks.asynchrony import can_be_asynchronous
from potluck.twin.devices import Fleet
from potluck.twin.simulate import simulate_asynchronously, summed

from ..carried_out import carried_out, digest_of

DEVICES = [
    {"clients": "0", "gflops": 0.002, "up_mbit": 1.0},
    {"clients": "1", "gflops": 0.1, "watts": 3.0},
    {"clients": "*", "gflops": 1.0, "down_mbit": 10.0},
]
RULES = [{"rule": "fedbuff", "buffer": 2}, {"rule": "fedasync"}, {"rule": "fedat", "tiers": 2}]


def tree(rounds=3, method="fedavg", rule=RULES[0], devices=DEVICES, **run):
    federation = {
        "dataset": "digits",
        "train_fraction": 0.1,
        "clients": 4,
        "models": [{"name": "cnn2", "width": 4}, {"name": "cnn3", "width": 4}],
    }
    run = {"rounds": rounds, "executor": "sequential", **run}
    if rule:
        run |= {"rounds_close": {"asynchronous": rule}, "twin": {"devices": devices}}
    return {"federation": federation, "method": {"name": method}, "run": run}


def contents(folder):
    return [(folder / name).read_bytes() for name in ("rounds.jsonl", "costs.jsonl", "clients.jsonl", "twin.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["rule"])
@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_it_is_deterministic_and_resumes_to_the_same_bytes(tmp_path, rule, method):
    whole = digest_of(tmp_path / "whole", tree(7, method, rule))
    assert digest_of(tmp_path / "parts", tree(2, method, rule)) != whole
    carried_out(tmp_path / "parts", tree(4, method, rule))
    assert digest_of(tmp_path / "parts", tree(7, method, rule)) == whole
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedproto", "local"])
def test_a_buffer_for_everybody_is_a_run_whose_rounds_wait(tmp_path, method):
    rule = {"rule": "fedbuff", "buffer": 4, "staleness": 0}
    assert digest_of(tmp_path / "a", tree(method=method, rule=rule)) == digest_of(
        tmp_path / "b", tree(method=method, rule=None)
    )


@pytest.mark.slow
def test_workers_carry_it_out_to_the_same_bytes(tmp_path):
    one = digest_of(tmp_path / "one", tree(4))
    assert digest_of(tmp_path / "two", tree(4, executor="workers", workers=2)) == one
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.slow
def test_nobody_waits_for_the_slowest_and_its_reply_counts_when_it_comes(tmp_path):
    carried_out(tmp_path / "a", tree(30, evaluate_every=30))
    rounds = course_of(read_run(tmp_path / "a"))
    turns = [turn for timed in rounds for _, turn in timed.turns]
    by_client = {client: [turn for turn in turns if turn.client == client] for client in range(4)}
    assert len(by_client[0]) < len(by_client[1]) < len(by_client[2])
    assert summed(rounds).idle_share == 0.0
    for turns in by_client.values():
        assert all(before.finish <= after.start for before, after in pairwise(turns))
    replied = [record.replied for record in read_run(tmp_path / "a").rounds]
    assert sum(0 in clients for clients in replied) == len(by_client[0])
    assert all(len(clients) == 2 for clients in replied)


@pytest.mark.slow
def test_bytes_and_work_are_counted_when_the_round_of_a_reply_closes(tmp_path):
    carried_out(tmp_path / "a", tree(6))
    run = read_run(tmp_path / "a")
    for record in run.rounds:
        lines = [line for line in costs(run) if line.round == record.round and line.client is not None]
        assert sorted(line.client for line in lines) == record.replied
        assert sum(line.bytes_up for line in lines) == record.bytes_up


@pytest.mark.slow
def test_who_leaves_in_the_middle_has_worked_in_vain_and_is_asked_again(tmp_path):
    devices = [{"clients": "0", "gflops": 0.0002, "available": "0-0.0002, 0.0003-24"}, {"gflops": 0.002}]
    carried_out(tmp_path / "a", tree(8, devices=devices, tolerate_failures=True))
    run = read_run(tmp_path / "a")
    turns = [turn for timed in course_of(run) for _, turn in timed.turns if turn.client == 0]
    assert turns[0].fate == "left"
    assert turns[0].finish == pytest.approx(0.72)
    left = next(record for record in run.rounds if "0" in record.failed)
    assert left.failed["0"].startswith("its device left in the middle of its work")
    later = [turn.start for turn in turns[1:]]
    assert all(start >= 1.08 for start in later)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["rule"])
def test_what_is_foreseen_is_what_a_run_takes(tmp_path, rule):
    experiment = resolve(tree(12, rule=rule, evaluate_every=12))
    federation, run = assemble(experiment).federation, experiment.run
    known, ids = foresee(experiment, federation), range(4)
    departures = Departures(run.rounds_close.asynchronous, 4)
    course = run.course(Fleet(run.twin.devices, ids))
    order = lambda number: run.order(ids, number)  # noqa: E731
    foreseen = list(islice(simulate_asynchronously(course, departures, known.load, order), 12))
    carried_out(tmp_path / "a", tree(12, rule=rule, evaluate_every=12))
    assert foreseen[-1].end == pytest.approx(course_of(read_run(tmp_path / "a"))[-1].end, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("fedin", r"FedIN cannot have it: its messages differ from round to round \(features\)"),
        ("fedmd", "FedMD cannot have it: its round asks clients more than once"),
        ("scaffold", "Scaffold's stale replies cannot be moved, since dc, dy in them is no new version"),
    ],
)
def test_a_method_that_cannot_have_it_is_refused_in_one_line_before_anything_trains(method, why):
    tables = tree(method=method)
    tables["federation"]["public"] = "holdout"
    experiment = resolve(tables)
    with pytest.raises(ConfigError, match=why) as found:
        check_asynchronous(experiment.method, assemble(experiment).federation, experiment.run)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({"rounds_close": {"asynchronous": RULES[0], "quorum": 2}}, "quorum: expected 1 where rounds are asynchronous"),
        ({"rounds_close": {"asynchronous": RULES[0], "over_select": 0.5}}, "over_select: expected 0 where rounds are"),
        ({"outlier_factor": 10.0}, "outlier_factor: expected 0 where rounds are asynchronous"),
        ({"cohort_fraction": 0.5, "rounds_close": {"asynchronous": RULES[2]}}, "cohort_fraction: expected 1 with"),
        ({"rounds_close": {"asynchronous": {"buffer": 5}}}, r"asynchronous\.buffer: expected at most the 4 clients"),
        ({"rounds_close": {"asynchronous": {"rule": "fedat"}}}, r"asynchronous\.tiers: expected at most the 4 clients"),
    ],
)
def test_what_does_not_go_with_it_is_refused(run, expected):
    tables = tree()
    tables["run"] |= run
    with pytest.raises(ConfigError, match=expected):
        resolve({**tables, "run": {key: value for key, value in tables["run"].items() if value is not None}})


def test_a_stale_reply_is_moved_by_default():
    assert Asynchrony().moves
    assert not Asynchrony(staleness=0).moves


@pytest.mark.slow
def test_the_guide_lists_the_methods_that_can_have_it():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "asynchronous.md").read_text()
    listed = {
        head: re.findall(r"`(\w+)`", re.search(rf"^{re.escape(head)}: (.*?)\n\n", page, re.DOTALL | re.MULTILINE)[1])
        for head in ("By every rule", "By `fedbuff` with `staleness = 0`")
    }
    found = {head: [] for head in listed}
    for name in list_methods():
        for head, rule in zip(found, (Asynchrony(buffer=4), Asynchrony(buffer=4, staleness=0)), strict=True):
            if can_be_asynchronous(get_method(name), rule):
                found[head].append(name)
                break
    assert listed == found


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_its_rule(tmp_path):
    carried_out(tmp_path / "a", tree(1))
    with pytest.raises(CheckpointError, match=r'run\.asynchronous was \{"rule": "fedbuff".* and is not set'):
        carried_out(tmp_path / "a", tree(2, rule=None, twin=tree(1)["run"]["twin"]))
    with pytest.raises(CheckpointError, match=r"run\.asynchronous\.buffer was 2 and is 3"):
        carried_out(tmp_path / "a", tree(2, rule={"rule": "fedbuff", "buffer": 3}))
    carried_out(tmp_path / "b", tree(1, rule=None, twin=tree(1)["run"]["twin"]))
    with pytest.raises(CheckpointError, match=r"last\.json does not say who is under way"):
        carried_out(tmp_path / "b", tree(2))
