"""Clients side by side: fits of one shape are trained as one batched computation."""

import logging
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from potluck.core.fit import Fit, FitReport
from potluck.engines.computing import PLAIN
from potluck.engines.executors import Executor, Task, bundles
from potluck.engines.host import ClientHost, Outcome
from potluck.engines.session import Call, Session
from potluck.engines.stacking import CannotStack, alike, train_stacked

log = logging.getLogger(__name__)
Rule = Callable[[nn.Module], bool]


MOST_WEIGHTS = 50_000
"""Of a net that is worth stacking. On one busy core of a Xeon with AVX-512 ten nets of three linear layers, batches of
16, were 2.8 times as fast together as in turn with 9 thousand weights each, 1.9 with 26, 1.05 with 68, 0.8 with 102.
"""


def small_products(net: nn.Module) -> bool:
    """Where stacking wins on a CPU: nets without convolutions, whose matrix products are too small to fill it."""
    convolves = any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in net.modules())
    return not convolves and sum(parameter.numel() for parameter in net.parameters()) <= MOST_WEIGHTS


def always(net: nn.Module) -> bool:
    """Wherever it can be done."""
    return True


class Stacked(Executor):
    """Opens many clients at once, trains those that ask for the same kind of fit together, and goes on in waves.

    Fits that cannot be stacked are trained one by one, and the log says once why.

    Args:
        rule: with which nets to try it.
        at_once: clients open at a time. Who is stacked with whom depends on it and on the order of clients, not on
            the machine.
    """

    def __init__(self, rule: Rule = always, at_once: int = 10) -> None:
        self._rule = rule
        self.at_once = at_once
        self._told: set[str] = set()

    def run(self, host: ClientHost, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks."""
        done: dict[int, Outcome] = {}
        for bundle in bundles(tasks, self.at_once):
            done |= zip(bundle, self._together(host, [tasks[place] for place in bundle]), strict=True)
        return iter([done[place] for place in range(len(tasks))])

    def _together(self, host: ClientHost, tasks: Sequence[Task]) -> list[Outcome]:
        done: dict[int, Outcome] = {}
        waiting: dict[int, tuple[Session, Fit]] = {}

        def settle(place: int, session: Session, found: Fit | Outcome) -> None:
            if isinstance(found, Fit):
                waiting[place] = session, found
            else:
                done[place] = found

        for place, task in enumerate(tasks):
            job = task.make()
            if not isinstance(job, Call):
                done[place] = host.carry_out(job)
            elif isinstance(session := host.open(job), Session):
                settle(place, session, session.advance())
            else:
                done[place] = session
        while waiting:
            wave, waiting = waiting, {}
            for places in _groups({place: fit for place, (_, fit) in wave.items()}):
                for place, report in zip(places, self._train(host, [wave[place] for place in places]), strict=True):
                    session, _ = wave[place]
                    failed = isinstance(report, Exception)
                    settle(place, session, session.failed(report) if failed else session.advance(report))
        return [done[place] for place in range(len(tasks))]

    def _train(self, host: ClientHost, members: list[tuple[Session, Fit]]) -> list[FitReport | Exception]:
        """What became of each fit of a group."""
        fits = [fit for _, fit in members]
        if len(fits) > 1 and self._rule(fits[0].net):
            try:
                if host.computing != PLAIN:
                    raise CannotStack("run.computing is not plain")
                return [*train_stacked(fits, [session.fit_key for session, _ in members])]
            except (CannotStack, ValueError) as error:
                self._tell(f"{type(fits[0].net).__name__} is trained one client at a time: {error}")
        return [_alone(host, session, fit) for session, fit in members]

    def _tell(self, why: str) -> None:
        if why not in self._told:
            log.info("%s", why)
            self._told.add(why)


def _alone(host: ClientHost, session: Session, fit: Fit) -> FitReport | Exception:
    try:
        return host.train(fit, session.fit_key)
    except Exception as error:
        return error


def _groups(fits: dict[int, Fit]) -> list[list[int]]:
    """The places of fits that can be trained as one, in order of appearance."""
    groups: list[list[int]] = []
    for place, fit in fits.items():
        for group in groups:
            if alike(fits[group[0]], fit):
                group.append(place)
                break
        else:
            groups.append([place])
    return groups
