"""Jobs to a process of our own, and outcomes back."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

from potluck.engine.client.runtime import Job, Outcome
from potluck.engine.frames import limit, nothing, receive, send

_CARRIED = ("payload", "record")
"""Attributes of jobs and outcomes that are long bytes."""


class _End(socket.socket):
    """A socket that closes when it is forgotten: so workers end whose executor nobody closed."""

    def __del__(self) -> None:
        self.close()


class Channel:
    """One end of a way between two processes; it closes when it is forgotten.

    What jobs and outcomes carry are frames, the same message for several clients one; the rest goes as
    `multiprocessing` has it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = _End(fileno=end.detach())

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Both ends."""
        here, there = socket.socketpair()
        return cls(here), cls(there)

    def fileno(self) -> int:
        """The end's number, to wait for it."""
        return self._end.fileno()

    def close(self) -> None:
        """Let the other side know that nobody is here."""
        self._end.close()

    def limit(self, seconds: float) -> None:
        """Have `send` and `receive` look around whenever nothing has moved for so many seconds."""
        limit(self._end, seconds)

    def send(self, items: Sequence[Job | Outcome | Exception], waiting: Callable[[], None] = nothing) -> None:
        """Send some, once the other side listens; `waiting` is called at every `limit`."""
        frames: dict[int, bytes] = {}
        bare = [_bare(item, frames) for item in items]
        send(self._end, ForkingPickler.dumps((bare, list(frames))), *frames.values(), waiting=waiting)

    def receive(self, waiting: Callable[[], None] = nothing) -> list[Any]:
        """What the other side has sent; `waiting` is called at every `limit`.

        Raises:
            EOFError: it has gone.
        """
        bare, names = ForkingPickler.loads(receive(self._end, waiting))  # pyright: ignore[reportAttributeAccessIssue]
        frames = {name: receive(self._end, waiting) for name in names}
        return [_laden(item, {part: frames[name] for part, name in of.items()}) for item, of in bare]


def _bare(item: Job | Outcome | Exception, frames: dict[int, bytes]) -> tuple[Any, dict[str, int]]:
    """An item without what it carries, which joins the frames, and their names by attribute."""
    if isinstance(item, Exception):
        return item, {}
    carried = {part: value for part in _CARRIED if (value := getattr(item, part, None)) is not None}
    frames |= {id(value): value for value in carried.values()}
    return _laden(item, dict.fromkeys(carried, b"")), {part: id(value) for part, value in carried.items()}


def _laden(item: Any, carried: Mapping[str, bytes]) -> Any:
    return replace(item, **carried) if carried else item
