"""Rounds to a target, the speed-up over FedAvg, and curves over what was spent."""

import pytest

from potluck.analysis.costs import COSTS, over_cost
from potluck.analysis.groups import group
from potluck.analysis.read import read_run
from potluck.analysis.speed import speeds


@pytest.fixture
def curve(store_run, make_round):
    """A stored run with this metric after each of its rounds."""

    def stored(name, values, **facts):
        rounds = [make_round(number, personal=[value] * 4) for number, value in enumerate(values, 1)]
        return read_run(store_run(name, rounds, planned=len(values), **facts))

    return stored


def test_speeds__are_rounds_of_fedavg_over_those_of_the_experiment_seed_by_seed(curve):
    runs = [
        curve("a0", [0.1, 0.2, 0.3, 0.6], method="fedavg", seed=0),
        curve("a1", [0.1, 0.2, 0.6, 0.6], method="fedavg", seed=1),
        curve("b0", [0.1, 0.7, 0.6, 0.6], method="fedprox", seed=0),
        curve("b1", [0.6, 0.2, 0.1, 0.6], method="fedprox", seed=1),
        curve("c0", [0.1, 0.2, 0.3, 0.4], method="local", seed=0),
    ]
    fedavg, fedprox, local = speeds(runs, 0.6, "personal")
    assert (fedavg.text, fedavg.speedup, fedavg.against) == ("3.5", None, None)
    assert fedprox.rounds.mean == 1.5
    assert fedprox.speedup.mean == pytest.approx((4 / 2 + 3 / 1) / 2)
    assert (local.text, local.reached, local.speedup) == (">4", 0, None)


def test_speeds__need_fedavg_in_the_same_setting(curve):
    runs = [
        curve("a", [0.1, 0.6], method="fedavg", dataset="digits"),
        curve("b", [0.6, 0.6], method="fedprox", dataset="mnist"),
    ]
    assert [one.against for one in speeds(runs, 0.6, "personal")] == [None, None]


def test_over_cost__adds_up_what_rounds_cost(curve):
    run = curve("a", [0.1, 0.4, 0.6], method="fedavg")
    sent = [(record.bytes_down + record.bytes_up) / 10**6 for record in run.rounds]
    (members,) = group([run])
    found = {cost.name: over_cost(members, cost, "personal") for cost in COSTS}
    assert found["rounds"] == [(1, 0.1), (2, 0.4), (3, 0.6)]
    assert found["megabytes"] == [
        (pytest.approx(sum(sent[:end])), value) for end, value in ((1, 0.1), (2, 0.4), (3, 0.6))
    ]
    assert found["seconds"] == []  # the run has no timings
