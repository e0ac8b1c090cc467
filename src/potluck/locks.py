"""Locks on files against other processes, which the system lets go when a process ends, however it ends."""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from potluck.core.ground.errors import CheckpointError, StorageError

try:
    import fcntl
except ImportError:  # a system without file locks
    fcntl = None

_held: set[IO[str]] = set()


class HeldError(CheckpointError):
    """Another process holds the lock."""


def _let_go() -> None:
    for file in _held:
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):  # a worker that outlives its parent must not keep the lock
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def locked(path: Path, patience: float, otherwise: str) -> Generator[None]:
    """Hold the lock of a file, which is made if it is not there.

    Args:
        path: of the file.
        patience: seconds to wait for a process that is about to end, or only looks; see `is_locked`.
        otherwise: what to say if another process holds it.

    Raises:
        HeldError: another process holds it.
        StorageError: the file cannot be made.
    """
    deadline = time.monotonic() + patience
    try:
        file = path.open("a")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    with file:
        while not _locked(file):
            if time.monotonic() >= deadline:
                raise HeldError(otherwise)
            time.sleep(0.05)
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)


@contextmanager
def shortly_locked(file: int, patience: float) -> Generator[None]:
    """Hold the lock of an open file for a moment, or go on without it.

    So it is if another process does not let it go, or where the file lies there are no locks.

    Args:
        file: its descriptor.
        patience: seconds to wait.
    """
    deadline = time.monotonic() + patience
    with suppress(OSError):
        while not _locked(file) and time.monotonic() < deadline:
            time.sleep(0.001)
    try:
        yield
    finally:
        if fcntl is not None:  # closing the file does not, if a worker was forked meanwhile
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _locked(file: IO[str] | int) -> bool:
    """Whether this process has now locked the file."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a file, for which it is taken for an instant; None if it cannot be told."""
    if fcntl is None:
        return None
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
