"""Ways to carry out the jobs of one exchange; all give the same answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from potluck.engines.host import ClientHost, Job, Outcome


@dataclass(frozen=True)
class Task:
    """A job that is not put together before its turn, so that not all messages are in memory at once.

    Attributes:
        make: puts it together.
        cost: how long it takes, in a unit of its own; asked for by those who divide work.
    """

    make: Callable[[], Job]
    cost: Callable[[], float]


class Executor(Protocol):
    """Carries out jobs that do not depend on one another."""

    def start(self, host: ClientHost) -> None:
        """Make ready for the jobs of this host; `run` does it if nobody did."""

    def run(self, host: ClientHost, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks."""
        ...

    def close(self) -> None:
        """Let go of what `start` took."""
