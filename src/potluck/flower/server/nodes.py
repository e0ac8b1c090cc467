"""Which of Flower's nodes is which client: who has come, who is there, how they introduce themselves."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from potluck.core.errors import PotluckError, WireError
from potluck.core.federation import ClientId
from potluck.core.text import one_line
from potluck.flower import GREETING, HELLO
from potluck.flower.server.pulling import Pulling
from potluck.flower.wire.envelope import unwrap, wrap
from potluck.flower.wire.introduction import Introduction


class NodesMissing(PotluckError):
    """Fewer nodes than clients have come."""


@dataclass
class Nodes:
    """Which node is which client, by the names that nodes are registered with.

    Attributes:
        names: of the clients' nodes, by client; never changes during a run.
    """

    grid: Grid
    names: Mapping[ClientId, str]
    _online: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])

    def refresh(self) -> None:
        """Look who is there."""
        self._online = {name_of(node): (node.node_id, _started(node)) for node in self.grid.get_nodes()}

    def find(self, client: ClientId) -> int | None:
        """The number that Flower calls the client's node by now; None while it is away."""
        found = self._online.get(self.names[client])
        return found[0] if found else None

    def started(self, client: ClientId) -> float | None:
        """When it came, on its server's clock."""
        found = self._online.get(self.names[client])
        return found[1] if found else None


def name_of(node: Any) -> str:
    """The name that a node was registered with; without keys, its number."""
    return getattr(node, "name", "") or str(node.node_id)


def wait_for_nodes(grid: Grid, wanted: int | Collection[str], patience: float, say: Callable[[str], None]) -> list[str]:
    """Names of nodes that are there, in order.

    Args:
        grid: Flower's.
        wanted: how many, whoever they are, or their names.
        patience: seconds.
        say: told of the waiting.

    Raises:
        NodesMissing: patience ends before they have come.
    """
    count = wanted if isinstance(wanted, int) else len(wanted)
    deadline, told = time.monotonic() + patience, -1
    while True:
        names = sorted(name_of(node) for node in grid.get_nodes())
        names = names if isinstance(wanted, int) else [name for name in names if name in wanted]
        if len(names) >= count:
            return names[:count]
        if time.monotonic() > deadline:
            raise NodesMissing(
                f"{len(names)} of {count} nodes came within {patience:.0f} s: {', '.join(names) or 'none'}"
            )
        if len(names) != told:
            away = "" if isinstance(wanted, int) else f"; missing: {', '.join(sorted(set(wanted) - set(names)))}"
            say(f"{len(names)} of {count} nodes are here{away}")
            told = len(names)
        time.sleep(1.0)


def greet(nodes: Nodes, words: Mapping[str, Any], timeout: float) -> dict[ClientId, Introduction | str]:
    """Tell every node which client it is, and hear what it is made of, or why it takes no part."""
    nodes.refresh()
    found: dict[ClientId, Introduction | str] = {}
    asked: dict[str, ClientId] = {}
    for client in nodes.names:
        node = nodes.find(client)
        message = node and Message(wrap({**words, "client": client}), node, HELLO, ttl=timeout, group_id=GREETING)
        number = "".join(filter(None, nodes.grid.push_messages([message]))) if message else ""
        if number:
            asked[number] = client
        else:
            found[client] = "the SuperLink did not take the message for it" if message else "it has gone"
    with Pulling(nodes.grid, dict.fromkeys(asked, 0), poll=0.1) as pulling:
        for number, reply in pulling.until(time.monotonic() + timeout):
            found[asked[number]] = _heard(reply)
    return {client: found.get(client, f"no answer within {timeout:.0f} s") for client in nodes.names}


def _heard(reply: Message | WireError) -> Introduction | str:
    """How a node introduces itself, or what is wrong with that."""
    if isinstance(reply, WireError):
        return str(reply)
    if reply.has_error():
        return one_line(str(reply.error.reason))
    try:
        words, payload = unwrap(reply.content)
        if payload:
            raise WireError(f"its introduction: {len(payload)} bytes beside its words; expected none")
        return Introduction.read(words)
    except WireError as error:
        return one_line(str(error))


def _started(node: Any) -> float:
    """When a node came, as a number that grows."""
    at = getattr(node, "last_activated_at", "")
    return float(at) if isinstance(at, (int, float)) else _seconds(str(at))


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
