"""Which of Flower's nodes is which client, which nodes are online, and how they introduce themselves."""

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
from potluck.flower import FAREWELL, GREETING, HELLO, REFUSAL
from potluck.flower.server.pulling import Pulling
from potluck.flower.wire.envelope import unwrap, wrap
from potluck.flower.wire.introduction import Introduction


class NodesMissing(PotluckError):
    """Fewer nodes than clients have joined."""


@dataclass
class Nodes:
    """The mapping of clients to nodes, by the names under which nodes are registered.

    Attributes:
        names: by client, the name of its node; constant during a run.
    """

    grid: Grid
    names: Mapping[ClientId, str]
    _online: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])

    def refresh(self) -> None:
        """Update which nodes are online."""
        self._online = {name_of(node): (node.node_id, _started(node)) for node in self.grid.get_nodes()}

    def find(self, client: ClientId) -> int | None:
        """Flower's current number of the client's node; None if it is offline."""
        found = self._online.get(self.names[client])
        return found[0] if found else None

    def started(self, client: ClientId) -> float | None:
        """When it came online, by the server's clock."""
        found = self._online.get(self.names[client])
        return found[1] if found else None


def name_of(node: Any) -> str:
    """The name under which a node was registered; without keys, its number."""
    return getattr(node, "name", "") or str(node.node_id)


def wait_for_nodes(grid: Grid, wanted: int | Collection[str], patience: float, say: Callable[[str], None]) -> list[str]:
    """Wait for nodes, and return the names of those online, in order.

    Args:
        grid: Flower's.
        wanted: the number of nodes, or their names.
        patience: seconds to wait.
        say: called with progress.

    Raises:
        NodesMissing: too few are online within `patience`.
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


def greet(nodes: Nodes, header: Mapping[str, Any], timeout: float) -> dict[ClientId, Introduction | str]:
    """Send every node its client's id; return its introduction, or why it takes no part."""
    nodes.refresh()
    found: dict[ClientId, Introduction | str] = {}
    asked: dict[str, ClientId] = {}
    for client in nodes.names:
        node = nodes.find(client)
        message = node and Message(wrap({**header, "client": client}), node, HELLO, ttl=timeout, group_id=GREETING)
        number = "".join(filter(None, nodes.grid.push_messages([message]))) if message else ""
        if number:
            asked[number] = client
        else:
            found[client] = "the SuperLink did not take the message for it" if message else "it has gone"
    with Pulling(nodes.grid, dict.fromkeys(asked, 0), poll=0.1) as pulling:
        for number, reply in pulling.until(time.monotonic() + timeout):
            found[asked[number]] = _heard(reply)
    return {client: found.get(client, f"no answer within {timeout:.0f} s") for client in nodes.names}


def tell_refused(grid: Grid, name: str, run: str, why: str) -> None:
    """Tell a node that it takes no part in a run, and why, for its own terminal; no answer is waited for."""
    numbers = [node.node_id for node in grid.get_nodes() if name_of(node) == name]
    grid.push_messages(
        [Message(wrap({"run": run, "why": why}), node, REFUSAL, ttl=60, group_id=FAREWELL) for node in numbers]
    )


def _heard(reply: Message | WireError) -> Introduction | str:
    """A node's introduction, or what is wrong with it."""
    if isinstance(reply, WireError):
        return str(reply)
    if reply.has_error():
        return one_line(str(reply.error.reason))
    try:
        header, payload = unwrap(reply.content)
        if payload:
            raise WireError(f"its introduction: {len(payload)} bytes beside its header; expected none")
        return Introduction.read(header)
    except WireError as error:
        return one_line(str(error))


def _started(node: Any) -> float:
    """When a node came online, as an increasing number."""
    at = getattr(node, "last_activated_at", "")
    return float(at) if isinstance(at, (int, float)) else _seconds(str(at))


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
