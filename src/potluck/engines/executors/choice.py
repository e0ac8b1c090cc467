"""Which executor carries out a run's jobs, and why."""

from dataclasses import dataclass
from typing import Literal

from potluck.core.errors import ConfigError
from potluck.engines.executors import Executor
from potluck.engines.executors.sequential import Sequential
from potluck.engines.executors.workers import Workers, can_fork, cores, why_not

ExecutorName = Literal["auto", "sequential", "workers"]


@dataclass(frozen=True)
class Choice:
    """An executor and what the run's manifest says of it.

    Attributes:
        processes: that train at the same time.
        reason: why this one.
    """

    executor: Executor
    name: str
    processes: int
    reason: str

    @property
    def facts(self) -> dict[str, str | int]:
        """For the manifest."""
        return {"executor": self.name, "processes": self.processes, "executor_reason": self.reason}


def choose_executor(name: ExecutorName, workers: int | None, threads: int) -> Choice:
    """The executor of this name; "auto" means workers where they can be forked and there are cores for them.

    Raises:
        ConfigError: workers are asked for on a system that cannot fork.
    """
    against = f"run.threads is {threads}" if threads > 1 else why_not()
    if name == "sequential" or (name == "auto" and against):
        return Choice(Sequential(), "sequential", 1, against if name == "auto" and against else "run.executor")
    if not can_fork():
        raise ConfigError("run.executor: found 'workers', but this system cannot fork; expected 'sequential' or 'auto'")
    count = cores() if workers is None else workers
    reason = f"{cores()} cores" if name == "auto" else "run.executor"
    return Choice(Workers(count), "workers", count, reason)
