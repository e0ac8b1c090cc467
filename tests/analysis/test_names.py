import dataclasses

import pytest

from potluck.analysis.compare import compare
from potluck.analysis.names import labels, run_names
from potluck.analysis.plots.curves import draw_curves
from potluck.analysis.read import read_run
from potluck.analysis.report import report_text

LONG = ("method__a_long_setting", "method__another_long_setting", "method__a_third")


@pytest.fixture
def runs(store_run):
    """A function that stores and reads several runs, given as keyword arguments of each."""

    def stored(*tables):
        return [read_run(store_run(f"run{index}", **table)) for index, table in enumerate(tables)]

    return stored


def with_settings(run, **values):
    """A run of another experiment: keys are dotted with double underscores."""
    config = {name: dict(table) for name, table in run.config.items()}
    for key, value in values.items():
        *above, name = key.split("__")
        table = config
        for part in above:
            table[part] = dict(table.get(part, {}))
            table = table[part]
        table[name] = value
    return dataclasses.replace(run, config=config, experiment_id=str(sorted(values.items())))


def test_labels__a_method_alone_needs_no_more_than_its_name(runs):
    assert labels(runs({}, {"seed": 1}, {"method": "fedavg", "lr": 0.1})) == ["fedin", "fedin", "fedavg"]


def test_labels__settings_of_one_name_are_told_apart_by_more_of_their_keys(runs):
    (run,) = runs({})
    one = with_settings(run, method__training__lr=0.1, method__server__lr=1.0)
    other = with_settings(run, method__training__lr=0.2, method__server__lr=2.0)
    assert labels([one, other]) == ["fedin, training.lr=0.1, server.lr=1.0", "fedin, training.lr=0.2, server.lr=2.0"]


def test_labels__a_partition_is_named_by_its_table(runs):
    (run,) = runs({})
    iid = with_settings(run, federation__partition={"name": "iid"})
    assert labels([run, iid]) == ["fedin, partition=dirichlet, alpha=0.5", "fedin, partition=iid"]


def test_labels__of_many_settings_those_are_named_that_tell_the_experiments_apart(runs):
    (run,) = runs({})
    grid = [
        with_settings(run, **dict.fromkeys(LONG, "x" * 20 + word), method__mu=mu, method__lr=mu * 2)
        for word, mu in (("a", 0.1), ("a", 0.2), ("b", 0.1), ("b", 0.2))
    ]
    found = labels(grid)
    assert len(set(found)) == 4
    assert found[0] == "fedin, a_long_setting=xxxxxxxxxxxxxxxxxxxxa, mu=0.1"


def test_labels__experiments_that_no_setting_tells_apart_have_their_hash(runs):
    stored = runs({"dataset": "/a/leaves.npz"}, {"dataset": "/b/leaves.npz"})
    assert labels(stored) == [f"fedin {run.experiment_id}" for run in stored]


def test_run_names__are_method_settings_and_seed_and_no_two_are_equal(runs):
    stored = runs({"seed": 0}, {"seed": 1}, {"seed": 1}, {"method": "fedavg", "seed": 0})
    assert run_names(stored) == ["fedin, seed 0", "fedin, seed 1, run 1", "fedin, seed 1, run 2", "fedavg, seed 0"]


def test_run_names__leave_out_a_seed_that_is_the_same_for_all(runs):
    assert run_names(runs({"lr": 0.1}, {"lr": 0.2})) == ["fedin, lr=0.1", "fedin, lr=0.2"]
    assert run_names(runs()) == []


def test_report_comparison_and_picture_call_experiments_by_the_same_names(runs):
    stored = runs({"lr": 0.1}, {"lr": 0.2}, {"method": "fedavg"})
    found = {"fedin, lr=0.1", "fedin, lr=0.2", "fedavg"}
    assert {row.label for row in compare(stored)} == found
    assert {text.get_text() for text in draw_curves(stored).axes[0].texts} == found
    assert all(f"| {name} |" in report_text(stored) for name in found)
