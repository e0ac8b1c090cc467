"""`potluck new`: what it writes works at once, and it harms nothing."""

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.resources import files

import pytest

from potluck.cli.new import NEXT

METHOD_CHECKS = "sends_what or declares_its or documentation or limit or frozen"  # the others are FedAvg's own


def made(potluck, kind, name="my_part"):
    outcome = potluck(f"new {kind} {name}")
    assert outcome.code == 0, outcome.err
    return [line.strip() for line in outcome.out.splitlines()[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEXT)
def test_new__writes_a_test_that_passes(kind, potluck, tmp_path):
    commands = made(potluck, kind)
    assert commands[0] == "python -m pytest test_my_part.py"
    chosen = ["-k", METHOD_CHECKS] if kind == "method" else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_part.py", *chosen],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_new__says_how_to_install_pytest_where_it_is_not(potluck, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pytest" else found(name))
    assert made(potluck, "model")[0] == "pip install pytest && python -m pytest test_my_part.py"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in NEXT if kind != "method"])
def test_new__prints_commands_that_can_be_typed(kind, potluck):
    _, check, run = made(potluck, kind)
    for command in (check, f"{run} federation.clients=2 run.rounds=1 run.workers=1"):
        outcome = potluck(command.removeprefix("potluck "))
        assert outcome.code == 0, outcome.out + outcome.err
    shown = potluck("show my_part.py:my_part")
    assert (shown.code, "my_part.py:my_part" in shown.out) == (0, True)


@pytest.mark.slow
def test_new__writes_a_method_that_passes_all_checks_and_runs(potluck):
    _, check, run = made(potluck, "method")
    outcome = potluck(check.removeprefix("potluck "))
    assert outcome.code == 0, outcome.out
    assert potluck(f"{run.removeprefix('potluck ')} federation.clients=2 run.rounds=1 run.workers=1").code == 0
    assert "My" in (potluck("show my_part.py").out)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEXT)
def test_new__writes_files_that_ruff_accepts(kind, potluck, tmp_path):
    if (ruff := shutil.which("ruff", path=f"{sys.prefix}/bin")) is None:
        pytest.skip("ruff is not installed")
    made(potluck, kind, "my_own_name")
    for words in (
        ["check", "--isolated", "--select", "E,F,I,B,UP", "--line-length", "120"],
        ["format", "--check", "--isolated", "--line-length", "120"],
    ):
        done = subprocess.run([ruff, *words, "."], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("new method 3d", "expected a name of small letters"),
        ("new method my-method", "expected a name of small letters"),
        ("new method class", "expected a name of small letters"),
        ("new method MyMethod", "expected a name of small letters"),
        ("new method ../mine", "expected a name of small letters"),
        ("new method fedavg", "Potluck has a method of this name"),
        ("new model resnet10", "Potluck has a model of this name"),
        ("new partition iid", "Potluck has a partition of this name"),
        ("new data torch", "a Python module has this name"),
        ("new metric statistics", "a Python module has this name"),
        ("new metods mine", "expected one of method, model, data, partition, metric; nearest: method"),
    ],
)
def test_new__refuses_names_that_would_not_work(line, problem, potluck, tmp_path):
    outcome = potluck(line)
    assert (outcome.code, problem in outcome.err) == (2, True), outcome.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", ["mine.py", "test_mine.py"])
def test_new__overwrites_nothing(there, potluck, tmp_path):
    (tmp_path / there).write_text("mine")
    outcome = potluck("new model mine")
    assert (outcome.code, f"{there} is there already" in outcome.err) == (2, True)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(there, "mine")]


def test_new__has_its_templates_in_the_package():
    names = {place.name for place in (files("potluck.cli") / "templates").iterdir()}
    assert {f"{kind}.py" for kind in NEXT} | {f"test_{kind}.py" for kind in NEXT} <= names


BROKEN = '''"""Broken: FedAvg whose clients fail.

Nobody. 2026.

Symbols
    w         state.weights

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    equals fedavg
    descends the gradient

Departures from the paper
    None: there is no paper.
"""

from dataclasses import dataclass

from potluck import fl
from potluck.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Broken(FedAvg):
    """Fails."""

    variants = {}

    @fl.on_client
    def local_update(self, client, message):
        return {}["b"]
'''


@pytest.mark.slow
def test_check__names_file_and_line_once_for_all_checks_that_fail_for_one_reason(potluck, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    outcome = potluck("check broken.py")
    assert outcome.code == 1
    place = f"{tmp_path / 'broken.py'}, line {BROKEN.split('return')[0].count(chr(10)) + 1}"
    told = [line for line in outcome.out.splitlines() if place in line]
    assert told
    assert all(line.count("broken.py, line") == 1 for line in told)
    assert len(told) == len({line.strip() for line in told})
    assert "as in " in outcome.out


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def net(num_classes, input_shape):\n    return nn.Linear(3, 7)\n", "mat1 and mat2|expected"),
        (
            "def net(num_classes, input_shape):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(7))\n",
            r"returns shape \(4, 7\) for inputs \(1, 8, 8\); expected \(4, 10\)",
        ),
        ("def metric(outputs, targets):\n    return outputs[:, 0] - outputs.mean()\n", "is .*, over the whole"),
        (
            "def cut(targets, clients, key):\n    return list(torch.randperm(len(targets)).tensor_split(clients))\n",
            "two calls with one key give other parts",
        ),
    ],
)
def test_check__tries_parts_of_a_file(code, problem, potluck, tmp_path):
    import re

    (tmp_path / "mine.py").write_text(f"import torch\nfrom torch import nn\n\n{code}")
    outcome = potluck(f"check mine.py:{code.split('(')[0].removeprefix('def ')}")
    assert outcome.code == 1
    assert re.search(problem, outcome.out), outcome.out
