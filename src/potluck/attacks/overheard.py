"""What the server hears in a round: a run goes on for one more, in memory, and nothing that passes is missed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.engine.client.session import Call
from potluck.engine.disk.store import ClientStore
from potluck.engine.executors.hearing import Hearing
from potluck.engine.rounds.engine import Engine


@dataclass(frozen=True)
class Heard:
    """What passed between the server and one client.

    Attributes:
        client: the client.
        sent: what the server sent, as the client decoded it; entries of several exchanges together.
        reply: what the client replied, likewise.
        calls: the requests, in order.
    """

    client: ClientId
    sent: Mapping[str, Any]
    reply: Mapping[str, Any]
    calls: tuple[Call, ...]


@dataclass(frozen=True, eq=False)
class Overheard:
    """A round that was listened to.

    Attributes:
        engine: a copy of the run's, after that round.
        round: its number.
        heard: by client; all take part.
    """

    engine: Engine
    round: int
    heard: Mapping[ClientId, Heard]


def overhear(engine: Engine, state: Any) -> Overheard:
    """Go on from a method's state for a round with all clients, and listen.

    The engine that is given, its state and its store stay as they are: clients' records are copied to memory.

    Raises:
        ClientFailure: a client failed.
        DivergenceError: numbers became NaN or infinite.
    """
    store, ids = ClientStore(), sorted(engine.federation.sites)
    for client in ids:
        if (record := engine.store.read(client)) is not None:
            store.write(client, record)
    copy = Engine(
        engine.method,
        engine.federation,
        seed=engine.seed,
        store=store,
        executor=(hearing := Hearing()),
        computing=engine.runtime.computing,
        clipping=engine.runtime.clipping,
    )
    number = engine.rounds_done + 1
    copy.round(number, state, ids)
    heard = {client: _of_client(client, hearing) for client in ids}
    return Overheard(copy, number, {client: one for client, one in heard.items() if one.calls})


def _of_client(client: ClientId, hearing: Hearing) -> Heard:
    own = [(call, answer) for call, answer in hearing.exchanges if call.client == client]
    sent, reply = dict[str, Any](), dict[str, Any]()
    for call, answer in own:
        sent |= Message.decode(call.payload)
        reply |= Message.decode(answer.payload)
    return Heard(client, sent, reply, tuple(call for call, _ in own))
