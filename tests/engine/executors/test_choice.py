import threading

import pytest
import torch
from torch import nn

from potluck.core.ground.errors import ConfigError
from potluck.engine.executors.choice import choose_executor
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers

MLP = nn.Linear(2, 2)
CNN = nn.Sequential(nn.Conv2d(1, 1, 3))


@pytest.fixture
def machine(monkeypatch):
    """Pretends to be a machine."""

    def pretend(cores=4, threads=1, fork=True, accelerator=False):
        for place in ("workers", "choice"):
            monkeypatch.setattr(f"potluck.engine.executors.{place}.cores", lambda: cores)
        methods = ["fork", "spawn"] if fork else ["spawn"]
        monkeypatch.setattr("potluck.engine.executors.workers.get_all_start_methods", lambda: methods)
        monkeypatch.setattr(threading, "active_count", lambda: threads)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)

    return pretend


def test_auto_takes_all_cores(machine):
    machine(cores=4)
    choice = choose_executor("auto", None, 1, [CNN])
    assert isinstance(choice.executor, Workers)
    assert choice.facts == {"executor": "workers", "processes": 4, "executor_reason": "4 cores"}
    assert choose_executor("auto", 3, 1, [CNN]).processes == 3


@pytest.mark.parametrize(
    ("facts", "torch_threads", "reason"),
    [
        ({"cores": 1}, 1, "there is one core"),
        ({"fork": False}, 1, "this system cannot fork"),
        ({"threads": 2}, 1, "other threads run in this process, whose locks a fork would copy"),
        ({"accelerator": True}, 1, "torch has an accelerator, and a fork cannot train after a process that trained"),
        ({}, 2, "run.threads is 2"),
    ],
)
def test_auto_stays_in_this_process_and_says_why(machine, facts, torch_threads, reason):
    machine(**facts)
    choice = choose_executor("auto", None, torch_threads, [CNN])
    assert isinstance(choice.executor, Sequential)
    assert choice.facts == {"executor": "sequential", "processes": 1, "executor_reason": reason}


def test_auto_stacks_small_nets_without_convolutions(machine):
    machine(cores=2)
    choice = choose_executor("auto", None, 1, [MLP, MLP])
    assert choice.facts == {
        "executor": "stacked",
        "processes": 2,
        "executor_reason": "all nets are small and without convolutions; 2 cores",
    }
    assert choose_executor("auto", None, 1, [MLP, CNN]).name == "workers"
    assert choose_executor("auto", None, 1, [MLP, nn.Linear(500, 501)]).name == "workers"
    machine(cores=1)
    assert isinstance(choose_executor("auto", None, 1, [MLP]).executor, Stacked)


def test_a_name_decides_whatever_the_nets(machine):
    machine(cores=2)
    assert choose_executor("sequential", None, 1, [MLP]).facts == {
        "executor": "sequential",
        "processes": 1,
        "executor_reason": "run.executor is sequential",
    }
    assert choose_executor("workers", None, 1, [MLP]).name == "workers"
    assert choose_executor("stacked", None, 1, [CNN]).facts["executor"] == "stacked"
    machine(cores=2, threads=3)
    assert choose_executor("workers", None, 1, [MLP]).processes == 2


def test_workers_need_a_system_that_forks(machine):
    machine(fork=False)
    with pytest.raises(ConfigError, match="cannot fork; expected 'sequential' or 'auto'"):
        choose_executor("workers", None, 1, [MLP])


@pytest.mark.parametrize("accelerator", [False, True])
def test_requested_workers_are_started_anew_where_a_fork_would_not_train(machine, accelerator):
    machine(accelerator=accelerator, fork=accelerator is False)
    choice = choose_executor("workers", None, 1, [CNN])
    assert (choice.executor.anew, choice.processes) == (accelerator, 4)
