"""Writing a run's files so that none is lost, however the run ends.

All files that a run's folder must not lose are written by these functions. A whole file is written aside, synced and
renamed over the old one. Lines are appended, and synced before the checkpoint that refers to them; lines that no
checkpoint refers to are dropped when the run is resumed. A system error becomes a one-line `StorageError`.

Each step (making a folder, writing, appending, syncing, renaming, deleting) is a method of `Disk`, and `using` replaces
the disk. Tests use this to kill a run, fill the disk or cut the power at exactly one step: see
`potluck.testing.faults`.
"""

import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from potluck.core.ground.errors import StorageError

_FEW, _SYNCS_AT_ONCE = 3, 16


class Disk:
    """The steps in which a run's files change, on this system's disk."""

    def make_folder(self, path: Path) -> None:
        """Make a folder.

        Raises:
            FileExistsError: a file or folder with this name exists.
        """
        path.mkdir()

    def write(self, path: Path, content: bytes) -> None:
        """Make or overwrite a file; durable only after `sync`."""
        with path.open("wb") as file:
            file.write(content)

    def append(self, path: Path, content: bytes) -> None:
        """Append to a file, which is made if need be; durable only after `sync`."""
        with path.open("ab") as file:
            file.write(content)

    def sync(self, path: Path) -> None:
        """Wait until a file's content, or the names in a folder, are on the disk."""
        if os.name == "nt" and path.is_dir():  # there folders cannot be opened, and names are durable without
            return
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def sync_all(self, paths: Sequence[Path]) -> None:
        """`sync` each, many at a time, which the system does together."""
        with ThreadPoolExecutor(_SYNCS_AT_ONCE) as threads:
            for _ in threads.map(self.sync, paths):
                pass

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, replacing any file with the new name."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()


_disk = Disk()


@contextmanager
def using(disk: Disk) -> Generator[None]:
    """Use this disk for every step inside the block."""
    global _disk
    before, _disk = _disk, disk
    try:
        yield
    finally:
        _disk = before


def write_atomically(path: Path, content: bytes, *, synced: bool = True) -> None:
    """Write a file atomically: it is seen whole or not at all, even after a crash.

    Its content is durable when this returns; its name only after `sync` of the folder.

    Args:
        path: of the file.
        content: all of it.
        synced: if False, its content too is durable only after `sync`, and may be torn if the power fails before.

    Raises:
        StorageError: it cannot be written; the old file is unchanged.
    """
    make_folder(path.parent)
    aside = path.with_name(path.name + ".tmp")
    with _telling(path):
        try:
            _disk.write(aside, content)
            if synced:
                _disk.sync(aside)
            _disk.rename(aside, path)
        except OSError:
            with suppress(OSError):  # a partial file would take room that the next one needs
                _disk.remove(aside)
            raise


def append(path: Path, content: bytes) -> None:
    """Append to a file, which is made if need be; durable after `sync`.

    Raises:
        StorageError: it cannot be written; part of the content may have been.
    """
    with _telling(path):
        _disk.append(path, content)


def sync(*paths: Path) -> None:
    """Wait until these files' content, or the names in these folders, are durable.

    Raises:
        StorageError: the system reports an error.
    """
    if len(paths) > _FEW:
        with _telling(paths[0].parent):
            _disk.sync_all(paths)
        return
    for path in paths:
        with _telling(path):
            _disk.sync(path)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder; durable after `sync` of the parent folder.

    Raises:
        StorageError: it cannot be renamed.
    """
    with _telling(target):
        _disk.rename(source, target)


def remove(path: Path) -> None:
    """Delete a file, if it exists.

    Raises:
        StorageError: it cannot be deleted.
    """
    with _telling(path, "delete"), suppress(FileNotFoundError):
        _disk.remove(path)


def make_folder(path: Path, *, new: bool = False) -> None:
    """Make a folder and its parents.

    Args:
        path: of the folder.
        new: whether it must not exist yet.

    Raises:
        FileExistsError: it exists and had to be new.
        StorageError: it cannot be made.
    """
    if path.is_dir() and not new:
        return
    if not path.parent.is_dir():
        make_folder(path.parent)
    try:
        with _telling(path):
            _disk.make_folder(path)
    except StorageError as error:
        if not isinstance(error.__cause__, FileExistsError):
            raise
        if new:
            raise error.__cause__ from None
        if not path.is_dir():  # another process was faster
            raise


@contextmanager
def _telling(path: Path, what: str = "write") -> Generator[None]:
    """The system's error on one line."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {what} {path}: {error.strerror or error}") from error
