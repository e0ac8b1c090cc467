"""Bytes from one process of a machine to another, through a socket, in frames behind their lengths.

A frame is read in one piece into memory that is as long. `multiprocessing`'s connections put it together from pieces
and copy it twice more, which takes longer than its way through the socket.
"""

import socket
import struct
from collections.abc import Callable

from potluck.core.errors import WireError

LONGEST = 2**36
"""Bytes of a frame: 64 GiB, more than a message's tensors can take on any machine that these processes share. A longer
one is none: the stream is out of step, and what it claims would be asked of memory."""

_LENGTH = struct.Struct("<Q")


def nothing() -> None:
    """What is done while a socket waits, unless it is told otherwise."""


def limit(there: socket.socket, seconds: float) -> None:
    """Have `send` and `receive` look around whenever nothing has moved for so many seconds."""
    whole, rest = divmod(seconds, 1)
    for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        there.setsockopt(socket.SOL_SOCKET, way, struct.pack("ll", int(whole), int(1e6 * rest)))


def send(there: socket.socket, *frames: bytes | memoryview, waiting: Callable[[], None] = nothing) -> None:
    """Send frames, one after another.

    Args:
        there: where to.
        frames: the bytes.
        waiting: called whenever the other side has taken nothing for as long as the socket's `limit`.
    """
    for frame in frames:
        for part in (_LENGTH.pack(len(frame)), frame):
            _all(there, memoryview(part), waiting)


def receive(there: socket.socket, waiting: Callable[[], None] = nothing, longest: int = LONGEST) -> bytes:
    """The next frame.

    Args:
        there: where from.
        waiting: called whenever nothing has come for as long as the socket's `limit`.
        longest: bytes that a frame may have.

    Raises:
        EOFError: the other side has gone.
        WireError: the frame claims to be longer than `longest` bytes.
    """
    (length,) = _LENGTH.unpack(_exactly(there, _LENGTH.size, waiting))
    if length > longest:
        raise WireError(f"a frame of {length} bytes; at most {longest} are read")
    return _exactly(there, length, waiting)


def _all(there: socket.socket, part: memoryview, waiting: Callable[[], None]) -> None:
    while part:
        try:
            part = part[there.send(part) :]
        except BlockingIOError:
            waiting()


def _exactly(there: socket.socket, count: int, waiting: Callable[[], None]) -> bytes:
    found = b""
    while len(found) < count:  # a signal came between, or the limit, or the system gives at most 2 GiB at once
        try:
            more = there.recv(count - len(found), socket.MSG_WAITALL)
        except BlockingIOError:
            waiting()
            continue
        if not more:
            raise EOFError
        found = found + more if found else more
    return found
