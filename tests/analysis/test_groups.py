import pytest

from potluck.analysis.groups import enumerated, group, heading
from potluck.analysis.read import read_run


@pytest.fixture
def runs(store_run):
    """A function that stores and reads several runs, given as keyword arguments of each."""

    def stored(*tables):
        return [read_run(store_run(f"run{index}", **table)) for index, table in enumerate(tables)]

    return stored


def test_runs_that_differ_in_their_seed_are_one_experiment(runs):
    found = group(runs({"seed": 2}, {"seed": 0}, {"method": "fedavg", "seed": 0}))
    assert [(members.label, members.seeds, members.rounds) for members in found] == [
        ("fedin", (0, 2), 6),
        ("fedavg", (0,), 6),
    ]


def test_experiments_of_one_method_are_told_apart_by_what_differs(runs):
    found = group(runs({"lr": 0.1}, {"lr": 0.2}, {"method": "fedavg", "lr": 0.3}))
    assert [members.label for members in found] == ["fedin, lr=0.1", "fedin, lr=0.2", "fedavg"]


def test_experiments_on_several_data_sets_name_theirs(runs):
    found = group(runs({"dataset": "mnist"}, {"dataset": "digits"}, {"method": "fedavg"}))
    assert [members.label for members in found] == ["fedin on mnist", "fedin on digits", "fedavg on digits"]


def test_an_interrupted_run_is_not_averaged_with_longer_ones(runs, make_round):
    stored = runs({"seed": 0}, {"seed": 1, "rounds": [make_round(1), make_round(2)]}, {"seed": 2})
    assert [(members.label, members.seeds) for members in group(stored)] == [
        ("fedin, 6 rounds", (0, 2)),
        ("fedin, 2 rounds", (1,)),
    ]


def test_of_a_repeated_seed_the_last_run_counts(runs):
    stored = runs({"seed": 0}, {"seed": 0}, {"seed": 1})
    (members,) = group(stored)
    assert [run.name for run in members.runs] == ["run1", "run2"]


def test_a_heading_names_few_methods_and_counts_many(runs):
    few = runs({"method": "fedavg"}, {"method": "fedin", "dataset": "mnist"})
    assert heading(group(few)) == "fedavg and fedin on digits and mnist"


def test_a_heading_counts_many_methods(runs):
    assert heading(group(runs(*({"method": f"m{index}"} for index in range(5))))) == "5 methods on digits"


@pytest.mark.parametrize(("words", "text"), [([1], "1"), (["a", "b"], "a and b"), ([1, 2, 3], "1, 2 and 3")])
def test_words_are_enumerated(words, text):
    assert enumerated(words) == text
