import ctypes
import os
import struct
from contextlib import contextmanager

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from .deployed import Deployment

_OPEN, _MODIFY, _CREATE, _DELETE, _MOVED = 0x20, 0x2, 0x100, 0x200, 0xC0


@pytest.fixture
def tmp_path(tmp_path_factory):
    """A folder with a short path, since nodes have sockets in theirs, whose paths a system limits."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def deployment(tmp_path):
    """A server of two clients' federation, and its nodes, none of them started yet."""
    found = Deployment(tmp_path)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def touched():
    """What any process on this machine, in any language, opens or changes in a folder inside a block (inotify)."""
    system = ctypes.CDLL(None, use_errno=True)

    @contextmanager
    def watching(folder):
        handle, found = system.inotify_init1(os.O_NONBLOCK), []
        assert handle >= 0, os.strerror(ctypes.get_errno())
        try:
            mask = _OPEN | _MODIFY | _CREATE | _DELETE | _MOVED
            assert system.inotify_add_watch(handle, os.fsencode(folder), mask) >= 0, os.strerror(ctypes.get_errno())
            yield found
            found += _names(handle)
        finally:
            os.close(handle)

    return watching


def _names(handle):
    try:
        events = os.read(handle, 2**16)
    except BlockingIOError:
        return []
    names, place = [], 0
    while place < len(events):
        _, _, _, length = struct.unpack_from("iIII", events, place)
        names.append(events[place + 16 : place + 16 + length].rstrip(b"\0").decode())
        place += 16 + length
    return names
