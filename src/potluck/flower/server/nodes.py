"""Which of Flower's nodes is which client, which nodes are online, and how they introduce themselves."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from potluck.core.federation import ClientId
from potluck.core.ground.errors import PotluckError, WireError
from potluck.core.ground.text import one_line
from potluck.experiment.settings.schema import RoundsClose
from potluck.flower import GREETING, HELLO
from potluck.flower.server.pulling import Pulling
from potluck.flower.wire.envelope import unwrap, wrap
from potluck.flower.wire.introduction import Introduction

_LOOK_EVERY = 1.0  # seconds
_SLOWEST = 10  # deadlines after which a node is given up even if there is no quorum without it
_VANISHED_WITHIN = 120.0  # seconds in which Flower has certainly noticed that a node is gone
_LATE = (3, 4)  # Flower's errors for a reply that is lost or came too late
ABSENT = (5, 8)
"""Flower's errors after which a node was not there to the end: it is gone, or its process died, as that of a node does
that was stopped for a while."""


class NodesMissing(PotluckError):
    """Too few nodes have joined."""


class Silent(str):
    """Why a node does not introduce itself, which it may do when it is asked again."""


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
        nodes = sorted(self.grid.get_nodes(), key=_started)  # of two keys of a node, its latest one counts
        self._online = {registered_name(node): (node.node_id, _started(node)) for node in nodes}

    def find(self, client: ClientId) -> int | None:
        """Flower's current number of the client's node; None if it is offline."""
        found = self._online.get(self.names[client])
        return found[0] if found else None

    def started(self, client: ClientId) -> float | None:
        """When it came online, by the server's clock."""
        found = self._online.get(self.names[client])
        return found[1] if found else None

    def restarted(self, client: ClientId, since: float | None) -> bool:
        """Whether it came online anew since a moment at which `started` was `since`."""
        started = self.started(client)
        return started is not None and since is not None and started > since


def registered_name(node: Any) -> str:
    """The name under which a node was registered; without keys, its number."""
    return getattr(node, "name", "") or str(node.node_id)


def wait_for_nodes(
    grid: Grid, wanted: int | Collection[str], needed: int, close: RoundsClose, say: Callable[[str], None]
) -> list[str]:
    """Wait until all nodes are online, or the deadline of an exchange has passed and so many as are needed.

    Args:
        grid: Flower's.
        wanted: the number of nodes, or their names.
        needed: how many of them are needed.
        close: the deadline, and how long to wait at most.
        say: called with progress.

    Returns:
        The names of those online, in order.

    Raises:
        NodesMissing: fewer than are needed have come in time.
    """
    count = wanted if isinstance(wanted, int) else len(wanted)
    began, told = time.monotonic(), -1
    while True:
        names = sorted({registered_name(node) for node in grid.get_nodes()})
        names = names if isinstance(wanted, int) else [name for name in names if name in wanted]
        waited, enough = time.monotonic() - began, len(names) >= needed
        if len(names) >= count or (enough and waited >= close.deadline_s):
            return names[:count]
        here = f"{len(names)} of {count} nodes are here: {', '.join(names) or 'none'}"
        if not enough and close.patience_s is not None and waited >= close.patience_s:
            raise NodesMissing(
                f"{here}; {needed} were needed within {close.patience_s:g} s, which run.rounds_close.patience_s sets"
            )
        if len(names) != told:
            away = "" if isinstance(wanted, int) else f"; missing: {', '.join(sorted(set(wanted) - set(names)))}"
            left = f"without the others after {close.deadline_s:g} s" if enough else f"with {needed} at the least"
            say(f"{here}{away}; the run goes on {left}")
            told = len(names)
        time.sleep(_LOOK_EVERY)


def longest(close: RoundsClose) -> float:
    """Seconds after which a node that is online and says nothing is given up, whether or not there is a quorum."""
    return _SLOWEST * close.deadline_s + _VANISHED_WITHIN


def greet(
    nodes: Nodes, header: Mapping[str, Any], needed: int, close: RoundsClose
) -> dict[ClientId, Introduction | Silent | str]:
    """Send every node its client's id; return its introduction, why it takes no part, or that it says nothing.

    As an exchange does, this ends when all have answered, or at the deadline if so many introductions as are `needed`
    have come.
    """
    nodes.refresh()
    found: dict[ClientId, Introduction | Silent | str] = {}
    asked: dict[str, tuple[ClientId, float | None]] = {}
    for client in nodes.names:
        node, ttl = nodes.find(client), longest(close)
        message = node and Message(wrap({**header, "client": client}), node, HELLO, ttl=ttl, group_id=GREETING)
        number = "".join(filter(None, nodes.grid.push_messages([message]))) if message else ""
        if number:
            asked[number] = client, nodes.started(client)
        else:
            why = "the SuperLink did not take the message for it" if message else "it has gone"
            found[client] = Silent(why)
    began = time.monotonic()
    with Pulling(nodes.grid, dict.fromkeys(asked, 0), poll=0.1) as pulling:
        while len(found) < len(nodes.names):
            waited, here = time.monotonic() - began, sum(isinstance(one, Introduction) for one in found.values())
            if waited >= longest(close) or (waited >= close.deadline_s and here >= needed):
                break
            ends = close.deadline_s if waited < close.deadline_s else longest(close)
            for number, reply in pulling.until(began + min(waited + _LOOK_EVERY, ends)):
                found[asked[number][0]] = _heard(reply)
            nodes.refresh()
            for client, started in asked.values():
                if nodes.restarted(client, started):
                    found.setdefault(client, Silent("it was restarted meanwhile"))
    late = Silent(f"no answer within {time.monotonic() - began:.0f} s")
    return {client: found.get(client, late) for client in nodes.names}


def _heard(reply: Message | WireError) -> Introduction | Silent | str:
    """A node's introduction, or what is wrong with it."""
    if isinstance(reply, WireError):
        return str(reply)
    if reply.has_error():
        reason = one_line(str(reply.error.reason))
        return Silent(reason) if reply.error.code in (*ABSENT, *_LATE) else reason
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
