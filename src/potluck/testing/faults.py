"""A disk on which a run is killed, runs out of space, or loses power at exactly one step.

    disk = Faulty(at=17, fault="kill")
    with suppress(Killed), using(disk):
        run.run()

The steps are those of `potluck.engine.disk.files.Disk`, counted from 0. `Faulty()` has no fault and counts.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from potluck.engine.disk.files import Disk

Fault = Literal["kill", "torn", "full", "lost", "kept", "mixed"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


class Killed(BaseException):
    """The process was killed: remaining code only unwinds, and no file changes."""


class Faulty(Disk):
    """A disk whose step number `at` fails.

    Args:
        at: the step; None for none.
        fault: the fault at this step. "kill": the process ends just before the step; "torn": in the middle of it, so
            that half of the content is written. "full": half is written and the disk is full from then on. "lost": the
            power fails, and everything not synced is lost; "kept": the power fails, new names survive, and half of each
            content that was not synced; "mixed": the power fails, the last renaming survives and none before it.
    """

    def __init__(self, at: int | None = None, fault: Fault = "kill") -> None:
        self.steps: list[str] = []
        self._at = at
        self._fault: Fault = fault
        self._dead = False
        self._lasting: dict[Path, bytes | None] = {}  # the durable content of files touched; None: no file
        self._unsynced: set[Path] = set()
        self._latest: Path | None = None  # the file renamed last

    def make_folder(self, path: Path) -> None:
        """See `Disk`; a folder is durable once it is made."""
        if self._fails("make folder", path):
            self._full(path)
        super().make_folder(path)

    def write(self, path: Path, content: bytes) -> None:
        """See `Disk`."""
        self._put(path, content, "wb")

    def append(self, path: Path, content: bytes) -> None:
        """See `Disk`."""
        self._put(path, content, "ab")

    def sync(self, path: Path) -> None:
        """Record what is durable from now on; nothing is really synced."""
        if self._fails("sync", path):
            self._full(path)
        if path.is_dir():
            torn = {touched: self._torn(touched) for touched in self._unsynced if touched.parent == path}
            elsewhere = {touched: kept for touched, kept in self._lasting.items() if touched.parent != path}
            self._lasting = {**elsewhere, **torn}
            return
        self._unsynced.discard(path)
        if self._lasting.get(path, b"") is not None:  # its name is durable already
            self._lasting.pop(path, None)

    def sync_all(self, paths: Sequence[Path]) -> None:
        """See `Disk`; one step a file, in order."""
        for path in paths:
            self.sync(path)

    def rename(self, source: Path, target: Path) -> None:
        """See `Disk`; needs no room."""
        self._fails("rename", target)
        for path in (source, target):
            self._touch(path)
        super().rename(source, target)
        self._latest = target
        if source in self._unsynced:
            self._unsynced.remove(source)
            self._unsynced.add(target)

    def remove(self, path: Path) -> None:
        """See `Disk`; needs no room."""
        self._fails("remove", path)
        self._touch(path)
        super().remove(path)
        self._latest = path
        self._unsynced.discard(path)

    def _put(self, path: Path, content: bytes, how: Literal["wb", "ab"]) -> None:
        full = self._fails("write" if how == "wb" else "append", path, (path, content, how))
        self._touch(path)
        with path.open(how) as file:
            file.write(_half(content) if full else content)
        self._unsynced.add(path)
        if full:
            self._full(path)

    def _touch(self, path: Path) -> None:
        if path not in self._lasting and not path.is_dir():
            self._lasting[path] = path.read_bytes() if path.is_file() else None

    def _fails(self, step: str, path: Path, put: tuple[Path, bytes, Literal["wb", "ab"]] | None = None) -> bool:
        """Count a step; return whether the disk is full. Raises in a killed process."""
        if self._dead:
            raise Killed
        number = len(self.steps)
        self.steps.append(f"{step} {path.name}")
        if self._fault == "full":
            return self._at is not None and number >= self._at
        if number != self._at:
            return False
        self._dead = True
        if self._fault == "torn" and put:
            place, content, how = put
            with place.open(how) as file:
                file.write(_half(content))
        if self._fault in ("lost", "mixed"):
            self._forget(self._latest if self._fault == "mixed" else None)
        if self._fault == "kept":
            for unsynced in self._unsynced:
                unsynced.write_bytes(self._torn(unsynced))
        raise Killed

    def _forget(self, but: Path | None) -> None:
        for path, lasting in self._lasting.items():
            if path == but:
                continue
            if lasting is not None:
                path.write_bytes(lasting)
            elif path.is_file():
                path.unlink()

    def _torn(self, path: Path) -> bytes:
        """What may remain of a file that was not synced: the durable content, and half of the rest."""
        content, kept = path.read_bytes(), self._lasting.get(path) or b""
        kept = kept if content.startswith(kept) else b""
        return kept + _half(content[len(kept) :])

    def _full(self, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _half(content: bytes) -> bytes:
    return content[: len(content) // 2]
