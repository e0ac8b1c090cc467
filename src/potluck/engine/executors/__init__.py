"""Ways to carry out the jobs of one exchange; all give the same answers."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from potluck.core.federation import ClientId
from potluck.engine.client.runtime import ClientRuntime, Job, Outcome


@dataclass(frozen=True)
class Pending:
    """A job that is not built before its turn, so that not all messages are in memory at once.

    Attributes:
        make: builds it; called once, since its message is counted as traffic.
        cost: an estimate of its duration, in arbitrary units, for dividing work.
        kind: tasks of the same kind can probably be stacked.
        most_bytes: the most bytes of the answer's payload, if that is known; a longer one is refused.
        arrived: called with the outcome as soon as it is there, which may be long before its turn.
    """

    make: Callable[[], Job]
    cost: Callable[[], float] = lambda: 1.0
    kind: str = ""
    most_bytes: int | None = None
    arrived: Callable[[Outcome], None] = lambda outcome: None


class Executor(Protocol):
    """Carries out jobs that do not depend on one another.

    Attributes:
        trusted: whether outcomes come from this run's own processes.
    """

    trusted: bool = True

    def start(self, host: ClientRuntime) -> None:
        """Prepare for the jobs of this host; `run` does so if it was not called."""

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks."""
        ...

    def absent(self, clients: Iterable[ClientId]) -> Mapping[ClientId, str]:
        """Those of the clients that cannot be reached now, with the names of their machines."""
        return {}

    def close(self) -> None:
        """Release what `start` acquired."""


@runtime_checkable
class OneByOne(Executor, Protocol):
    """Carries out jobs of which each can also begin, and end, on its own."""

    def begin(self, host: ClientRuntime, task: Pending) -> None:
        """Have a client begin a job, without waiting for it."""
        ...

    def ended(self, within_s: float) -> Outcome | None:
        """The outcome of a job that was begun and has ended, each once, the first one first.

        None if none ends within so many seconds.
        """
        ...


class Inner(Executor, Protocol):
    """Carries out jobs in the calling process; in a worker, the bundles into which the exchange was divided.

    Attributes:
        at_once: how many jobs it can usefully process together.
    """

    at_once: int = 1

    def together(self, host: ClientRuntime, jobs: Iterable[Job]) -> list[Outcome]:
        """One outcome for each job of one bundle, which is not divided further."""
        ...


def bundles(tasks: Sequence[Pending], at_once: int) -> list[list[int]]:
    """Indices of tasks of one kind, up to `at_once` together; at least two bundles, for two cores.

    Bundles do not depend on the number of processes, and so neither do results.
    """
    by_kind: dict[str, list[int]] = {}
    for place, task in enumerate(tasks):
        by_kind.setdefault(task.kind, []).append(place)
    at_least = 2 if len(by_kind) == 1 else 1
    return [bundle for places in by_kind.values() for bundle in _evenly(places, at_least, at_once)]


def longest_last(tasks: Sequence[Pending], at_once: int) -> list[list[int]]:
    """`bundles` in ascending order of cost; idle processes take from the end."""
    cost = {place: task.cost() for place, task in enumerate(tasks)}
    return sorted(bundles(tasks, at_once), key=lambda bundle: (sum(cost[place] for place in bundle), -bundle[0]))


def _evenly(places: list[int], at_least: int, at_once: int) -> list[list[int]]:
    count = min(max(at_least, math.ceil(len(places) / at_once)), len(places))
    ends = [len(places) * part // count for part in range(count + 1)]
    return [places[start:end] for start, end in pairwise(ends)]
