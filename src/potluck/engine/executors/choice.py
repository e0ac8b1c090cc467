"""The choice of a run's executor, and the reason for it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from potluck.core.ground.errors import ConfigError
from potluck.engine.executors import Executor
from potluck.engine.executors.ray import RayActors
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked, always, pays, small_products
from potluck.engine.executors.workers import Workers, can_fork, cores, why_not
from potluck.engine.numerics.device import CPU

ExecutorName = Literal["auto", "sequential", "workers", "stacked", "ray"]


@dataclass(frozen=True)
class ChosenExecutor:
    """An executor, and its description in the run's manifest.

    Attributes:
        name: how clients' work is carried out: one by one, or stacked.
        processes: the number of processes; 0 for one for each core of the cluster.
        reason: why this executor was chosen.
    """

    executor: Executor
    name: str
    processes: int
    reason: str

    @property
    def facts(self) -> dict[str, str | int]:
        """For the manifest."""
        return {"executor": self.name, "processes": self.processes, "executor_reason": self.reason}


def choose_executor(
    name: ExecutorName, workers: int | None, threads: int, nets: Iterable[nn.Module], device: torch.device = CPU
) -> ChosenExecutor:
    """The executor with this name.

    "auto" stacks clients if all nets are small and without convolutions, and uses workers if processes can be forked
    and there are several cores. "stacked" tries to stack every net, also in workers if there are several cores. "ray"
    has its workers on a cluster.

    Args:
        name: the executor's name.
        workers: the number of processes; None for one for each core.
        threads: torch's threads; with more than one there are no workers.
        nets: one network of each architecture.
        device: where networks are computed; forked processes cannot share an accelerator.

    Raises:
        ConfigError: workers are requested on a system that cannot fork or beside an accelerator, or Ray is requested
            and not installed.
    """
    if name == "ray":
        return ChosenExecutor(RayActors(workers), "ray", workers or 0, "run.executor is ray")
    if device != CPU and (name == "workers" or (workers or 1) > 1):
        found = "run.executor: found 'workers'" if name == "workers" else f"run.workers: found {workers}"
        raise ConfigError(
            f"{found} with run.computing.device = '{device}', which forked processes cannot share; expected one"
            " process: run.executor 'sequential', 'stacked' or 'auto', without run.workers"
        )
    against = _against_workers(threads, device)
    if name == "workers" and not can_fork():
        raise ConfigError("run.executor: found 'workers', but this system cannot fork; expected 'sequential' or 'auto'")
    alone = name == "sequential" or (name != "workers" and against is not None)
    count = 1 if alone else cores() if workers is None else workers
    stacks = name == "stacked" or (name == "auto" and all(small_products(net) for net in nets))
    inner = Stacked(always if name == "stacked" else pays) if stacks else Sequential()
    if name != "auto":
        reasons = [f"run.executor is {name}"]
    else:
        reasons = ["all nets are small and without convolutions"] if stacks else []
    if name != "sequential":
        reasons.append(against if alone and against else f"{cores()} cores")
    label = "stacked" if stacks else "sequential" if alone else "workers"
    return ChosenExecutor(inner if alone else Workers(count, inner), label, count, "; ".join(reasons))


def _against_workers(threads: int, device: torch.device) -> str | None:
    """Why there are no workers; None if there can be."""
    if device != CPU:
        return f"networks are computed on {device}"
    return f"run.threads is {threads}" if threads > 1 else why_not()
