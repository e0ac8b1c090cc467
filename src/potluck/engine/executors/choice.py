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
    has its workers on a cluster. On a device there is one process unless workers are requested: each takes a part of
    the device's memory, and is started anew, since forked ones cannot share it.

    Args:
        name: the executor's name.
        workers: the number of processes; None for one for each core.
        threads: torch's threads; with more than one there are no workers.
        nets: one network of each architecture.
        device: where networks are computed.

    Raises:
        ConfigError: workers are requested on a system that cannot fork, or Ray is requested and not installed.
    """
    if name == "ray":
        return ChosenExecutor(RayActors(workers), "ray", workers or 0, "run.executor is ray")
    anew = device != CPU or torch.accelerator.is_available()
    requested = name == "workers" or (device != CPU and name != "sequential" and (workers or 1) > 1)
    against = _against_workers(threads, device)
    if name == "workers" and not anew and not can_fork():
        raise ConfigError("run.executor: found 'workers', but this system cannot fork; expected 'sequential' or 'auto'")
    alone = name == "sequential" or (not requested and against is not None)
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
    executor = inner if alone else Workers(count, inner, anew)
    return ChosenExecutor(executor, label, count, "; ".join(reasons))


def _against_workers(threads: int, device: torch.device) -> str | None:
    """Why there are no workers; None if there can be."""
    if device != CPU:
        return f"networks are computed on {device}"
    return f"run.threads is {threads}" if threads > 1 else why_not()
