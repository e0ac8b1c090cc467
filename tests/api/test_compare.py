"""`potluck.compare` and `potluck.report`: the command line's table, from Python."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

import potluck
from potluck import ConfigError
from potluck.core.ground.errors import CheckpointError
from potluck.methods import get_method

KEYS = {"clients": 2, "models": [{"name": "cnn2", "width": 4}], "rounds": 1}
SETTINGS = {"federation.train_fraction": 0.1, "method.training.epochs": 1}
ALONE = {**SETTINGS, "run.workers": 1}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_compare__puts_finished_runs_side_by_side_as_frame_text_and_file(here):
    runs = [potluck.run(method, settings=ALONE, to="runs", **KEYS) for method in ("local", "fedavg")]
    comparison = potluck.compare(*runs, target=0.01)
    assert list(comparison.frame["experiment"]) == ["local", "fedavg"]
    assert list(comparison.frame["personal"]) == [run.evaluation.value("personal") for run in runs]
    assert "| local | 1 |" in comparison.text
    assert "Means over clients; difference from local within a seed (own test parts)" in comparison.text
    assert "<td>fedavg</td>" in comparison._repr_html_()
    comparison.save("table.csv")
    assert len(list(csv.reader(Path("table.csv").read_text().splitlines()))) == 3
    by_folder = potluck.compare(runs[0].folder, str(runs[1].folder), target=0.01)
    assert by_folder.text == comparison.text
    of_parent = potluck.compare("runs", target=0.01).frame  # in the order of the folders' names
    assert sorted(of_parent["experiment"]) == ["fedavg", "local"]


@pytest.mark.slow
def test_report__writes_a_page_for_several_runs_and_one_into_a_runs_own_folder(here):
    runs = [potluck.run(method, settings=ALONE, to="runs", **KEYS) for method in ("local", "fedavg")]
    assert potluck.report(*runs).read_text().startswith("<!doctype html>")
    assert potluck.report(runs[0]).parent == runs[0].folder


def test_compare__refuses_in_one_line_before_anything_runs(here):
    in_memory = potluck.run("local", settings=ALONE, **KEYS)
    for what, keys, expected in (
        ((), {}, "compare: name methods, TOML files or runs"),
        (("nomethod",), {}, "unknown method 'nomethod'"),
        ((get_method("local")(), "fedavg"), {}, r"compare: found Local\(.*so name a method, such as 'fedavg'"),
        ((get_method("local"),), {}, "compare: found <class .*so name a method"),
        (
            ("local",),
            {"lr": 0.1},
            r"potluck\.compare: lr is none of its arguments; settings are given by key: settings=",
        ),
        (("local",), {"measure": "best"}, "measure 'best': expected one of validation, personal"),
        (("local",), {"seeds": 0}, "seeds: expected a whole number of at least 1, found 0"),
        (("local",), {"models": [lambda: None]}, "compare: found model-0, an object of this program"),
        ((in_memory,), {}, "has no folder to read; run it with to='runs'"),
        ((str(here),), {"rounds": 3}, "run.rounds: finished runs are compared as they are"),
    ):
        with pytest.raises(ConfigError, match=expected) as refused:
            potluck.compare(*what, **keys)
        assert "\n" not in str(refused.value)
    with pytest.raises(CheckpointError, match="found no run with a finished round"):
        potluck.compare(str(here))
    with pytest.raises(ConfigError, match="has no folder to read"):
        potluck.report(in_memory)
    for keys, expected in (
        ({"measure": "best"}, "measure 'best': expected one of validation, personal"),
        ({"smooth": 0}, "smooth: expected a whole number of at least 1, found 0"),
        ({"smooth": 1.5}, "smooth: expected a whole number of at least 1, found 1.5"),
    ):
        with pytest.raises(ConfigError, match=expected):
            potluck.report(str(here), **keys)
    assert not (here / "runs").exists()


SCRIPT = f"""
import potluck
print("the script runs")
found = potluck.compare("local", "fedavg", seeds=2, processes=2, settings={SETTINGS!r}, **{KEYS!r})
print(found.frame["seeds"].tolist(), len(found.failed))
"""


@pytest.mark.slow
def test_compare__runs_what_is_missing_from_a_script_without_a_guard(here):
    Path("script.py").write_text(SCRIPT)
    for _ in range(2):
        done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=True)
        assert done.stdout == "the script runs\n[2, 2] 0\n"
        assert len(list((here / "runs").glob("*/manifest.json"))) == 4
