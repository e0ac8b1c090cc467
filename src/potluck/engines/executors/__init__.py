"""Ways to carry out the jobs of one exchange; all give the same answers."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from potluck.engines.host import ClientHost, Job, Outcome


@dataclass(frozen=True)
class Task:
    """A job that is not put together before its turn, so that not all messages are in memory at once.

    Attributes:
        make: puts it together.
        cost: how long it takes, in a unit of its own; asked for by those who divide work.
        kind: tasks of one kind are likely to be alike.
        most_bytes: how long an answer's payload may be, if that is known; no longer one will be accepted.
    """

    make: Callable[[], Job]
    cost: Callable[[], float] = lambda: 1.0
    kind: str = ""
    most_bytes: int | None = None


def ready(job: Job) -> Task:
    """A task for a job that is put together already."""
    return Task(lambda: job)


class Executor(Protocol):
    """Carries out jobs that do not depend on one another.

    Attributes:
        at_once: of how many tasks together it makes more than of one after another.
        trusted: whether outcomes come from this run's own processes; others may say anything.
    """

    at_once: int = 1
    trusted: bool = True

    def start(self, host: ClientHost) -> None:
        """Make ready for the jobs of this host; `run` does it if nobody did."""

    def run(self, host: ClientHost, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks."""
        ...

    def close(self) -> None:
        """Let go of what `start` took."""


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
