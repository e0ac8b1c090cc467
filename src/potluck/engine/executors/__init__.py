"""Ways to carry out the jobs of one exchange; all give the same answers."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from potluck.engine.client.runtime import ClientRuntime, Job, Outcome


@dataclass(frozen=True)
class Task:
    """A job that is not put together before its turn, so that not all messages are in memory at once.

    Attributes:
        make: puts it together; called once, since what it sends is booked.
        cost: how long it takes, in a unit of its own; asked for by those who divide work.
        kind: tasks of one kind are likely to be alike.
        most_bytes: how long an answer's payload may be, if that is known; no longer one will be accepted.
    """

    make: Callable[[], Job]
    cost: Callable[[], float] = lambda: 1.0
    kind: str = ""
    most_bytes: int | None = None


class Executor(Protocol):
    """Carries out jobs that do not depend on one another.

    Attributes:
        trusted: whether outcomes come from this run's own processes; others may say anything.
    """

    trusted: bool = True

    def start(self, host: ClientRuntime) -> None:
        """Make ready for the jobs of this host; `run` does it if nobody did."""

    def run(self, host: ClientRuntime, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks."""
        ...

    def close(self) -> None:
        """Let go of what `start` took."""


class Inner(Executor, Protocol):
    """Carries jobs out in the process that asks; in a worker, the bundles that the exchange was divided into.

    Attributes:
        at_once: of how many jobs together it makes more than of one after another.
    """

    at_once: int = 1

    def together(self, host: ClientRuntime, jobs: Iterable[Job]) -> list[Outcome]:
        """One outcome a job of one bundle, which is not divided again."""
        ...


def bundles(tasks: Sequence[Task], at_once: int) -> list[list[int]]:
    """Places of tasks of one kind, up to `at_once` together; at least two bundles, so that two cores can share.

    How many processes there are does not matter, so that neither does it to what is computed together.
    """
    by_kind: dict[str, list[int]] = {}
    for place, task in enumerate(tasks):
        by_kind.setdefault(task.kind, []).append(place)
    at_least = 2 if len(by_kind) == 1 else 1
    return [bundle for places in by_kind.values() for bundle in _evenly(places, at_least, at_once)]


def longest_last(tasks: Sequence[Task], at_once: int) -> list[list[int]]:
    """`bundles`, to be taken from the end by whoever is idle."""
    cost = {place: task.cost() for place, task in enumerate(tasks)}
    return sorted(bundles(tasks, at_once), key=lambda bundle: (sum(cost[place] for place in bundle), -bundle[0]))


def _evenly(places: list[int], at_least: int, at_once: int) -> list[list[int]]:
    count = min(max(at_least, math.ceil(len(places) / at_once)), len(places))
    ends = [len(places) * part // count for part in range(count + 1)]
    return [places[start:end] for start, end in pairwise(ends)]
