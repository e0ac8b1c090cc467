"""How a run's files reach the disk, so that none is lost however the run ends.

Whatever a run's folder must not lose is written by these functions. A whole file is written aside, synced and renamed
over the old one. Lines are appended, and synced before the checkpoint that counts on them; lines that no checkpoint
counts on are dropped when the run is resumed. An error of the system is a `StorageError` of one line.

Each step (making a folder, writing, appending, syncing, renaming, deleting) is a method of `Disk`, and `using` puts
another disk in its place. That is where tests let a run be killed, the disk fill up or the power go at exactly one
step: see `potluck.testing.faults`.
"""

import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from potluck.core.errors import StorageError

_FEW, _SYNCS_AT_ONCE = 3, 16


class Disk:
    """The steps in which a run's files change; the folders are this system's."""

    def make_folder(self, path: Path) -> None:
        """Make a folder.

        Raises:
            FileExistsError: something of this name is there.
        """
        path.mkdir()

    def write(self, path: Path, content: bytes) -> None:
        """Make or overwrite a file; only `sync` makes it last."""
        with path.open("wb") as file:
            file.write(content)

    def append(self, path: Path, content: bytes) -> None:
        """Add to the end of a file, which is made if need be; only `sync` makes it last."""
        with path.open("ab") as file:
            file.write(content)

    def sync(self, path: Path) -> None:
        """Wait until a file's content, or the names in a folder, are on the disk."""
        if os.name == "nt" and path.is_dir():  # there a folder cannot be opened, and names last without
            return
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def sync_all(self, paths: Sequence[Path]) -> None:
        """`sync` of each, many at a time: the system makes those that wait together last in one go."""
        with ThreadPoolExecutor(_SYNCS_AT_ONCE) as threads:
            for _ in threads.map(self.sync, paths):
                pass

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, in the place of what had it."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()


_disk = Disk()


@contextmanager
def using(disk: Disk) -> Generator[None]:
    """Inside the block every step is this disk's."""
    global _disk
    before, _disk = _disk, disk
    try:
        yield
    finally:
        _disk = before


def write_atomically(path: Path, content: bytes, *, synced: bool = True) -> None:
    """Write a file so that it is seen whole or not at all, also after a crash.

    Its content lasts when this returns; that it is the new one, only after `sync` of its folder.

    Args:
        path: of the file.
        content: all of it.
        synced: if not, its content lasts only after `sync` of it too, and may be torn if the power goes before.

    Raises:
        StorageError: it cannot be written; what was there still is.
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
            with suppress(OSError):  # half a file takes the room that the next one needs
                _disk.remove(aside)
            raise


def append(path: Path, content: bytes) -> None:
    """Add to the end of a file, which is made if need be; it lasts after `sync`.

    Raises:
        StorageError: it cannot be written; part of it may have been.
    """
    with _telling(path):
        _disk.append(path, content)


def sync(*paths: Path) -> None:
    """Wait until these files' content, or the names in these folders, last.

    Raises:
        StorageError: the system cannot promise it.
    """
    if len(paths) > _FEW:
        with _telling(paths[0].parent):
            _disk.sync_all(paths)
        return
    for path in paths:
        with _telling(path):
            _disk.sync(path)


def rename(source: Path, target: Path) -> None:
    """Give a file or folder another name; it lasts after `sync` of the folder.

    Raises:
        StorageError: it cannot be renamed.
    """
    with _telling(target):
        _disk.rename(source, target)


def remove(path: Path) -> None:
    """Delete a file, if it is there.

    Raises:
        StorageError: it cannot be deleted.
    """
    with _telling(path, "delete"), suppress(FileNotFoundError):
        _disk.remove(path)


def make_folder(path: Path, *, new: bool = False) -> None:
    """Make a folder, and those that it lies in.

    Args:
        path: of the folder.
        new: whether it must not be there yet.

    Raises:
        FileExistsError: it is there and was to be new.
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
        if not path.is_dir():  # else somebody was faster
            raise


@contextmanager
def _telling(path: Path, what: str = "write") -> Generator[None]:
    """Say on one line what the system refused."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {what} {path}: {error.strerror or error}") from error
