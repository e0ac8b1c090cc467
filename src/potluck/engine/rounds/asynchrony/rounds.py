"""Asynchronous rounds: clients are asked one by one, and a round is made of the replies that have come."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from potluck.core.federation import ClientId
from potluck.core.ground.text import ON_SCREEN
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.roles import Failure, Server
from potluck.engine.disk.store import ClientStore
from potluck.engine.rounds.asynchrony.asking import Moved, first_ask, rest_of_round
from potluck.engine.rounds.asynchrony.departures import Attending, Departures
from potluck.engine.rounds.asynchrony.flights import Flight
from potluck.engine.rounds.asynchrony.open import OpenExchange
from potluck.engine.rounds.asynchrony.rules import Asynchrony, blend, revised
from potluck.engine.rounds.clock import Clock
from potluck.engine.rounds.exchange import Lent
from potluck.engine.rounds.report import ExchangePlace, RoundReport

log = logging.getLogger(__name__)
Order = Sequence[ClientId]


class ClockOfDepartures(Clock, Protocol):
    """A clock by which clients are under way on their own.

    If it is virtual, all outcomes of an exchange are there at once, and it is known when each client is done; otherwise
    every client has an exchange of its own, which closes when its outcome has come.

    Attributes:
        course: says who is there.
    """

    course: Attending

    def due(self, client: ClientId) -> float | None:
        """When a client that is under way is done, or leaves; None if nobody can know."""
        ...

    def pass_time(self, departures: Departures, order: Order) -> ClientId | None:
        """Wait until a client is done, and return it; None if it is time to look who else may be asked.

        Raises:
            Lost: nothing can happen in this round any more; `Deserted` if clients are only not there.
        """
        ...

    def land(self, client: ClientId) -> None:
        """Note that a client is under way no more."""
        ...


class AsynchronousRounds:
    """Runs a method's rounds by an asynchronous rule.

    Args:
        method: whose round asks its clients once, with messages made of its state alone.
        rule: when a round closes, and what becomes of stale replies.
        at_once: how many clients are under way at once.
        clock: by which they are.
        store: of clients' states, which change when the round of their reply closes.
        lend: what exchanges need, with another store.
        server: the server's half of a round.
    """

    def __init__(
        self,
        method: Method[Any],
        rule: Asynchrony,
        at_once: int,
        clock: ClockOfDepartures,
        store: ClientStore,
        lend: Callable[[ClientStore], Lent],
        server: Callable[[int], Server],
    ) -> None:
        self._method, self._rule, self._clock = method, rule, clock
        self._store, self._lend, self._server = store, lend, server
        self._at_once = at_once
        self._open: dict[ClientId, OpenExchange] = {}  # of clients that are under way and have not answered yet
        self.begin()

    def begin(self) -> None:
        """Begin anew: nobody is under way."""
        self.abandon()
        self._departures = Departures(self._rule, self._at_once)
        self._flights: dict[ClientId, Flight] = {}
        self._tiers: dict[int, tuple[int, Any]] = {}  # of each, how often it was updated, and the state then
        self._anew: list[ClientId] = []  # whose answers came to nobody, since the process ended that had asked

    def abandon(self) -> None:
        """Wait for no answer any more."""
        for exchange in self._open.values():
            exchange.abandon()
        self._open.clear()

    @property
    def under_way(self) -> frozenset[ClientId]:
        """The clients that are under way."""
        return self._departures.under_way

    @property
    def waiting(self) -> frozenset[ClientId]:
        """The clients whose replies wait for their round to close, and which are not asked before."""
        return self._departures.waiting

    def close(self, state: Any, order: Order, server: Server, report: RoundReport) -> Any:
        """Ask clients until a round closes; return the state after it.

        Args:
            state: the method's, before the round.
            order: all clients, those first that are preferred.
            server: the server's half of the round.
            report: gets what the round's clients have taken, and those that have failed since the last one.

        Raises:
            Lost: nobody is left to ask; `Deserted` if that is for want of clients that are there.
        """
        departures, number = self._departures, server.round
        departures.begin()
        order = self._those_anew_first(order, number)
        while not (ready := departures.ready()):
            if asked := departures.to_ask(order, self._clock.course):
                self._depart(number, state, asked, report)
                departures.depart({client: self._clock.due(client) for client in asked}, order)
                continue
            started = time.perf_counter()
            client = self._clock.pass_time(departures, order)
            report.seconds_local += time.perf_counter() - started
            if client is not None:
                self._land(client, report)
        departures.merge(ready)
        flights = {client: self._flights.pop(client) for client in ready}
        for client, flight in flights.items():
            flight.tell(report)
            if late := number - 1 - flight.version:
                report.stale[client] = late
        report.cohort.sort()
        following = self._merged(state, flights, server)
        for client, flight in flights.items():
            if flight.record is not None:
                self._store.write(client, flight.record)
        return following

    def state(self) -> dict[str, Any]:
        """Who is under way between two rounds, as a tree, from which `go_on` can go on."""
        tiers = {tier: {"updates": times, "state": _fields(state)} for tier, (times, state) in self._tiers.items()}
        flights = {client: flight.packed() for client, flight in sorted(self._flights.items())}
        return {"flights": flights, "tiers": tiers, "departures": self._departures.state()}

    def go_on(self, state: Mapping[str, Any], kind: type[Any]) -> None:
        """Go on from a state; `kind` is the type of the method's states.

        Whoever had not answered yet is asked anew: its answer went to a process that is no more.
        """
        self.begin()
        self._flights = {client: Flight.unpacked(client, tree) for client, tree in state["flights"].items()}
        self._tiers = {tier: (one["updates"], kind(**one["state"])) for tier, one in state["tiers"].items()}
        self._anew = sorted(state["departures"]["under_way"].keys() - self._flights.keys())
        self._departures.go_on(state["departures"], without=self._anew)

    def _those_anew_first(self, order: Order, number: int) -> Order:
        """The order, but first those that are asked anew, which is said once."""
        if not self._anew:
            return order
        clients = f"client{'s' * (len(self._anew) > 1)} {', '.join(map(str, self._anew))}"
        be, they = ("are", "they") if len(self._anew) > 1 else ("is", "it")
        why = f"since {they} had not answered when the run was stopped"
        log.warning("round %d: %s %s asked anew, %s", number, clients, be, why, extra=ON_SCREEN)
        first, self._anew = {*self._anew}, []
        return sorted(order, key=lambda client: client not in first)

    def _depart(self, number: int, state: Any, clients: Sequence[ClientId], report: RoundReport) -> None:
        """Ask clients: by a virtual clock they answer at once as far as this process is concerned."""
        server = self._server(number)
        handler, messages = first_ask(self._method, state, clients, server)
        for together in [clients] if self._clock.virtual else [[client] for client in clients]:
            place = ExchangePlace(number, 1, RoundReport(list(together)), server)
            asked = {client: messages[client] for client in together}
            exchange = OpenExchange(self._method, handler, asked, place, self._store, self._lend)
            exchange.ask()
            report.traffic.down.update(exchange.report.traffic.down)
            if self._clock.virtual:
                self._hear(exchange, report)
            else:
                self._open |= dict.fromkeys(together, exchange)

    def _hear(self, exchange: OpenExchange, report: RoundReport) -> None:
        self._flights |= exchange.answered()
        report.seconds_local += exchange.report.seconds_local

    def _land(self, client: ClientId, report: RoundReport) -> None:
        """A client is done."""
        self._clock.land(client)
        if client in self._open:
            self._hear(self._open.pop(client), report)
        reply = self._flights[client].reply
        failed = isinstance(reply, Failure)
        if failed:
            self._flights.pop(client).tell(report)
        self._departures.land(client, counted=not failed, left=failed and reply.kind == "absence")

    def _merged(self, state: Any, flights: Mapping[ClientId, Flight], server: Server) -> Any:
        def alone(client: ClientId, now: Message) -> Message:
            flight = flights[client]
            return self._rule.moved(_reply(flight), flight.sent, now, server.round - 1 - flight.version)

        moved = self._moved_in_tiers(state, flights, server.round) if self._rule.tiers else alone
        return rest_of_round(self._method, state, list(flights), server, moved)

    def _moved_in_tiers(self, state: Any, flights: Mapping[ClientId, Flight], number: int) -> Moved:
        """FedAT, Algorithm 1: the mean of a tier's replies is weighed with the weights of all other tiers."""
        clients, tiers = list(flights), self._rule.tiers or 1
        own = self._departures.tier(clients[0])
        replies = {client: _reply(flight) for client, flight in flights.items()}
        before = self._tiers or dict.fromkeys(range(tiers), (0, state))
        after = rest_of_round(self._method, state, clients, self._server(number), lambda client, now: replies[client])
        self._tiers = {**before, own: (before[own][0] + 1, after)}
        total = sum(times for times, _ in self._tiers.values())
        share = {tier: self._tiers[tiers - 1 - tier][0] / total for tier in self._tiers}
        others = {
            tier: first_ask(self._method, of_tier, clients, self._server(number))[1]
            for tier, (_, of_tier) in self._tiers.items()
            if tier != own and share[tier]
        }

        def moved(client: ClientId, now: Message) -> Message:
            reply = replies[client]
            parts = {
                name: [(share[tier], others[tier][client][name]) for tier in others] for name in flights[client].sent
            }
            return revised(reply, {n: blend([*found, (share[own], reply[n])]) for n, found in parts.items()})

        return moved


def _reply(flight: Flight) -> Message:
    assert isinstance(flight.reply, Message)
    return flight.reply


def _fields(state: Any) -> dict[str, Any]:
    return {spec.name: getattr(state, spec.name) for spec in fields(state)}
