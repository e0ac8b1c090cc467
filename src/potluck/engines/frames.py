"""Bytes from one process of a machine to another, through a socket, in frames behind their lengths.

A frame is read in one piece into memory that is as long. `multiprocessing`'s connections put it together from pieces
and copy it twice more, which takes longer than its way through the socket.
"""

import socket
import struct

_LENGTH = struct.Struct("<Q")


def send(there: socket.socket, *frames: bytes | memoryview) -> None:
    """Send frames, one after another."""
    for frame in frames:
        there.sendall(_LENGTH.pack(len(frame)))
        there.sendall(frame)


def receive(there: socket.socket) -> bytes:
    """The next frame.

    Raises:
        EOFError: the other side has gone.
    """
    (length,) = _LENGTH.unpack(_exactly(there, _LENGTH.size))
    return _exactly(there, length)


def _exactly(there: socket.socket, count: int) -> bytes:
    found = there.recv(count, socket.MSG_WAITALL)
    while len(found) < count:  # a signal came between, or the system gives at most 2 GiB at once
        more = there.recv(count - len(found), socket.MSG_WAITALL)
        if not more:
            raise EOFError
        found += more
    return found
