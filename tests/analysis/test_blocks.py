"""Pairs are runs that differ in nothing but the method; everything else makes blocks of a comparison."""

import csv
import json

import pytest

from potluck.analysis.blocks import check_reference, places_of
from potluck.analysis.compare import compare, unequal
from potluck.analysis.export import caption, comma_separated, latex, markdown, table_of
from potluck.analysis.names import Planned
from potluck.analysis.read import read_run
from potluck.core.ground.errors import ConfigError
from potluck.records import ACCURACY

SCORES = {"local": (0.5, 0.6, 0.7), "fedavg": (0.6, 0.72, 0.78), "fedprox": (0.6, 0.74, 0.76)}


@pytest.fixture
def stored(store_run, make_round):
    """A function that stores a run of one evaluated round and returns it; `change` replaces text in its config.toml."""

    def make(method, seed=0, score=0.5, *, change=("", ""), **facts):
        rounds = [make_round(1, personal=[score] * 4)]
        folder = store_run(f"{len(made)}", rounds, method=method, seed=seed, planned=1, **facts)
        made.append(folder)
        config = folder / "config.toml"
        assert change[0] in config.read_text()
        config.write_text(config.read_text().replace(*change))
        return read_run(folder)

    made = []
    return make


IID = ('name = "dirichlet"\nalpha = 0.5', 'name = "iid"')
PATHOLOGICAL = ('name = "dirichlet"\nalpha = 0.5', 'name = "pathological"\nclasses = 2')
PARTITIONS = {"partition=dirichlet, alpha=0.5": ("", ""), "partition=iid": IID}
THIRD = {"partition=pathological, classes=2": PATHOLOGICAL}


@pytest.fixture
def grid(stored):
    """Three methods on three partitions with three seeds, partition by partition."""
    return [
        stored(method, seed, score + 0.05 * place, change=change)
        for place, change in enumerate([*PARTITIONS.values(), *THIRD.values()])
        for method, scores in SCORES.items()
        for seed, score in enumerate(scores)
    ]


def test_methods_are_compared_within_a_partition_and_only_tests_that_are_made_count(grid):
    rows = compare(grid)
    assert [(row.name, row.difference is None) for row in rows] == [
        ("local", True),
        ("fedavg", False),
        ("fedprox", False),
    ] * 3
    assert {row.against for row in rows} == {"local"}
    assert [row.block for row in rows[::3]] == [*PARTITIONS, *THIRD]
    for row in rows:
        if row.difference:
            assert row.difference.by.mean == pytest.approx(0.1)  # also across partitions it would be 0.15 or 0.2
    alone = [row.difference.p for row in compare(grid[:9]) if row.difference]
    together = [row.difference.p for row in rows if row.difference]
    assert min(together) == pytest.approx(3 * min(alone))  # 6 tests in place of 2, not 8


def test_the_reference_is_the_same_method_in_every_block(grid):
    rows = compare(grid, against="fedprox")
    assert [row.name for row in rows if row.difference is None] == ["fedprox"] * 3
    only = compare(grid, against="fedprox, partition=iid")
    assert [(row.name, row.block) for row in only if row.difference] == [
        ("local", "partition=iid"),
        ("fedavg", "partition=iid"),
    ]
    assert "difference from fedprox within a seed and block (own test parts)" in caption(rows, "personal")


@pytest.mark.parametrize(
    "change",
    [
        ("clients = 4", "clients = 5"),
        ("width = 8", "width = 9"),
        ("validation_fraction = 0.1", "validation_fraction = 0.2"),
        ("evaluate_every = 2", "evaluate_every = 1"),
        ("rounds = 1", "rounds = 2"),
        ('dataset = "digits"', 'dataset = "mnist"'),
        ("common_test = true", "common_test = true\ncohort_fraction = 0.5"),
    ],
)
def test_whatever_else_differs_is_no_pair(change, stored):
    runs = [stored(method, seed) for method in ("local", "fedavg") for seed in (0, 1)]
    others = [stored("fedprox", seed, change=change) for seed in (0, 1)]
    rows = compare([*runs, *others])
    assert [row.difference is None for row in rows] == [True, False, True]
    assert rows[2].block != rows[0].block
    assert rows[2].against == "fedprox"


def test_how_a_machine_computes_and_where_numbers_go_makes_no_block(stored):
    change = ("threads = 1", 'threads = 2\nexecutor = "workers"\nworkers = 2\ntrack = "tensorboard"\nmemory_gib = 1.0')
    rows = compare([stored("local"), stored("fedavg", change=change)])
    assert {row.block for row in rows} == {""}


def test_a_run_that_is_shorter_is_no_pair(stored, store_run, make_round):
    rounds = [make_round(1, personal=[0.5] * 4)]
    half = read_run(store_run("half", rounds, method="fedavg", planned=6))
    whole = read_run(store_run("whole", method="local", planned=6))
    assert [row.block for row in compare([half, whole])] == ["1 round", "6 rounds"]


def test_the_same_name_of_other_data_is_no_pair_and_said(stored):
    facts = [{"data_checksum": "a" * 32, "partition_fingerprint": "c"}, {"data_checksum": "b" * 32}]
    runs = [stored("local", **facts[0]), stored("fedavg", **facts[1])]
    assert compare(runs)[1].difference is None
    assert unequal(runs) == {"data_checksum": {"local": "a" * 12, "fedavg": "b" * 12}}
    divided = stored("fedprox", **{**facts[0], "partition_fingerprint": "d"})
    assert compare([runs[0], divided])[1].difference is None


def test_settings_of_the_method_make_no_block(stored):
    faster = [stored("local", seed, change=("lr = 0.005", "lr = 0.05")) for seed in (0, 1)]
    rows = compare([*(stored("local", seed) for seed in (0, 1)), *faster])
    assert [(row.block, row.name) for row in rows] == [("", "local, lr=0.005"), ("", "local, lr=0.05")]


def test_a_reference_is_named_by_as_much_as_says_which_one(stored):
    runs = [stored("local"), *(stored("fedavg", change=("lr = 0.005", f"lr = {lr}")) for lr in (0.1, 0.2))]
    assert compare(runs, against="lr=0.2")[2].difference is None
    assert compare(runs, against="fedavg, lr=0.1")[1].difference is None
    with pytest.raises(ConfigError, match=r"'fedavg' is several experiments; compare .*: fedavg, lr=0\.1; fedavg, lr="):
        compare(runs, against="fedavg")


def test_planned_runs_have_the_places_that_they_will_have(grid):
    planned = [Planned(run.config) for run in grid]
    assert places_of(planned) == places_of(grid)
    check_reference(planned, "fedavg")
    with pytest.raises(ConfigError, match="no experiment 'fedadam' to compare with; expected one of these: fedavg"):
        check_reference(planned, "fedadam")


def test_tables_have_a_part_for_each_block(grid):
    table = table_of(compare(grid), ACCURACY)
    assert [(block, [row[0] for row in rows]) for block, rows in table.parts] == [
        (block, list(SCORES)) for block in (*PARTITIONS, *THIRD)
    ]
    assert "| **partition=iid** |  |" in markdown(table)
    assert r"\multicolumn{6}{l}{\emph{partition=iid}} \\" in latex(table)
    assert latex(table).count(r"\midrule") == 3


def test_blocks_are_together_whatever_the_order_of_runs(grid):
    shuffled = [run for seed in range(3) for run in grid[seed::3]]
    by_method = sorted(shuffled, key=lambda run: run.method)
    table = table_of(compare(by_method), ACCURACY)
    assert [block for block, _ in table.parts] == [*PARTITIONS, *THIRD]


def test_every_setting_is_a_column(grid):
    lines = list(csv.DictReader(comma_separated(compare(grid)).splitlines()))
    assert len(lines) == 9
    first = lines[4]
    assert (first["experiment"], first["block"]) == ("fedavg, partition=iid", "partition=iid")
    for key, value in {
        "method.name": "fedavg",
        "method.training.lr": "0.005",
        "federation.partition.name": "iid",
        "federation.partition.alpha": "",
        "federation.dataset": "digits",
        "federation.clients": "4",
        "federation.models": "small, large(width=8)",
        "run.rounds": "1",
        "run.threads": "1",
    }.items():
        assert first[key] == value
    assert "run.seed" not in first


def test_what_differs_between_blocks_is_in_their_names_and_not_said_again(grid):
    assert unequal(grid) == {}


def test_rows_keep_the_order_of_their_runs(grid):
    by_method = sorted(grid, key=lambda run: run.method)
    assert [(row.name, row.block) for row in compare(by_method)] == [
        (method, block) for method in sorted(SCORES) for block in (*PARTITIONS, *THIRD)
    ]


def test_the_manifest_of_an_earlier_version_says_nothing_of_data(stored):
    runs = [stored("local"), stored("fedavg", data_checksum="a" * 32)]
    assert json.loads((runs[0].folder / "manifest.json").read_text()).get("data_checksum") is None
    assert compare(runs)[1].difference is not None
