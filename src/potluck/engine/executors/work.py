"""The tasks of one exchange, shared out to processes that may come to an end over them.

Clients that are trained as one computation differ in their last bits with who is among them. So who is together
depends on the federation alone: not on how many processes there are, and not on whether one of them was killed. What a
process had when it ended is carried out again as the same bundle. A bundle that ends one process after another is
looked into: each of its tasks is carried out alone, the ones that end their process are failures, and the others are
carried out again together. Their bits are those of a run in which the failed clients failed before their first `Fit`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from potluck.core.roles import Failure
from potluck.engine.client.runtime import ClientRuntime, Job, Outcome
from potluck.engine.client.session import Call
from potluck.engine.executors import Task, longest_last
from potluck.engine.executors.held import Held

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Bundle:
    """Tasks that one process carries out together.

    Attributes:
        places: of the tasks.
        jobs: in the order of the places; empty before the bundle is taken for the first time.
        losses: processes that have ended over it.
        search: what it is carried out for, if to find out whether it is this one task that ends its process.
        cleared: whether each of its tasks, alone, has left its process alive.
    """

    places: list[int]
    jobs: list[Job] = field(default_factory=list[Job])
    losses: int = 0
    search: "_Search | None" = None
    cleared: bool = False

    @property
    def clients(self) -> str:
        """Whose tasks they are, in words."""
        names = ", ".join(str(job.client) for job in self.jobs)
        return f"client {names}" if len(self.jobs) == 1 else f"clients {names}"


@dataclass(eq=False)
class _Search:
    """Which tasks of a bundle end their process? Each is carried out alone."""

    bundle: Bundle
    outcomes: dict[int, Outcome] = field(default_factory=dict[int, Outcome])
    guilty: set[int] = field(default_factory=set[int])


class Work:
    """The bundles of one exchange: those left, and what came of the others.

    Every task is put together once, however often it is carried out, so that its bytes are booked once.

    Attributes:
        done: outcomes by place of the task, beyond some in files.

    Args:
        host: whose tasks they are.
        tasks: of the exchange.
        at_once: how many are carried out together at most.
        tries: how often a bundle is taken up; one that has ended so many processes is the cause of it.
    """

    def __init__(self, host: ClientRuntime, tasks: Sequence[Task], at_once: int, tries: int) -> None:
        self.done = Held()
        self._host = host
        self._tasks = tasks
        self._tries = tries
        self._left = [Bundle(places) for places in longest_last(tasks, at_once)]

    def take(self) -> Bundle | None:
        """The longest bundle that is left, its jobs put together; None if there is none."""
        if not self._left:
            return None
        bundle = self._left.pop()
        if not bundle.jobs:
            bundle.jobs = [self._tasks[place].make() for place in bundle.places]
        return bundle

    def finish(self, bundle: Bundle, outcomes: Sequence[Outcome]) -> None:
        """Note what came of a bundle."""
        found = dict(zip(bundle.places, outcomes, strict=True))
        if bundle.search is None:
            self.done.update(found)
        else:
            self._note(bundle.search, found)

    def lose(self, bundle: Bundle, who: str, how: str) -> None:
        """The process that had a bundle has come to an end.

        Args:
            bundle: is carried out again, looked into, or failed.
            who: the process, by name, for the log.
            how: it ended; the reason of a failure, so without anything that differs from run to run.
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
        """What came of one task alone. After the last, those that end no process are carried out together."""
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
    """The failure of a job whose process is gone."""
    return Failure(job.client, host.full_name(job.handler) if isinstance(job, Call) else "evaluation", reason)
