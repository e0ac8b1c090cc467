"""Byte strings between processes of one machine, through a socket, as frames prefixed with their length.

A frame is read directly into memory of its length. `multiprocessing`'s connections assemble it from pieces and copy it
twice more, which takes longer than the transfer.
"""

import socket
import struct
from collections.abc import Callable

from potluck.core.ground.errors import WireError

LONGEST = 2**36
"""The most bytes of a frame: 64 GiB, more than a message's tensors can take on one machine. A larger length means that
the stream is out of step; it must not be allocated."""

_LENGTH = struct.Struct("<Q")


def nothing() -> None:
    """The default action while a socket waits."""


def limit(there: socket.socket, seconds: float) -> None:
    """Have `send` and `receive` call `waiting` whenever nothing has moved for this many seconds."""
    whole, rest = divmod(seconds, 1)
    for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        there.setsockopt(socket.SOL_SOCKET, way, struct.pack("ll", int(whole), int(1e6 * rest)))


def send(there: socket.socket, *frames: bytes | memoryview, waiting: Callable[[], None] = nothing) -> None:
    """Send frames, one after another.

    Args:
        there: the socket to send to.
        frames: the bytes.
        waiting: called whenever the other side has read nothing for the socket's `limit`.
    """
    for frame in frames:
        for part in (_LENGTH.pack(len(frame)), frame):
            _all(there, memoryview(part), waiting)


def receive(there: socket.socket, waiting: Callable[[], None] = nothing, longest: int = LONGEST) -> bytes:
    """The next frame.

    Args:
        there: the socket to receive from.
        waiting: called whenever nothing has arrived for the socket's `limit`.
        longest: the most bytes of a frame.

    Raises:
        EOFError: the other side has closed.
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
    while len(found) < count:  # a signal or the limit interrupted it, or the system's maximum of 2 GiB at a time
        try:
            more = there.recv(count - len(found), socket.MSG_WAITALL)
        except BlockingIOError:
            waiting()
            continue
        if not more:
            raise EOFError
        found = found + more if found else more
    return found
