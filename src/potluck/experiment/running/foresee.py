"""What a federation's rounds will take, from two rounds of a few clients."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from potluck.core.federation import ClientId, Federation
from potluck.engine.executors.sequential import Sequential
from potluck.engine.rounds.engine import Engine
from potluck.engine.rounds.report import RoundReport
from potluck.experiment.settings.schema import Experiment
from potluck.twin.simulate import Load
from potluck.twin.timeline import Errand

_LEAST = 2  # clients, since some methods compare them


@dataclass(frozen=True)
class Foreseen:
    """The rounds of an experiment, as far as they can be told from a few clients.

    What a client computes is taken to grow with its training examples, what is sent to be that of the client that was
    tried, of the same architecture and capacity. The first round differs from all others, which are alike.

    Attributes:
        first: what the clients that were tried took in the first round; `later` in the second.
        like: by client, the one that stands for it, and how many times its examples the client has.
    """

    first: RoundReport
    later: RoundReport
    like: dict[ClientId, tuple[ClientId, float]]

    def load(self, number: int, cohort: list[ClientId]) -> Load:
        """A round with these clients."""
        whole = self._first if number == 1 else self._later
        return Load([_among(cohort, parts) for parts in whole.exchanges], whole.server)

    def loads(self, experiment: Experiment, without: Callable[[int], Collection[ClientId]]) -> Iterator[Load]:
        """The rounds of a run, and on for ever; `without` says of each which clients are not drawn."""
        ids, number = sorted(self.like), 0
        while True:
            number += 1
            yield self.load(number, experiment.run.cohort(ids, number, without(number)))

    @cached_property
    def _first(self) -> Load:
        return self._of_all(self.first)

    @cached_property
    def _later(self) -> Load:
        return self._of_all(self.later)

    def _of_all(self, report: RoundReport) -> Load:
        """A round with all clients, by the parts of those that stand for them."""
        exchanges: dict[int, dict[ClientId, Errand]] = {}
        for work in report.work:
            if work.client is not None:
                part = Errand(work.flops, work.bytes_down, work.bytes_up, work.memory or 0, work.exchange)
                exchanges.setdefault(work.exchange, {})[work.client] = part
        server = sum(work.flops or 0 for work in report.work if work.client is None)
        return Load([self._of_everybody(parts) for _, parts in sorted(exchanges.items())], server)

    def _of_everybody(self, parts: Mapping[ClientId, Errand]) -> dict[ClientId, Errand]:
        found: dict[ClientId, Errand] = {}
        for client, (tried, times) in self.like.items():
            if (part := parts.get(tried)) is not None:
                flops = None if part.flops is None else round(part.flops * times)
                found[client] = replace(part, flops=flops)
        return found


def _among(cohort: list[ClientId], parts: Mapping[ClientId, Errand]) -> dict[ClientId, Errand]:
    return {client: parts[client] for client in cohort if client in parts}


def foresee(experiment: Experiment, federation: Federation) -> Foreseen:
    """Run two rounds with one client of each architecture and capacity, see `stand_ins`.

    Raises:
        ClientFailure: a client failed.
        ContractError: the method broke its contract.
    """
    tried, like = stand_ins(federation)
    run = experiment.run
    engine = Engine(experiment.method, federation, seed=run.seed, executor=Sequential(), computing=run.computing)
    try:
        state, first = engine.round(1, engine.start(), tried)
        _, later = engine.round(2, state, tried)
    finally:
        engine.close()
    return Foreseen(first, later, like)


def stand_ins(federation: Federation) -> tuple[list[ClientId], dict[ClientId, tuple[ClientId, float]]]:
    """A client of each architecture and capacity, that with the median number of examples; two at least.

    Returns:
        Them, and by client the one that stands for it, and how many times its examples the client has.
    """
    groups: dict[tuple[str, float], list[ClientId]] = {}
    sizes = {client: len(site.train) for client, site in federation.sites.items()}
    for client, site in sorted(federation.sites.items()):
        groups.setdefault((site.architecture, site.capacity), []).append(client)
    tried: list[ClientId] = []
    like: dict[ClientId, tuple[ClientId, float]] = {}
    for clients in groups.values():
        middle = sorted(clients, key=lambda client: (sizes[client], client))[len(clients) // 2]
        tried.append(middle)
        like |= {client: (middle, sizes[client] / sizes[middle]) for client in clients}
    tried += [client for client in sorted(sizes) if client not in tried][: max(0, _LEAST - len(tried))]
    return tried, like
