"""Asynchronous rounds: clients are asked one by one, and a round is made of the replies that have come."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, Protocol

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.roles import Failure, Server
from potluck.engine.disk.store import ClientStore
from potluck.engine.rounds.asynchrony.asking import Moved, Staged, first_ask, rest_of_round
from potluck.engine.rounds.asynchrony.departures import Departures, Presence
from potluck.engine.rounds.asynchrony.flights import Flight
from potluck.engine.rounds.asynchrony.rules import Asynchrony, blend, revised
from potluck.engine.rounds.clock import Clock
from potluck.engine.rounds.exchange import ClientHandler, Exchange, Lent
from potluck.engine.rounds.lost import Lost
from potluck.engine.rounds.report import ExchangePlace, RoundReport

Order = Sequence[ClientId]


class ClockOfDepartures(Clock, Protocol):
    """A clock by which clients are under way on their own; its exchanges close at once.

    Attributes:
        course: the time.
    """

    course: Presence

    def due(self, client: ClientId) -> float:
        """When a client that is under way is done, or leaves."""
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
        self._departures = Departures(rule, at_once)
        self._at_once = at_once
        self._flights: dict[ClientId, Flight] = {}
        self._tiers: dict[int, tuple[int, Any]] = {}  # of each, how often it was updated, and the state then

    def begin(self) -> None:
        """Begin anew: nobody is under way."""
        self._departures, self._flights, self._tiers = Departures(self._rule, self._at_once), {}, {}

    def close(self, state: Any, order: Order, server: Server, report: RoundReport) -> Any:
        """Ask clients until a round closes; return the state after it.

        Args:
            state: the method's, before the round.
            order: all clients, those first that are preferred.
            server: the server's half of the round.
            report: gets what the round's clients have taken, and those that have failed since the last one.

        Raises:
            Lost: nobody is left to ask.
        """
        departures, course, number = self._departures, self._clock.course, server.round
        departures.begin()
        while not (ready := departures.ready()):
            if asked := departures.to_ask(order, course):
                self._depart(number, state, asked, report)
                departures.depart({client: self._clock.due(client) for client in asked}, order)
            elif (client := departures.pass_time(order, course)) is not None:
                self._land(client, report)
        departures.merge(ready)
        flights = {client: self._flights.pop(client) for client in ready}
        for flight in flights.values():
            flight.tell(report)
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
        """Go on from a state; `kind` is the type of the method's states."""
        self.begin()
        self._flights = {client: Flight.unpacked(client, tree) for client, tree in state["flights"].items()}
        self._tiers = {tier: (one["updates"], kind(**one["state"])) for tier, one in state["tiers"].items()}
        self._departures.go_on(state["departures"])

    def _depart(self, number: int, state: Any, clients: Sequence[ClientId], report: RoundReport) -> None:
        """Ask clients, who answer at once as far as this process is concerned."""
        server = self._server(number)
        handler, messages = first_ask(self._method, state, clients, server)
        own, staged = RoundReport(list(clients)), Staged(self._store)
        replies = self._replies(handler, messages, ExchangePlace(number, 1, own, server), staged)
        report.traffic.down.update(own.traffic.down)
        report.seconds_local += own.seconds_local
        work = {one.client: one for one in own.work}
        for client in clients:
            reply = own.failures.get(client) or replies[client]
            self._flights[client] = Flight(
                client,
                number - 1,
                self._revised(messages[client], reply),
                reply,
                staged.records.get(client),
                work[client],
                tuple(own.losses.get(client, ())),
                own.client_notes.get(client),
            )

    def _revised(self, message: Message, reply: Message | Failure) -> Message:
        """What was sent of the entries that a reply revises."""
        if isinstance(reply, Failure):
            return Message()
        names = self._method.revises or ()
        return Message(**{name: message[name] for name in names if name in message and name in reply})

    def _replies(
        self, handler: ClientHandler, messages: Mapping[ClientId, Message], place: ExchangePlace, staged: Staged
    ) -> dict[ClientId, Message]:
        replies: dict[ClientId, Message] = {}
        with suppress(Lost):  # if nobody has answered, other clients may still close the round
            replies.update(Exchange(self._lend(staged), handler, messages, place).arriving())
        return replies

    def _land(self, client: ClientId, report: RoundReport) -> None:
        """A client is done."""
        self._clock.land(client)
        failed = isinstance(self._flights[client].reply, Failure)
        if failed:
            self._flights.pop(client).tell(report)
        self._departures.land(client, counted=not failed)

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
