"""What some clients were asked together in an asynchronous round, and how each answers, whenever that is."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.roles import Failure
from potluck.engine.disk.store import ClientStore
from potluck.engine.rounds.asynchrony.asking import Staged
from potluck.engine.rounds.asynchrony.flights import Flight
from potluck.engine.rounds.exchange import ClientHandler, Exchange, Lent
from potluck.engine.rounds.lost import Lost
from potluck.engine.rounds.report import ExchangePlace, RoundReport, WorkDone


class OpenExchange:
    """An exchange that is open beyond the round in which it began; clients' states change when a later round closes.

    Args:
        method: whose handler is called.
        handler: it.
        messages: by client, what it is sent.
        place: of the exchange in the run.
        store: of clients' states, which is only read.
        lend: what an exchange needs, with another store.
    """

    def __init__(
        self,
        method: Method[Any],
        handler: ClientHandler,
        messages: Mapping[ClientId, Message],
        place: ExchangePlace,
        store: ClientStore,
        lend: Callable[[ClientStore], Lent],
    ) -> None:
        self._method, self._messages, self._place = method, messages, place
        self._staged = Staged(store)
        self._exchange = Exchange(lend(self._staged), handler, messages, place)

    @property
    def report(self) -> RoundReport:
        """What is known of the exchange so far."""
        return self._place.report

    def ask(self) -> None:
        """Send the messages; private releases that they may cause are recorded first."""
        self._exchange.begin()

    def abandon(self) -> None:
        """Wait for no answer any more."""
        self._exchange.abandon()

    def answered(self) -> dict[ClientId, Flight]:
        """Each client's part, whose outcome is there, or is waited for.

        Raises:
            ClientFailure: a client failed and failures are not tolerated.
            DivergenceError: a client diverged and the run stops on divergence.
        """
        replies: dict[ClientId, Message] = {}
        with suppress(Lost):  # if nobody has answered, other clients may still close the round
            replies.update(self._exchange.arriving())
        work = {one.client: one for one in self.report.work}
        outcomes = {client: self.report.failures.get(client) or replies[client] for client in self._messages}
        return {client: self._flight(client, reply, work[client]) for client, reply in outcomes.items()}

    def _flight(self, client: ClientId, reply: Message | Failure, work: WorkDone) -> Flight:
        report = self.report
        return Flight(
            client,
            self._place.round - 1,
            self._revised(client, reply),
            reply,
            self._staged.records.get(client),
            work,
            tuple(report.losses.get(client, ())),
            report.client_notes.get(client),
        )

    def _revised(self, client: ClientId, reply: Message | Failure) -> Message:
        """What was sent of the entries that a reply revises."""
        if isinstance(reply, Failure):
            return Message()
        message, names = self._messages[client], self._method.revises or ()
        return Message(**{name: message[name] for name in names if name in message and name in reply})
