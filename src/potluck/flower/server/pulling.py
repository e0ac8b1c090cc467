"""Pulls replies from nodes one by one, so that one node's reply can neither delay nor spoil another's.

Flower pulls replies together and assembles each from the parts that its node has uploaded. A damaged reply makes the
whole call raise, and the others are lost; one whose parts are missing keeps the call waiting, for hours if they trickle
in; one that names the same part a million times grows to a million parts. So every reply is pulled by its own call, in
a thread that can be abandoned, and none that is longer than the limit is fetched or assembled.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from flwr.app import Array, Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.superlink.grid import http_grid

from potluck.core.ground.errors import WireError
from potluck.core.ground.text import one_line
from potluck.flower import ASKING_AGAIN, LARGEST_REPLY
from potluck.flower.wire.envelope import LONGEST_ENVELOPE_HEADER, MOST_BESIDE_PARTS, PART

CALLS_PER_SECOND = 32.0
"""The most polls of the SuperLink, over all awaited replies; each takes both sides some milliseconds."""


_BESIDE = LONGEST_ENVELOPE_HEADER + 2**20
"""The most bytes of a reply beside its payload: its header, and what Flower adds."""


class _Limit(threading.local):
    """What this thread may read.

    Attributes:
        longest: the most bytes of the payload.
        excess: what was wrong with the reply that it began to fetch.
        came: called when a reply is announced, and with each part of it that has come.
        is_awaited: whether anybody still waits for the reply.
    """

    longest = LARGEST_REPLY
    excess: str | None = None
    came: Callable[[], object] = staticmethod(lambda: None)
    is_awaited: Callable[[], bool] = staticmethod(lambda: True)


_LIMIT = _Limit()
_fetched_by_flower, _assembled_by_flower = pull_objects, Array.inflate


def _fetched(object_ids: Sequence[str], pull_object_fn: Callable[[str], bytes], **options: Any) -> dict[str, bytes]:
    """As Flower's `pull_objects`, but no more bytes than the reply may have: nothing, if it has more.

    Nor for longer than anybody waits for it: threads that ask for its parts would keep the process from ending. Flower
    then tells the SuperLink that the reply was received, so that the rest of it is thrown away there too.
    """
    most = _LIMIT.longest + _BESIDE
    names = list(dict.fromkeys(object_ids))
    left, counting, over = most, threading.Lock(), threading.Event()
    came, is_awaited = _LIMIT.came, _LIMIT.is_awaited
    came()

    def pull(name: str) -> bytes:
        nonlocal left
        if over.is_set() or not is_awaited():
            return b""
        part = pull_object_fn(name)
        came()
        with counting:
            left -= len(part)
            if left < 0:
                over.set()
        return b"" if over.is_set() else part

    if len(names) > most // PART + MOST_BESIDE_PARTS:
        _LIMIT.excess = f"{len(names)} parts of up to {PART} bytes; expected at most {most} bytes"
        return {}
    found = _fetched_by_flower(names, pull, **ASKING_AGAIN, **options)
    if over.is_set():
        _LIMIT.excess = f"more than {most} bytes long; expected at most {_LIMIT.longest}"
        return {}
    return found if is_awaited() else {}


def _assembled(object_content: bytes, children: dict[str, Any] | None = None) -> Array:
    """As Flower's `Array.inflate`, after a check of the length.

    Raises:
        WireError: the array would be longer than the limit.
    """
    parts = get_object_children_ids_from_object_content(object_content)
    places = json.loads(get_object_body(object_content, Array))["arraychunk_ids"]
    length = sum(len((children or {})[parts[place]].data) for place in places)
    if length > _LIMIT.longest:
        raise WireError(f"{length} bytes long; expected at most {_LIMIT.longest}")
    return _assembled_by_flower(object_content, children)


class Pulling:
    """Waits for the replies to messages.

    Args:
        grid: Flower's.
        messages: by message number, the most bytes of the reply.
        poll: seconds between polls for one reply; longer if many are awaited.
    """

    def __init__(self, grid: Grid, messages: Mapping[str, int], poll: float) -> None:
        Array.inflate = _assembled  # type: ignore[method-assign] # Flower has no other hooks
        http_grid.pull_objects = _fetched  # type: ignore[assignment]
        self._grid = grid
        self._poll = poll
        self._longest = dict[str, int]()
        self._waiting = set[str]()
        self._came = dict[str, float]()
        self._found: queue.SimpleQueue[tuple[str, Message | WireError]] = queue.SimpleQueue()
        self._given_up = threading.Event()
        for number, most_bytes in messages.items():
            self.add(number, most_bytes)

    def add(self, number: str, most_bytes: int) -> None:
        """Wait for one more reply, of at most so many bytes."""
        self._longest[number] = most_bytes
        self._waiting.add(number)
        threading.Thread(target=self._pull, args=(number,), name="pulling", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._given_up.set()

    def until(self, deadline: float) -> Iterator[tuple[str, Message | WireError]]:
        """Yield replies as they arrive, with the number of their message; an error if one cannot be read.

        Args:
            deadline: on the monotonic clock.
        """
        while self._waiting:
            try:
                number, reply = self._found.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            if number in self._waiting:
                self._waiting.discard(number)
                yield number, reply

    def forget(self, number: str) -> None:
        """Stop waiting for this reply."""
        self._waiting.discard(number)

    def stalled_s(self, number: str) -> float:
        """Seconds since a part of a reply came that was announced and is not whole; 0 if it was not announced."""
        now = time.monotonic()
        return now - self._came.get(number, now)

    def _pull(self, number: str) -> None:
        _LIMIT.longest = self._longest[number]
        _LIMIT.came = lambda: self._came.update({number: time.monotonic()})
        _LIMIT.is_awaited = is_awaited = lambda: number in self._waiting and not self._given_up.is_set()
        while is_awaited():
            try:
                replies = list(self._grid.pull_messages([number]))
            except Exception as error:  # any exception that a node's bytes cause in Flower
                why = _LIMIT.excess or one_line(repr(error), 200)
                self._found.put((number, WireError(f"its reply cannot be read: {why}")))
                return
            if replies:
                (reply, *_) = replies
                whole = reply.has_content() or reply.has_error()
                self._found.put((number, reply if whole else WireError("its reply is empty")))
                return
            self._given_up.wait(max(self._poll, len(self._waiting) / CALLS_PER_SECOND))
