"""Clients' states as bytes: in memory up to a cap, and on disk."""

import json
import re
from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

from potluck.core.federation import ClientId
from potluck.core.ground.digest import digest
from potluck.core.ground.errors import CheckpointError
from potluck.engine.disk.files import sync, write_atomically
from potluck.engine.disk.segments import RecordPlace, Segments, segment_name

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


class Mark:
    """A moment of a store to which it can be rolled back.

    Attributes:
        before: by client, for all whose record has changed since: what it was, where it is, or None if there was none.
    """

    def __init__(self, before: Mapping[ClientId, bytes | RecordPlace | None] | None = None) -> None:
        self.before = dict(before or {})


@dataclass(frozen=True)
class Layout:
    """Where clients' states are; the content of a file beside a checkpoint.

    Which segment holds a state may depend on interruptions and on the memory there is, and a run's checkpoints do not.

    Attributes:
        states: a digest of all clients' states, see `StatesDigest`; empty if there are none.
        segments: by name, how far each of the files counts that hold them.
        names: by client, the name of its state, where nodes keep the states.
        before: by client, what can be returned to if the last round is undone: the place of the state, its name, or
            None if there was none. None if it cannot be undone.
    """

    states: str = ""
    segments: Mapping[str, int] = field(default_factory=dict[str, int])
    names: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])
    before: Mapping[ClientId, Any] | None = None

    @property
    def files(self) -> set[str]:
        """Names of the segments that it needs."""
        places = [place for place in (self.before or {}).values() if isinstance(place, RecordPlace)]
        return {*self.segments, *(segment_name(place.segment) for place in places)}

    def sealed(self) -> bytes:
        """The layout as JSON with a seal over its content."""
        before = self.before and {client: _told(where) for client, where in self.before.items()}
        content = {"states": self.states, "segments": self.segments, "names": self.names, "before": before}
        text = json.dumps(content)
        return json.dumps({"layout": text, "seal": digest(text.encode())}).encode()

    @classmethod
    def read(cls, path: Path) -> "Layout":
        """The layout in a file that `sealed` wrote.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        try:
            sealed = json.loads(path.read_bytes())
            if digest(sealed["layout"].encode()) != sealed["seal"]:
                raise ValueError("its content does not match its seal")
            content = json.loads(sealed["layout"])
            names = {int(client): name for client, name in content["names"].items()}
            before = content["before"]
            if before is not None:
                before = {int(client): _heard(where) for client, where in before.items()}
            return cls(content["states"], content["segments"], names, before)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; the checkpoint cannot be resumed") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; the checkpoint cannot be resumed") from error


def _told(where: Any) -> Any:
    return [*where[:3], where.digest.hex()] if isinstance(where, RecordPlace) else where


def _heard(where: Any) -> Any:
    if not isinstance(where, list):
        return where
    segment, offset, size, of_record = cast("list[Any]", where)
    return RecordPlace(segment, offset, size, bytes.fromhex(of_record))


class ClientStore:
    """One packed record for each client: its state between rounds.

    Records are in memory up to `cap_bytes`; beyond it the least recently used go to disk, where `save` puts all that
    have changed.
    """

    def __init__(self, folder: Path | None = None, cap_bytes: int = _DEFAULT_CAP_BYTES) -> None:
        self._folder = folder
        self._cap_bytes = cap_bytes
        self._memory: OrderedDict[ClientId, bytes] = OrderedDict()
        self._memory_bytes = 0
        self._changed: set[ClientId] = set()  # whose record on disk is not the current one; they may have none any more
        self._segments = Segments(folder)
        self._marks: WeakSet[Mark] = WeakSet()

    def read(self, client: ClientId) -> bytes | None:
        """The client's record, or None if it has none.

        Raises:
            CheckpointError: its file is missing or damaged.
        """
        if client in self._memory:
            self._memory.move_to_end(client)
            return self._memory[client]
        place = None if client in self._changed else self._segments.places.get(client)
        return None if place is None else self._segments.read(place)

    def write(self, client: ClientId, record: bytes) -> None:
        """Replace the client's record."""
        self._put(client, record)

    def check(self, record: bytes) -> None:
        """Check that a record can be kept; here all can.

        Raises:
            Misfit: it cannot.
        """

    def mark(self) -> Any:
        """The present moment, for `roll_back`; it takes memory for what changes afterwards, as long as it is held."""
        mark = Mark()
        self._marks.add(mark)
        return mark

    def roll_back(self, mark: Any) -> None:
        """Restore every record to what it was at a moment, which can be returned to again.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        before, mark.before = mark.before, {}
        self._marks.discard(mark)
        for client, was in before.items():
            if was == self._segments.places.get(client) and not isinstance(was, bytes):
                self._remember(client)
                self._forget(client)
            else:
                self._put(client, self._segments.read(was) if isinstance(was, RecordPlace) else was)
        self._marks.add(mark)

    def save(self, mark: Any = None, held: Container[str] = ()) -> Layout:
        """Write every record that has changed to disk; durable after `sync` of the folder.

        Args:
            mark: a moment to which it shall be possible to return after `restore`.
            held: names of segments that checkpoints need.

        Raises:
            StorageError: a file cannot be written.
        """
        if mark is not None:
            self._save_before(mark)
        self._segments.append((client, self._memory.get(client)) for client in sorted(self._changed))
        self._changed.clear()
        self._segments.compact(held)
        self._segments.sync()
        before = None if mark is None else dict(mark.before)
        return Layout(self._segments.states, self._segments.lengths, before=before)

    def restore(self, layout: Layout) -> Any:
        """Start from records that `save` wrote, each of which is checked; return its `mark`, if there was one.

        Raises:
            CheckpointError: a file is missing or damaged; nothing is changed.
        """
        self._segments.restore(layout.segments, layout.states)
        self._memory.clear()
        self._memory_bytes = 0
        self._changed.clear()
        self._marks.clear()
        if layout.before is None:
            return None
        mark = Mark(layout.before)
        self._marks.add(mark)
        return mark

    def adopt(self, files: Mapping[ClientId, str]) -> None:
        """Start from records in a file for each client, as earlier versions wrote them.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        assert self._folder is not None
        records: list[tuple[ClientId, bytes]] = []
        for client, name in files.items():
            path = self._folder / name
            if not _NAME.fullmatch(name):
                raise CheckpointError(f"{path} is no name of a client's record; the checkpoint cannot be resumed")
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; the checkpoint cannot be resumed")
            record = path.read_bytes()
            if digest(record) != name.split(".")[0].split("-")[1]:
                raise CheckpointError(f"{path} is damaged; the checkpoint cannot be resumed")
            records.append((client, record))
        self.restore(Layout())
        self._segments.append(records)

    def discard_except(self, names: Container[str]) -> None:
        """Delete the segments that neither a checkpoint (`names`) nor a current record needs."""
        self._segments.discard_except(names)

    def _put(self, client: ClientId, record: bytes | None) -> None:
        """Replace the client's record, or let it have none."""
        self._remember(client)
        self._forget(client)
        self._changed.add(client)
        if record is None:
            return
        self._memory[client] = record
        self._memory_bytes += len(record)
        while len(self._memory) > 1 and self._memory_bytes > self._cap_bytes:
            oldest = next(iter(self._memory))
            if oldest in self._changed:
                self._segments.append([(oldest, self._memory[oldest])])
            self._forget(oldest)

    def _save_before(self, mark: Mark) -> None:
        """Write the records to disk that a mark has in memory; their clients' current ones are written after them."""
        held = {client: was for client, was in mark.before.items() if isinstance(was, bytes)}
        now = {client: self.read(client) for client in held}
        for client in held:
            self._remember(client)
        self._segments.append(held.items())
        mark.before |= {client: self._segments.places[client] for client in held}
        for client, record in now.items():
            self._put(client, record)

    def _remember(self, client: ClientId) -> None:
        """Let all marks know what the client's record is before it changes."""
        changed, places = client in self._changed, self._segments.places
        for mark in self._marks:
            if client not in mark.before:
                mark.before[client] = self._memory.get(client) if changed else places.get(client)

    def _forget(self, client: ClientId) -> None:
        """Take the client's record out of memory; the one on disk counts."""
        self._memory_bytes -= len(self._memory.pop(client, b""))
        self._changed.discard(client)
