"""A method's round in two halves: what it first asks of clients, and what it makes of their replies later."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from potluck.core.federation import ClientId
from potluck.core.ground.errors import ConfigError
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.roles import Arriving, Server
from potluck.engine.disk.store import ClientStore
from potluck.engine.rounds.cohort import RoundCohort
from potluck.engine.rounds.exchange import ClientHandler
from potluck.engine.rounds.report import ExchangePlace, RoundReport

Moved = Callable[[ClientId, Message], Message]
"""A function from a client and what it would be sent now to its reply, as the method shall see it."""


class NotOneAsk(ConfigError):
    """A method's round cannot be cut behind one question to its clients."""


class _Asked(Exception):
    """A method has asked, which is no error; its round goes no further."""

    def __init__(self, handler: ClientHandler, messages: Mapping[ClientId, Message]) -> None:
        super().__init__()
        self.handler, self.messages = handler, messages


def first_ask(
    method: Method[Any], state: Any, clients: Sequence[ClientId], server: Server
) -> tuple[ClientHandler, Mapping[ClientId, Message]]:
    """What a round with these clients first asks of them: a handler, and the messages to it.

    Raises:
        NotOneAsk: it asks nothing, or not each of them.
    """

    def stop(handler: ClientHandler, messages: Mapping[ClientId, Message], place: ExchangePlace) -> Arriving:
        raise _Asked(handler, messages)

    try:
        method.round(state, _cohort(method, clients, stop, server), server)
    except _Asked as asked:
        if set(asked.messages) != set(clients):
            raise NotOneAsk("its round does not ask every client of its cohort") from None
        return asked.handler, asked.messages
    raise NotOneAsk("its round asks clients nothing")


def rest_of_round(method: Method[Any], state: Any, clients: Sequence[ClientId], server: Server, moved: Moved) -> Any:
    """The state after a round whose clients have answered already.

    Raises:
        NotOneAsk: it asks them again.
    """

    def answer(handler: ClientHandler, messages: Mapping[ClientId, Message], place: ExchangePlace) -> Arriving:
        if place.exchange > 1:
            raise NotOneAsk("its round asks clients more than once")

        def replies():
            for client in sorted(messages):
                yield client, moved(client, messages[client])
            place.unread = None

        return Arriving(replies(), {})

    cohort = _cohort(method, clients, answer, server)
    following = method.round(state, cohort, server)
    cohort.finish()
    return following


def _cohort(method: Method[Any], clients: Sequence[ClientId], send: Any, server: Server) -> RoundCohort:
    clients = sorted(clients)
    return RoundCohort(clients, method, send, ExchangePlace(server.round, 0, RoundReport(clients), server))


class Staged(ClientStore):
    """What clients have written, while others still read what was there before.

    Attributes:
        records: by client, the record that is not yet in the store.
    """

    def __init__(self, store: ClientStore) -> None:
        super().__init__()
        self._store = store
        self.records: dict[ClientId, bytes] = {}

    def read(self, client: ClientId) -> bytes | None:
        """The client's record in the store, or None if it has none."""
        return self._store.read(client)

    def write(self, client: ClientId, record: bytes) -> None:
        """Keep a record here."""
        self.records[client] = record

    def check(self, record: bytes) -> None:
        """See `ClientStore.check`."""
        self._store.check(record)
