"""Stacked execution: fits of the same shape are trained as one batched computation."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from potluck.core.requests.fit import Fit, Request
from potluck.engine.client.runtime import ClientRuntime, Job, Outcome
from potluck.engine.client.session import Call, Session
from potluck.engine.executors import Inner, Pending, bundles
from potluck.engine.executors.held import Held
from potluck.engine.numerics.costs import Cost
from potluck.engine.stacking.end_to_end import only_linear, task_criterion
from potluck.engine.stacking.nets import CannotStack, stacking_key, train_stacked

log = logging.getLogger(__name__)
StackingRule = Callable[[Fit], bool]

MOST_WEIGHTS = 50_000
"""The most weights of a net worth stacking by `torch.func.vmap`: ten nets of three linear layers, batches of 16, were
2.3 times as fast together as in turn with 16 thousand weights each, 1.1 with 55, 0.5 with 200 (one busy core of an AMD
EPYC with AVX-512).
"""

MOST_WEIGHTS_END_TO_END = 250_000
"""The most weights of a net of linear layers alone, trained on the task alone: there the factors were 2.4, 1.9, 1.2
and, with 480 thousand weights, 0.9.
"""


def small_products(net: nn.Module) -> bool:
    """Whether stacking may pay on a CPU: for nets without convolutions and with small matrix products."""
    return _small(net, MOST_WEIGHTS_END_TO_END if only_linear(net) else MOST_WEIGHTS)


def pays(fit: Fit) -> bool:
    """Whether stacking pays."""
    end_to_end = only_linear(fit.net) and all(map(task_criterion, fit.losses))
    return _small(fit.net, MOST_WEIGHTS_END_TO_END if end_to_end else MOST_WEIGHTS)


def always(fit: Fit) -> bool:
    """Whether stacking is possible at all."""
    return True


class Stacked(Inner):
    """Opens many clients at once, trains those that request the same kind of fit together, and continues in waves.

    Fits that cannot be stacked are trained one by one, and the log says once why. All other requests are carried out
    one by one.

    Args:
        rule: which fits to try to stack.
        at_once: clients open at a time. Which clients are stacked together depends on it and on the order of clients,
            not on the machine.
    """

    def __init__(self, rule: StackingRule = always, at_once: int = 10) -> None:
        self._rule = rule
        self.at_once = at_once
        self.refused: set[str] = set()

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks."""
        done = Held(lambda place, outcome: tasks[place].arrived(outcome))
        left = bundles(tasks, self.at_once)
        for place in range(len(tasks)):
            while place not in done:
                bundle = left.pop(0)
                done.update(zip(bundle, self.together(host, (tasks[place].make() for place in bundle)), strict=True))
            yield done.pop(place)

    def together(self, host: ClientRuntime, jobs: Iterable[Job]) -> list[Outcome]:
        """One outcome for each job. Fits of the same kind that jobs request at the same time are trained as one."""
        done: dict[int, Outcome] = {}
        waiting: dict[int, tuple[Session, Request]] = {}

        def settle(place: int, session: Session, found: Request | Outcome) -> None:
            if isinstance(found, Request):
                waiting[place] = session, found
            else:
                done[place] = found

        for place, job in enumerate(jobs):
            if not isinstance(job, Call):
                done[place] = host.execute(job)
            elif isinstance(session := host.open(job), Session):
                settle(place, session, session.advance())
            else:
                done[place] = session
        while waiting:
            wave, waiting = waiting, {}
            for places in _groups({place: request for place, (_, request) in wave.items()}):
                for place, answer in zip(places, self._answers(host, [wave[place] for place in places]), strict=True):
                    session, _ = wave[place]
                    failed = isinstance(answer, Exception)
                    settle(place, session, session.failed(answer) if failed else session.advance(answer))
        return [done[place] for place in sorted(done)]

    def _answers(self, host: ClientRuntime, members: list[tuple[Session, Request]]) -> list[Any]:
        """The result of each request of a group: its answer, or an exception."""
        fits = [request for _, request in members if isinstance(request, Fit)]
        if len(fits) > 1 and self._rule(fits[0]):
            try:
                if not host.computing.stacks:
                    raise CannotStack("run.computing is not plain")
                costs = _costs(host, fits)
                answers = train_stacked(fits, [session.request_key for session, _ in members], host.computing)
            except (CannotStack, ValueError) as error:
                self._tell(f"{type(fits[0].net).__name__} is trained one client at a time: {error}")
            else:
                for (session, _), cost in zip(members, costs, strict=True):
                    session.cost += cost
                return [*answers]
        return [_alone(host, session, request) for session, request in members]

    def _tell(self, why: str) -> None:
        if why not in self.refused:
            log.info("%s", why)
            self.refused.add(why)


def _costs(host: ClientRuntime, fits: Sequence[Fit]) -> list[Cost]:
    try:
        return [host.costs.of(fit) for fit in fits]
    except Exception as error:  # the client that has caused it is found one by one
        raise CannotStack(f"{type(error).__name__}: {error}") from error


def _small(net: nn.Module, most: int) -> bool:
    convolves = any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in net.modules())
    return not convolves and sum(parameter.numel() for parameter in net.parameters()) <= most


def _alone(host: ClientRuntime, session: Session, request: Request) -> Any:
    try:
        session.cost += host.costs.of(request)
        return host.carry_out(request, session.request_key)
    except Exception as error:
        return error


def _groups(requests: dict[int, Request]) -> list[list[int]]:
    """Indices of fits that can be trained as one, in order of appearance; every other request is a group of its own."""
    groups: list[tuple[object, list[int]]] = []
    for place, request in requests.items():
        kind = stacking_key(request) if isinstance(request, Fit) else place
        found = next((group for other, group in groups if other == kind), None)
        if found is None:
            groups.append((kind, [place]))
        else:
            found.append(place)
    return [group for _, group in groups]
