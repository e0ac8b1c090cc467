"""Bytes from one process of a machine to another, through a socket, in frames behind their lengths.

A frame is read in one piece into memory that is as long. `multiprocessing`'s connections put it together from pieces
and copy it twice more, which takes longer than its way through the socket.
"""

import socket
import struct

from potluck.core.errors import WireError

LONGEST = 2**36
"""Bytes of a frame: 64 GiB, more than a message's tensors can take on any machine that these processes share. A longer
one is none: the stream is out of step, and what it claims would be asked of memory."""

_LENGTH = struct.Struct("<Q")


def send(there: socket.socket, *frames: bytes | memoryview) -> None:
    """Send frames, one after another."""
    for frame in frames:
        there.sendall(_LENGTH.pack(len(frame)))
        there.sendall(frame)


def receive(there: socket.socket, longest: int = LONGEST) -> bytes:
    """The next frame.

    Raises:
        EOFError: the other side has gone.
        WireError: the frame claims to be longer than `longest` bytes.
    """
    (length,) = _LENGTH.unpack(_exactly(there, _LENGTH.size))
    if length > longest:
        raise WireError(f"a frame of {length} bytes; at most {longest} are read")
    return _exactly(there, length)


def _exactly(there: socket.socket, count: int) -> bytes:
    found = there.recv(count, socket.MSG_WAITALL)
    while len(found) < count:  # a signal came between, or the system gives at most 2 GiB at once
        more = there.recv(count - len(found), socket.MSG_WAITALL)
        if not more:
            raise EOFError
        found += more
    return found
