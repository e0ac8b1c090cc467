"""A channel that sends jobs to a worker process and returns outcomes."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

from potluck.engine.client.runtime import Job, Outcome
from potluck.engine.frames import limit, nothing, receive, send

_CARRIED = ("payload", "record")
"""Attributes of jobs and outcomes that hold large byte strings."""


class _End(socket.socket):
    """A socket that closes on garbage collection, so workers exit even if nobody closed their executor."""

    def __del__(self) -> None:
        self.close()


class Channel:
    """One end of a duplex connection between two processes; closed on garbage collection.

    Large byte strings go as frames, a message to several clients as a single one; the rest is pickled as by
    `multiprocessing`.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = _End(fileno=end.detach())

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Both ends."""
        here, there = socket.socketpair()
        return cls(here), cls(there)

    def fileno(self) -> int:
        """The file descriptor, to wait on."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end, which the other side notices."""
        self._end.close()

    def limit(self, seconds: float) -> None:
        """Have `send` and `receive` call `waiting` whenever nothing has moved for this many seconds."""
        limit(self._end, seconds)

    def send(self, items: Sequence[Job | Outcome | Exception], waiting: Callable[[], None] = nothing) -> None:
        """Send items; `waiting` is called at every `limit` until the other side reads."""
        frames: dict[int, bytes] = {}
        bare = [_bare(item, frames) for item in items]
        send(self._end, ForkingPickler.dumps((bare, list(frames))), *frames.values(), waiting=waiting)

    def receive(self, waiting: Callable[[], None] = nothing) -> list[Any]:
        """Receive items; `waiting` is called at every `limit`.

        Raises:
            EOFError: the other side has closed.
        """
        bare, names = ForkingPickler.loads(receive(self._end, waiting))  # pyright: ignore[reportAttributeAccessIssue]
        frames = {name: receive(self._end, waiting) for name in names}
        return [_laden(item, {part: frames[name] for part, name in of.items()}) for item, of in bare]


def _bare(item: Job | Outcome | Exception, frames: dict[int, bytes]) -> tuple[Any, dict[str, int]]:
    """An item without its large byte strings, which are added to `frames`, and their frames by attribute."""
    if isinstance(item, Exception):
        return item, {}
    carried = {part: value for part in _CARRIED if (value := getattr(item, part, None)) is not None}
    frames |= {id(value): value for value in carried.values()}
    return _laden(item, dict.fromkeys(carried, b"")), {part: id(value) for part, value in carried.items()}


def _laden(item: Any, carried: Mapping[str, bytes]) -> Any:
    return replace(item, **carried) if carried else item
