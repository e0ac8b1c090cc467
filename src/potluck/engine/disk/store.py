"""Clients' states as bytes: in memory up to a cap, then in files named by their content."""

import re
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from potluck.core.federation import ClientId
from potluck.core.ground.digest import digest
from potluck.core.ground.errors import CheckpointError
from potluck.engine.disk.files import remove, sync, write_atomically

_NAME = re.compile(r"\d+-[0-9a-f]{32}\.safetensors")
_DEFAULT_CAP_BYTES = 4 * 2**30


class ContentFiles:
    """Files named by the digest of their content, so that none is ever overwritten with different content.

    They are durable after `sync` of this object and of their folder.
    """

    def __init__(self) -> None:
        self._whole: set[Path] = set()  # files that this process has written or checked
        self._unsynced: list[Path] = []  # those of them that a power failure might still destroy

    def put(self, path: Path, content: bytes) -> None:
        """Write a file, unless it exists and is whole.

        Raises:
            StorageError: it cannot be written.
        """
        if path not in self._whole:
            if not (path.is_file() and path.read_bytes() == content):  # a killed run may have left it damaged
                write_atomically(path, content, synced=False)
            self._whole.add(path)
            self._unsynced.append(path)

    def found(self, paths: Iterable[Path]) -> None:
        """Mark these files as whole and durable."""
        self._whole.update(paths)

    def sync(self) -> None:
        """Wait until the content of all files is durable."""
        sync(*self._unsynced)
        self._unsynced.clear()

    def forget_except(self, names: Container[str]) -> None:
        """Forget files that were deleted."""
        self._whole = {path for path in self._whole if path.name in names}
        self._unsynced = [path for path in self._unsynced if path.name in names]


class ClientStore:
    """One packed record for each client: its state between rounds.

    Records beyond `cap_bytes` go to disk, least recently used first. A file's name holds the digest of its
    content, so a record that has changed since the last checkpoint never overwrites the checkpoint's copy. Files are
    made durable together, by `save`.
    """

    def __init__(self, folder: Path | None = None, cap_bytes: int = _DEFAULT_CAP_BYTES) -> None:
        self._given_folder = folder
        self._cap_bytes = cap_bytes
        self._memory: OrderedDict[ClientId, bytes] = OrderedDict()
        self._memory_bytes = 0
        self._files: dict[ClientId, str] = {}  # by client, the file that holds the current record, if one does
        self._content = ContentFiles()

    def read(self, client: ClientId) -> bytes | None:
        """The client's record, or None if it has none."""
        if client in self._memory:
            self._memory.move_to_end(client)
            return self._memory[client]
        if client in self._files:
            return (self._folder / self._files[client]).read_bytes()
        return None

    def write(self, client: ClientId, record: bytes) -> None:
        """Replace the client's record."""
        self._memory_bytes += len(record) - len(self._memory.get(client, b""))
        self._memory[client] = record
        self._memory.move_to_end(client)
        self._files.pop(client, None)
        while len(self._memory) > 1 and self._memory_bytes > self._cap_bytes:
            oldest = next(iter(self._memory))
            self._save(oldest)
            self._memory_bytes -= len(self._memory.pop(oldest))

    def check(self, record: bytes) -> None:
        """Check that a record can be kept; here all can.

        Raises:
            Misfit: it cannot.
        """

    def mark(self) -> Any:
        """A snapshot for `roll_back`; takes no memory for records that are on disk."""
        unsaved = {client: record for client, record in self._memory.items() if client not in self._files}
        return dict(self._files), unsaved

    def roll_back(self, mark: Any) -> None:
        """Restore every record to a snapshot, unless a checkpoint was saved since."""
        files, unsaved = mark
        for client in [client for client in self._memory if self._files.get(client, "") != files.get(client)]:
            del self._memory[client]
        self._memory.update(unsaved)
        self._files = dict(files)

    def save(self) -> dict[ClientId, str]:
        """Write every record to disk; return each client's file name. Durable after `sync` of the folder.

        Raises:
            StorageError: a file cannot be written.
        """
        for client in self._memory:
            if client not in self._files:
                self._save(client)
        self._content.sync()
        return dict(sorted(self._files.items()))

    def restore(self, files: Mapping[ClientId, str]) -> None:
        """Start from records that `save` wrote, each checked against the digest in its name.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        for name in files.values():
            path = self._folder / name
            if not _NAME.fullmatch(name):
                raise CheckpointError(f"{path} is no name of a client's record; the checkpoint cannot be resumed")
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; the checkpoint cannot be resumed")
            if digest(path.read_bytes()) != name.split(".")[0].split("-")[1]:
                raise CheckpointError(f"{path} is damaged; the checkpoint cannot be resumed")
        self._memory.clear()
        self._memory_bytes = 0
        self._files = dict(files)
        self._content.found(self._folder / name for name in files.values())

    def discard_except(self, names: Iterable[str]) -> None:
        """Delete the files that neither a checkpoint (`names`) nor a current record needs."""
        needed = {*names, *self._files.values()}
        for path in self._folder.glob("*.safetensors"):
            if path.name not in needed:
                remove(path)
        self._content.forget_except(needed)

    @cached_property
    def _folder(self) -> Path:
        """The folder for files: the given one, or a temporary one that is deleted with the store."""
        if self._given_folder is not None:
            return self._given_folder
        folder = Path(tempfile.mkdtemp(prefix="potluck-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _save(self, client: ClientId) -> None:
        record = self._memory[client]
        name = f"{client}-{digest(record)}.safetensors"
        self._content.put(self._folder / name, record)
        self._files[client] = name
