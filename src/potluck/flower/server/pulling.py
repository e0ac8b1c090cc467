"""Pulls replies from nodes one by one, so that one node's reply can neither delay nor spoil another's.

Flower pulls replies together and assembles each from the parts that its node has uploaded. A damaged reply makes the
whole call raise, and the others are lost; one whose parts are missing keeps the call waiting, for hours if they trickle
in; one that names the same part a million times grows to a million parts. So every reply is pulled by its own call, in
a thread that can be abandoned, and none that is longer than the limit is assembled.
"""

import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from flwr.app import Array, Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
)

from potluck.core.errors import WireError
from potluck.core.text import one_line

LONGEST_REPLY = 2**32
"""The most bytes of an assembled reply, if the method sets no limit: 4 GiB, the weights of a network of a thousand
million parameters."""

CALLS_PER_SECOND = 32.0
"""The most polls of the SuperLink, over all awaited replies; each takes both sides some milliseconds."""


class _Bounded:
    """Flower's assembly of an array, after a check of its length.

    Attributes:
        of_thread: its `longest` is the most bytes that this thread may assemble.
    """

    def __init__(self) -> None:
        self._whole = Array.inflate
        self.of_thread = threading.local()

    def __call__(self, object_content: bytes, children: dict[str, Any] | None = None) -> Array:
        """As `Array.inflate`.

        Raises:
            WireError: the array would be longer than the limit.
        """
        parts = get_object_children_ids_from_object_content(object_content)
        places = json.loads(get_object_body(object_content, Array))["arraychunk_ids"]
        length = sum(len((children or {})[parts[place]].data) for place in places)
        if length > (longest := getattr(self.of_thread, "longest", LONGEST_REPLY)):
            raise WireError(f"{length} bytes long; expected at most {longest}")
        return self._whole(object_content, children)


_BOUNDED = _Bounded()


class Pulling:
    """Waits for the replies to messages.

    Args:
        grid: Flower's.
        messages: by message number, the most bytes of the reply.
        poll: seconds between polls for one reply; longer if many are awaited.
    """

    def __init__(self, grid: Grid, messages: Mapping[str, int], poll: float) -> None:
        Array.inflate = _BOUNDED  # type: ignore[method-assign] # Flower has no other hook
        self._grid = grid
        self._poll = poll
        self._longest = dict(messages)
        self._waiting = set(messages)
        self._found: queue.SimpleQueue[tuple[str, Message | WireError]] = queue.SimpleQueue()
        self._given_up = threading.Event()
        for number in self._waiting:
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

    def _pull(self, number: str) -> None:
        _BOUNDED.of_thread.longest = self._longest[number]
        while not self._given_up.is_set() and number in self._waiting:
            try:
                replies = list(self._grid.pull_messages([number]))
            except Exception as error:  # any exception that a node's bytes cause in Flower
                self._found.put((number, WireError(f"its reply cannot be read: {one_line(repr(error), 200)}")))
                return
            if replies:
                (reply, *_) = replies
                whole = reply.has_content() or reply.has_error()
                self._found.put((number, reply if whole else WireError("its reply is empty")))
                return
            self._given_up.wait(max(self._poll, len(self._waiting) / CALLS_PER_SECOND))
