from types import SimpleNamespace

import pytest

from potluck.core.ground.errors import ConfigError
from potluck.experiment.budgets.assign import assign
from potluck.experiment.budgets.candidates import Candidate
from potluck.experiment.budgets.limits import Taken, limits, seconds_on
from potluck.experiment.settings.budget import Budget
from potluck.experiment.settings.schema import ModelSpec

MIB = 2**20
TAKEN = Taken(10 * MIB, 3.0, 20.0, 5_000_000, 2_500_000, 7 * MIB, 300 * MIB)
LARGE, MIDDLE, SMALL = (Candidate(ModelSpec(name, {}), 1.0, size) for name, size in (("l", 3), ("m", 2), ("s", 1)))


def taken(memory):
    return Taken(memory * MIB, 1.0, 20.0, 0, 0, MIB, 300 * MIB)


class Stand:
    """Measurements that are known, for candidates and clients."""

    candidates = (LARGE, MIDDLE, SMALL)

    def __init__(self, found, sizes=(1,)):
        self.federation = SimpleNamespace(sites={id: SimpleNamespace(train=range(n)) for id, n in enumerate(sizes)})
        self.found, self.asked = found, []

    def take(self, candidate, client):
        self.asked.append((candidate, client))
        return self.found[candidate]


def test_seconds_are_those_of_the_device_and_of_its_messages():
    budget = Budget((0,), gflops=5.0, down_mbit=20.0, up_mbit=10.0)
    assert seconds_on(budget, TAKEN) == 3 * 20 / 5 + 40 / 20 + 20 / 10
    assert seconds_on(Budget((0,)), TAKEN) == 3


def test_a_limit_is_what_the_budget_states():
    found = limits(Budget((0,), memory_mib=9.0, disk_mib=7.0), TAKEN)
    assert [(one.name, one.has, one.needs, one.is_kept) for one in found] == [
        ("memory", 9.0, 10.0, False),
        ("disk", 7.0, 7.0, True),
    ]


def test_the_largest_that_fits_is_chosen_and_the_next_says_why():
    bench = Stand({LARGE: taken(9), MIDDLE: taken(6), SMALL: taken(3)})
    [found] = assign(bench, [Budget((0,), memory_mib=5.0)])
    assert found.chosen.candidate == SMALL
    assert found.why == "m: memory 6 of 5 MiB, 1 too much"
    [found] = assign(bench, [Budget((0,), memory_mib=9.0)])
    assert (found.chosen.candidate, found.why) == (LARGE, "the largest")


def test_what_cannot_train_does_not_fit():
    bench = Stand({LARGE: "it cannot train: no piece", MIDDLE: taken(6), SMALL: taken(3)})
    [found] = assign(bench, [Budget((0,))])
    assert (found.chosen.candidate, found.why) == (MIDDLE, "l: it cannot train: no piece")


def test_of_clients_with_one_budget_the_one_with_most_examples_is_measured():
    bench = Stand({LARGE: taken(1)}, sizes=(5, 9, 2))
    [found] = assign(bench, [Budget((0, 1, 2), memory_mib=5.0)])
    assert (found.client, bench.asked) == (1, [(LARGE, 1)])


def test_clients_that_nothing_fits_are_named_with_what_the_nearest_lacks():
    bench = Stand({LARGE: taken(9), MIDDLE: "killed", SMALL: taken(3)}, sizes=(1, 1))
    with pytest.raises(ConfigError) as refused:
        assign(bench, [Budget((0,), "pi-4", memory_mib=2.0), Budget((1,), memory_mib=99.0)])
    assert str(refused.value).startswith(
        "budgets: no candidate fits client 0 (pi-4): nearest is s: memory 3 of 2 MiB, 1 too much. Add a smaller model"
    )
