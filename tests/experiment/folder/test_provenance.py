"""What a resumed run stood on before: as real commits of Potluck leave it, and which rounds are noted."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import potluck
from potluck.experiment.folder.provenance import MAY_CHANGE, earlier

AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@b")
TINY = (
    *("federation.clients=2", "federation.train_fraction=0.1", "federation.models=[{name='cnn2',width=2}]"),
    *("run.common_test=false", "run.executor=sequential"),
)


class Checkout:
    """A checkout of Potluck's code in which one can commit, and run what is there."""

    def __init__(self, place):
        self.place, self.commits = place, []
        shutil.copytree(Path(potluck.__file__).parent, place / "potluck", ignore=shutil.ignore_patterns("__pycache__"))
        self._git("init", "-q")

    def _git(self, *words):
        done = subprocess.run(
            ["git", "-C", str(self.place), *words], capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    def commit(self):
        self._git("add", ".")
        self._git(*AUTHOR, "commit", "-q", "--allow-empty", "-m", "Other code")
        self.commits.append(self._git("rev-parse", "HEAD"))

    def __call__(self, *words):
        environment = {**os.environ, "PYTHONPATH": str(self.place), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        command = [sys.executable, "-m", "potluck", *words]
        done = subprocess.run(
            command, cwd=self.place.parent, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr


def manifest(folder):
    return json.loads((folder / "manifest.json").read_bytes())


@pytest.mark.slow
def test_a_run_that_another_commit_resumes_says_which_rounds_each_has_made(tmp_path):
    code, runs = Checkout(tmp_path / "checkout"), tmp_path / "runs"
    code.commit()
    code("run", "local", *TINY, "run.rounds=1")
    (folder,) = runs.iterdir()
    code("run", "--resume", str(folder), "run.rounds=2")
    assert "earlier" not in manifest(folder)  # the same code goes on

    code.commit()
    code("run", "--resume", str(folder), "run.rounds=3")
    first, second = code.commits
    (noted,) = manifest(folder)["earlier"]
    assert (noted["last_round"], noted["potluck_commit"], noted["potluck_dirty"]) == (2, first, False)
    assert noted["packages"] == manifest(folder)["packages"]
    assert manifest(folder)["potluck_commit"] == second
    code("report", str(folder), "--to", str(tmp_path / "report"))
    told = f"{first[:12]} to round 2, then {second[:12]}"
    assert all(told in (tmp_path / "report" / name).read_text() for name in ("report.md", "report.html"))

    code.commit()
    code("run", "--resume", str(folder), "--branch", "run.rounds=4")
    (branched,) = set(runs.iterdir()) - {folder}
    noted = [(facts["last_round"], facts["potluck_commit"]) for facts in manifest(branched)["earlier"]]
    assert noted == [(2, first), (3, second)]
    assert manifest(branched)["potluck_commit"] == code.commits[2]


def of(commit, **more):
    return {**dict.fromkeys(MAY_CHANGE), "potluck_commit": commit, **more}


@pytest.mark.parametrize(
    ("before", "rounds", "expected"),
    [
        pytest.param({}, 0, [], id="a new run"),
        pytest.param(of("b"), 5, [], id="nothing changed"),
        pytest.param(of("a"), 0, [], id="no round had finished"),
        pytest.param(of("a"), 5, [(5, "a")], id="other code"),
        pytest.param(of("b", machine="another"), 5, [(5, "b")], id="another machine"),
        pytest.param({**of("c"), "earlier": [{"last_round": 2, **of("a")}]}, 5, [(2, "a"), (5, "c")], id="a third"),
        pytest.param({**of("c"), "earlier": [{"last_round": 5, **of("a")}]}, 5, [(5, "a")], id="one without a round"),
        pytest.param({**of("c"), "earlier": [{"last_round": 5, **of("b")}]}, 5, [], id="back, with none in between"),
        pytest.param({**of("c"), "earlier": [{"last_round": 2, **of("b")}]}, 5, [(2, "b"), (5, "c")], id="back again"),
    ],
)
def test_only_what_has_finished_rounds_is_noted(before, rounds, expected):
    found = earlier({"status": "interrupted", **before}, of("b"), rounds)
    assert [(facts["last_round"], facts["potluck_commit"]) for facts in found] == expected
