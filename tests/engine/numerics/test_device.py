"""Which device a run computes on; `on_pretend_device.py` tests what networks do there, in a process of its own."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from potluck.core.ground.errors import ConfigError
from potluck.engine.executors.choice import choose_executor
from potluck.engine.executors.workers import Workers, cores
from potluck.engine.numerics.device import CPU, device_named
from potluck.engine.numerics.numerics import PLAIN, Numerics
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.methods import get_method
from potluck.testing.worlds import World, toy_federation

ELSEWHERE = "cuda:7"  # which no machine of the tests has


def net():
    return nn.Sequential(nn.Unflatten(1, (1, 10)), nn.Conv1d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(40, 3))


@pytest.mark.parametrize(
    ("marked", "named"),
    [
        ("not slow", ""),
        ("slow", "Sequential"),
        ("slow", "Stacked"),
        ("slow", "option"),
    ],
)
@pytest.mark.slow
def test_networks_on_a_device_in_a_process_of_its_own(marked, named, pytestconfig):
    """A process in which torch knows another device starts threads for it, and can fork no more workers."""
    file = Path(__file__).with_name("on_pretend_device.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, "-k", named, str(file)]
    command += ["--all-turns"] if pytestconfig.getoption("--all-turns") else []
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]


# What is asked for, and what is there


@pytest.mark.parametrize("name", ["", "gpu please", "cuda:x", "CUDA"])
def test_a_device_that_torch_could_not_have_is_refused_where_it_is_named(name):
    with pytest.raises(ConfigError, match="device: expected 'cpu', 'auto', 'cuda'"):
        Numerics(device=name)


def test_a_device_that_is_not_here_is_refused_before_a_folder_is_made(tmp_path):
    config = RunConfig(rounds=1, computing=Numerics(device=ELSEWHERE))
    with pytest.raises(ConfigError, match=f"run.computing.device: found '{ELSEWHERE}', which this machine"):
        Run(get_method("local")(), toy_federation(World()), config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_auto_is_what_torch_has():
    found = device_named("auto")
    assert found == (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else CPU)


@pytest.mark.parametrize(
    ("requested", "count"),
    [
        ({"name": "workers", "workers": None}, cores()),
        ({"name": "auto", "workers": 2}, 2),
        ({"name": "stacked", "workers": 2}, 2),
    ],
)
def test_workers_on_a_device_are_requested_and_started_anew(requested, count):
    choice = choose_executor(**requested, threads=1, nets=[net()], device=torch.device("cuda"))
    assert isinstance(choice.executor, Workers)
    assert choice.executor.anew
    assert choice.processes == count


def test_auto_stays_in_this_process_on_a_device_and_says_why():
    choice = choose_executor("auto", None, 1, [net()], torch.device("cuda"))
    assert (choice.name, choice.processes, choice.reason) == ("sequential", 1, "networks are computed on cuda")


def test_precision_and_layout_keep_clients_apart_and_the_device_does_not():
    assert replace(PLAIN, device="auto").stacks
    assert not Numerics("bf16").stacks
