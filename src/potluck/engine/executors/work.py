"""The tasks of one exchange, divided among processes that may die while they carry them out.

The last bits of clients trained as one computation depend on which clients these are. So the bundles depend on the
federation alone: not on the number of processes, and not on whether one of them was killed. The bundle of a process
that died is carried out again as it was. A bundle that kills one process after another is searched: each of its tasks
is carried out alone, those that kill their process are failures, and the others are carried out again together. Their
bits are those of a run in which the failed clients failed before their first `Fit`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from potluck.core.roles import Failure
from potluck.engine.client.runtime import ClientRuntime, Job, Outcome
from potluck.engine.client.session import Call
from potluck.engine.executors import Pending, longest_last
from potluck.engine.executors.held import Held

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Bundle:
    """Tasks that one process carries out together.

    Attributes:
        places: indices of the tasks.
        jobs: in the order of `places`; empty before the bundle is first taken.
        losses: how many processes have died while they carried it out.
        search: the search that it is part of, if it is a single task tried alone.
        cleared: whether each of its tasks, tried alone, left its process alive.
    """

    places: list[int]
    jobs: list[Job] = field(default_factory=list[Job])
    losses: int = 0
    search: "_Search | None" = None
    cleared: bool = False

    @property
    def clients(self) -> str:
        """The clients of the tasks, as text."""
        names = ", ".join(str(job.client) for job in self.jobs)
        return f"client {names}" if len(self.jobs) == 1 else f"clients {names}"


@dataclass(eq=False)
class _Search:
    """A search for the tasks of a bundle that kill their process: each is carried out alone."""

    bundle: Bundle
    outcomes: dict[int, Outcome] = field(default_factory=dict[int, Outcome])
    guilty: set[int] = field(default_factory=set[int])


class Work:
    """The bundles of one exchange: those left, and the outcomes of the others.

    Every task's job is built once, however often it is carried out, so that its traffic is counted once.

    Attributes:
        done: outcomes by index of the task, beyond a cap in files.

    Args:
        host: the runtime that the tasks are for.
        tasks: the tasks of the exchange.
        at_once: the most tasks in a bundle.
        tries: how many processes a bundle may kill before it is held to be the cause.
    """

    def __init__(self, host: ClientRuntime, tasks: Sequence[Pending], at_once: int, tries: int) -> None:
        self.done = Held(lambda place, outcome: tasks[place].arrived(outcome))
        self._host = host
        self._tasks = tasks
        self._tries = tries
        self._left = [Bundle(places) for places in longest_last(tasks, at_once)]

    def take(self) -> Bundle | None:
        """The longest remaining bundle, its jobs built; None if there is none."""
        if not self._left:
            return None
        bundle = self._left.pop()
        if not bundle.jobs:
            bundle.jobs = [self._tasks[place].make() for place in bundle.places]
        return bundle

    def finish(self, bundle: Bundle, outcomes: Sequence[Outcome]) -> None:
        """Store the outcomes of a bundle."""
        found = dict(zip(bundle.places, outcomes, strict=True))
        if bundle.search is None:
            self.done.update(found)
        else:
            self._note(bundle.search, found)

    def lose(self, bundle: Bundle, who: str, how: str) -> None:
        """Handle the death of the process that had a bundle.

        Args:
            bundle: is carried out again, searched, or failed.
            who: the process's name, for the log.
            how: how it died, which becomes the reason of a failure and so must not differ from run to run.
        """
        bundle.losses += 1
        if bundle.losses < self._tries:
            self._left.append(bundle)
            then = "its work is done again"
        elif bundle.search is not None:
            then = "it is named as the failure"
            bundle.search.guilty.update(bundle.places)
            self._note(bundle.search, self._failures(bundle, how))
        elif len(bundle.jobs) == 1 or bundle.cleared:
            then = "no more tries"
            together = f" {self._tries} times with {bundle.clients} together, and not alone" if bundle.cleared else ""
            self.done.update(self._failures(bundle, how + together))
        else:
            then = "each is tried alone, to find the one that ends it"
            search = _Search(bundle)
            alone = zip(bundle.places, bundle.jobs, strict=True)
            self._left.extend(Bundle([place], [job], search=search) for place, job in alone)
        log.warning("%s, at work for %s, was lost: %s; %s", who, bundle.clients, how, then)

    def _note(self, search: _Search, found: Mapping[int, Outcome]) -> None:
        """Handle the outcome of one task alone; after the last, the tasks that kill no process form a bundle again."""
        search.outcomes.update(found)
        bundle = search.bundle
        if len(search.outcomes) < len(bundle.jobs):
            return
        self.done.update({place: search.outcomes[place] for place in search.guilty})
        others = {p: job for p, job in zip(bundle.places, bundle.jobs, strict=True) if p not in search.guilty}
        if len(others) == 1:  # it was alone already
            self.done.update({place: search.outcomes[place] for place in others})
        elif others:
            self._left.append(Bundle([*others], [*others.values()], cleared=not search.guilty))

    def _failures(self, bundle: Bundle, how: str) -> dict[int, Outcome]:
        return {p: lost(self._host, job, how) for p, job in zip(bundle.places, bundle.jobs, strict=True)}


def lost(host: ClientRuntime, job: Job, reason: str) -> Failure:
    """The failure of a job whose process has died."""
    return Failure(job.client, host.full_name(job.handler) if isinstance(job, Call) else "evaluation", reason)
