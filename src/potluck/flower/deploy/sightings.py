"""What the gate sees of nodes, for those who watch over a server: when each spoke last, and what it is at work on."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

_MOST = 1024  # nodes, if anybody may be one


@dataclass(frozen=True)
class Sighting:
    """A node as the gate saw it last; times are in seconds since 1970.

    Attributes:
        host: the address from which it calls.
        last: when it spoke last.
        left: whether it has said that it leaves, and not come again.
        work: the group of the message that it is at work on, such as the number of a round; None if it is on none.
        since: when it got that message; None likewise.
        answered: the group of the message that it has answered last; None if it has answered none.
        bytes_down: that it was sent since the gate was opened, as far as they are content; `bytes_up` the other way.
        refused: how many of its requests were refused.
        why: why the last one of these was; None if none was.
    """

    host: str = ""
    last: float = 0.0
    left: bool = False
    work: str | None = None
    since: float | None = None
    answered: str | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    refused: int = 0
    why: str | None = None


class Sightings:
    """The last sighting of each node, by its name; of the last 1024 that spoke, if keys do not say who may.

    One thread notes, and any may look.
    """

    def __init__(self) -> None:
        self._last: dict[str, Sighting] = {}
        self._one_at_a_time = threading.Lock()

    def note(self, name: str, sighting: Sighting, *, down: int = 0, up: int = 0, why: str | None = None) -> None:
        """Note a node that has spoken.

        Args:
            name: the node's.
            sighting: without what adds up.
            down: the bytes that it was sent.
            up: the bytes that it has sent.
            why: why its request was refused, if it was.
        """
        with self._one_at_a_time:
            before = self._last.pop(name, None) or Sighting()
            self._last[name] = replace(
                sighting,
                bytes_down=before.bytes_down + down,
                bytes_up=before.bytes_up + up,
                refused=before.refused + (why is not None),
                why=why or before.why,
            )
            if len(self._last) > _MOST:
                del self._last[next(iter(self._last))]

    def look(self) -> Mapping[str, Sighting]:
        """All of them, by name."""
        with self._one_at_a_time:
            return dict(self._last)
