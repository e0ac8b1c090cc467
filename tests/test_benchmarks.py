"""The benchmarks' settings are experiments that the package accepts; what they find is not tested here."""

import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from potluck.engines.computing import PLAIN

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def mini_table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import mini_table

    yield mini_table
    del sys.modules["mini_table"]


@pytest.fixture
def table():
    return tomllib.loads((BENCHMARKS / "mini_table.toml").read_text())


@pytest.mark.slow
def test_every_row_is_an_experiment_of_its_own(mini_table, table):
    entries = list(mini_table.entries(table))
    assert len({entry.folder_name for entry in entries}) == len(entries) == len(table["rows"]) * len(table["seeds"])


@pytest.mark.slow
def test_rows_differ_in_nothing_but_method_models_and_what_their_names_say(mini_table, table):
    def without(tree, *names):
        return {name: value for name, value in tree.items() if name not in names}

    def common(entry):
        tree = entry.experiment.tree()
        named = ("computing",) if entry.row.endswith(", bf16") else ()
        federation = without(tree["federation"], "models", "server_model", "capacities")
        return federation, {"computing": asdict(PLAIN)} | without(tree["run"], *named)

    first, *others = [common(entry) for entry in mini_table.entries(table) if entry.seed == 0]
    assert all(other == first for other in others)


def test_a_finished_run_is_not_played_again_and_its_results_are_written(
    mini_table, table, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(mini_table, "RESULTS", tmp_path / "results" / "table.csv")
    table["common"]["federation"].update(dataset="digits", clients=2, train_fraction=0.1)
    table["common"]["run"].update(rounds=2, evaluate_every=1)
    table["families"] = {"small": {"title": "Small", "federation": {"models": ["cnn2"]}, "training": {"epochs": 1}}}
    table["rows"] = [{"name": "Alone", "family": "small", "method": {"name": "local"}}]
    (entry,) = [entry for entry in mini_table.entries(table) if entry.seed == 1]
    assert not mini_table.is_finished(entry, tmp_path)
    mini_table.play_entry(entry, tmp_path)
    assert mini_table.is_finished(entry, tmp_path)
    mini_table.play_all([entry], tmp_path, processes=1)
    assert capsys.readouterr().out == "1 of 1 runs are finished\n"
    mini_table.write_results([entry], tmp_path)
    mini_table.print_table(table)
    header, line = (tmp_path / "results" / "table.csv").read_text().splitlines()
    assert header.startswith("family,row,seed,rounds,common,personal,global")
    assert line.startswith("small,Alone,1,2,0.")
    assert "| Alone | 1 | " in capsys.readouterr().out
