"""What the command line says of itself: help, version, completion, and advice after the usual slips."""

import importlib.metadata
import os
import subprocess
import sys
from functools import cache

import pytest
import typer
from rich.text import Text

import potluck as package
from potluck.cli import completion
from potluck.cli.commands import app
from potluck.data.datasets import list_datasets
from potluck.data.partition import get_partition, list_partitions
from potluck.experiment.settings.keys import settings_of
from potluck.experiment.settings.schema import FederationConfig, RunConfig
from potluck.methods import get_method, list_methods
from potluck.models import list_models


@cache
def commands():
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="potluck")
    return {name: group.get_command(context, name) for name in group.list_commands(context)}


@pytest.mark.parametrize("name", commands())
def test_help__explains_every_argument_and_option(name, potluck):
    shown = potluck(f"{name} --help")
    assert shown.code == 0
    flat = " ".join(shown.out.replace("│", " ").split())
    for parameter in commands()[name].params:
        assert parameter.help, f"{name}: {parameter.name} has no help"
        assert Text.from_markup(parameter.help).plain in flat, f"{name}: {parameter.name} is not explained"


def test_help__shows_what_an_argument_is_for(potluck):
    assert "Dotted keys, such as run.rounds=10." in potluck("run --help").out


@pytest.mark.parametrize("start", [["-m", "potluck"], ["-c", "from potluck.cli import main; main()"]])
def test_version__is_printed_by_the_command_and_by_the_package(start):
    done = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"potluck {package.__version__}\n"), done.stderr


def test_version__is_the_distributions():
    assert importlib.metadata.version("potluck") == package.__version__


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("run --seed 3", "--seed: `potluck run` has no such option; settings are keys: run.seed=3"),
        ("run fedavg --rounds 5", "settings are keys: run.rounds=5"),
        ("run --rounds=5", "settings are keys: run.rounds=5"),
        ("run --lr", "settings are keys: method.training.lr=VALUE"),
        ("run --batch-size 32", "settings are keys: method.training.batch_size=32"),
        ("run --model mlp2", "settings are keys: federation.models=mlp2"),
        ("run --method fedavg", "potluck run fedavg"),
        ("run --fast", "settings are keys, such as run.rounds=10"),
        ("compare --seed 3", "run.seed=3; nearest option: --seeds"),
        ("report --seed 3", "`potluck report` has no such option"),
        ("keys --days many", "--days: 'many' is not a valid integer"),
        ("fedavg run.rounds=2", "which is a method; to run it: potluck run fedavg run.rounds=2"),
        ("mine.toml run.seed=1", "to run it: potluck run mine.toml run.seed=1"),
        ("run.seed=1", "to run it: potluck run run.seed=1"),
        ("rnu", "there is no command 'rnu'; nearest: run"),
        ("run lr=0.1", "unknown key lr; nearest: method.training.lr"),
        ("run training.lr=0.1", "unknown key training; nearest: method.training.lr"),
        ("run method.lr=0.1", "unknown key method.lr; nearest: method.training.lr"),
        ("run federation.rounds=3", "unknown key federation.rounds; nearest: run.rounds"),
        ("run run.lr=3", "unknown key run.lr; nearest: method.training.lr"),
        ("run fedprox mu=0.1", "unknown key mu; nearest: method.mu"),
        ("run run.sede=3", "unknown key run.sede; nearest: run.seed"),
    ],
)
def test_slips__are_answered_with_what_to_type(line, advice, potluck):
    outcome = potluck(line)
    assert outcome.code == 2
    assert advice in outcome.err
    assert outcome.err.count("\n") == 1


def test_advice__offers_keys_that_are_accepted(potluck):
    """What `run --rounds 5` is answered with can be typed; only the data are missing then."""
    given = potluck("run --rounds 5").err.split()[-1]
    assert "none.npz" in potluck(f"run {given} federation.dataset=./none.npz").err


COMPLETED = [
    ("potluck sho", "show"),
    ("potluck show fedi", "fedin"),
    ("potluck show preresnet1", "preresnet152 preresnet18"),
    ("potluck run fedpro", "fedproto fedprox"),
    ("potluck run fedprox method.m", "method.mu="),
    ("potluck run run.see", "run.seed="),
    ("potluck run fedavg federation.cl", "federation.classes= federation.clients="),
    ("potluck list da", "datasets"),
    ("potluck report ru", "runs/one"),
    ("potluck run --resume ru", "runs/one"),
]


@pytest.mark.parametrize(("line", "expected"), COMPLETED)
def test_completion__offers_names_keys_and_runs(line, expected, potluck, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "manifest.json").touch()
    (tmp_path / "runs" / "other").mkdir()
    monkeypatch.setenv("_POTLUCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert potluck("").out.split() == expected.split()


def test_completion__does_not_wait_for_torch():
    code = (
        "import os, sys\nfrom potluck.cli import main\ntry:\n    main()\nfinally:\n"
        "    print(*({'torch', 'numpy', 'pydantic'} & set(sys.modules)), file=sys.stderr)"
    )
    asked = {"_POTLUCK_COMPLETE": "complete_bash", "COMP_WORDS": "potluck run fedprox method.m", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | asked
    )
    assert (done.stdout.strip(), done.stderr.strip()) == ("method.mu=", "")


def test_completion__knows_all_names():
    assert completion.methods() == list_methods()
    assert completion.models() == sorted(list_models())
    assert completion.datasets() == list_datasets()
    assert completion.partitions() == list_partitions()


@pytest.mark.rotates
@pytest.mark.parametrize("method", list_methods())
def test_completion__knows_all_keys_of_a_method(method):
    tables = {
        "federation": FederationConfig,
        "federation.partition": get_partition("dirichlet"),
        "method": get_method(method),
        "run": RunConfig,
    }
    expected = [f"{table}.{one.key}" for table, cls in tables.items() for one in settings_of(cls)]
    assert sorted(completion.config_keys(method)) == sorted(expected)


def test_help__brackets_stand_for_themselves(potluck):
    assert "a table [sweep]." in " ".join(potluck("sweep --help").out.split())


def test_without_a_command__the_help_is_all_that_is_said(potluck):
    outcome = potluck("")
    assert "Usage: potluck" in outcome.out + outcome.err
    assert not (outcome.out + outcome.err).rstrip().endswith("potluck:")


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("run.track=nothing", "run.track: expected 'tensorboard' or 'mlflow' or 'wandb' or 'trackio', found 'nothing'"),
        ("federation.models=3", "federation.models.0: expected text, found 3"),
        ("federation.server_model=3", "federation.server_model: expected text, found 3"),
    ],
)
def test_a_wrong_value_is_named_by_its_key_alone(potluck, assignment, said):
    outcome = potluck(f"run local {assignment}")
    assert outcome.code == 2
    assert f"arguments: {said}" in outcome.err


NET = """
import torch
from torch import nn


class Wrapped(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))

    def forward(self, inputs):
        return {"logits": self.net(inputs)}


def net(num_classes, input_shape):
    return Wrapped(num_classes)
"""


def test_check__of_a_net_says_what_is_wrong_with_the_shape_that_it_came_furthest_with(potluck, tmp_path):
    (tmp_path / "nets.py").write_text(NET)
    outcome = potluck("check nets.py:net")
    assert outcome.code == 1
    assert "'dict' object has no attribute 'shape'" in outcome.out
