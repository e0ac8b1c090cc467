"""Clients' records in a few files, segments, that are only appended to.

A record is a header, with the client's number, the record's size and digest, and a checksum of these, and then the
record's bytes. A header of the size -1 says that the client has no record any more. Segments are numbered; the last
record of a client in the last segment that has one is its current one. Saving writes what has changed and nothing else,
and a checkpoint states how far each segment counts: what a killed run has appended since does not. A segment of which
less than two thirds are current is left behind, its current records appended anew; it can be deleted when no checkpoint
needs it. So the files are at most half as large again as what they hold.
"""

import hashlib
import mmap
import re
import shutil
import struct
import tempfile
import weakref
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from potluck.core.federation import ClientId
from potluck.core.ground.errors import CheckpointError
from potluck.engine.disk.files import append, make_folder, remove, sync

_NAME = re.compile(r"states-(\d{6,})\.segment")
_FACTS, _CHECKSUM = struct.Struct("<qq16s"), struct.Struct("<I")
_HEADER_BYTES = _FACTS.size + _CHECKSUM.size
_LEAST_BYTES = 2**22  # a segment that is not the last has at least as many,
_PARTS = 8  # or an eighth of all current records, so that there are few
_TOGETHER = 2**24  # bytes that are appended at once


class RecordPlace(NamedTuple):
    """Where a record is.

    Attributes:
        segment: the number of its segment.
        offset: of its first byte.
        size: in bytes.
        digest: of its content, 16 bytes.
    """

    segment: int
    offset: int
    size: int
    digest: bytes


class Segments:
    """The segments of a run.

    Args:
        folder: which holds them; None for a temporary one that is deleted with this object.

    Attributes:
        places: by client, where its current record is.
    """

    def __init__(self, folder: Path | None) -> None:
        self._given_folder = folder
        self._temporary: Path | None = None
        self.places: dict[ClientId, RecordPlace] = {}
        self._lengths: dict[int, int] = {}  # by number, in ascending order
        self._current: Counter[int] = Counter()  # by number, the bytes of current records and their headers
        self._gone: dict[ClientId, int] = {}  # who has no record any more, and the segment that says so
        self._last: int | None = None  # the segment that can be appended to
        self._unsynced: set[int] = set()
        self._states = StatesDigest()

    @property
    def states(self) -> str:
        """The digest of all current records; see `StatesDigest`."""
        return self._states.text if self.places else ""

    @property
    def lengths(self) -> dict[str, int]:
        """By name, how far each segment counts."""
        return {segment_name(number): length for number, length in sorted(self._lengths.items())}

    def read(self, place: RecordPlace) -> bytes:
        """The record at a place.

        Raises:
            CheckpointError: its file is missing or damaged.
        """
        path = self._path(place.segment)
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                record = file.read(place.size)
        except FileNotFoundError:
            raise _missing(path) from None
        if _digest(record) != place.digest:
            raise _damaged(path, place.offset)
        return record

    def append(self, records: Iterable[tuple[ClientId, bytes | None]]) -> None:
        """Append records, which are then their clients' current ones; None for a client that has none any more.

        Raises:
            StorageError: they cannot be written; none of those that are not counts.
        """
        waiting: list[tuple[ClientId, bytes, bytes]] = []
        size = 0
        for client, record in records:
            if record is None and client not in self.places:
                continue
            waiting.append((client, _header(client, record), record or b""))
            size += _HEADER_BYTES + len(record or b"")
            if size >= _TOGETHER:
                self._append(waiting)
                waiting, size = [], 0
        self._append(waiting)

    def sync(self) -> None:
        """Wait until the content of all segments is durable; their names are after `sync` of the folder."""
        sync(*(self._path(number) for number in sorted(self._unsynced)))
        self._unsynced.clear()

    def compact(self, held: Container[str] = ()) -> None:
        """Leave segments behind of which less than two thirds are current.

        Args:
            held: names of segments that checkpoints need, and which therefore stay as they are.
        """
        for number in [number for number in self._lengths if number != self._last]:
            if segment_name(number) in held or 3 * self._current[number] >= 2 * self._lengths[number]:
                continue
            current = self.places.items() if self._current[number] else ()
            here = [client for client, place in current if place.segment == number]
            gone = [client for client, segment in self._gone.items() if segment == number]
            # An older segment may still have a record of who has none any more, so that this must be said again.
            self._append([(client, _header(client, None), b"") for client in gone])
            self.append((client, self.read(self.places[client])) for client in here)
            del self._lengths[number], self._current[number]

    def restore(self, lengths: Mapping[str, int], states: str) -> None:
        """Start from segments up to these lengths, every record of which is checked, and all by their digest.

        Raises:
            CheckpointError: a file is missing or damaged; nothing is changed.
        """
        found = Segments(self._given_folder or self._temporary)
        for name, length in sorted(lengths.items(), key=lambda item: _number(item[0], self._folder)):
            number = _number(name, self._folder)
            found._lengths[number] = length
            for client, place in _scanned(self._folder / name, number, length):
                found._set(client, place, number)
        if found.states != states:
            raise CheckpointError(
                f"{self._folder}: clients' states are not what the checkpoint says; it cannot be resumed"
            )
        self.places, self._lengths, self._current = found.places, found._lengths, found._current
        self._gone, self._states = found._gone, found._states
        self._last = None  # what is appended goes to another segment: this one may go on with what does not count
        self._unsynced.clear()

    def discard_except(self, names: Container[str]) -> None:
        """Delete the segments that neither checkpoints (`names`) nor current records need."""
        for path in list(self._folder.glob("states-*.segment")):
            match = _NAME.fullmatch(path.name)
            if match is not None and path.name not in names and int(match[1]) not in self._lengths:
                remove(path)

    @property
    def _folder(self) -> Path:
        if self._given_folder is not None:
            return self._given_folder
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="potluck-"))
            weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        return self._temporary

    def _path(self, number: int) -> Path:
        return self._folder / segment_name(number)

    def _append(self, records: list[tuple[ClientId, bytes, bytes]]) -> None:
        """Append to the last segment, or to a new one where that is full."""
        if not records:
            return
        number = self._to_append_to()
        content = b"".join(part for _, header, record in records for part in (header, record))
        offset, self._last = self._lengths.get(number, 0), None  # half of the content may be written if this fails
        append(self._path(number), content)
        self._last = number
        self._unsynced.add(number)
        self._lengths[number] = offset + len(content)
        for client, header, record in records:
            _, size, known = _FACTS.unpack_from(header)
            offset += _HEADER_BYTES
            self._set(client, RecordPlace(number, offset, size, known) if size >= 0 else None, number)
            offset += len(record)

    def _to_append_to(self) -> int:
        most = max(_LEAST_BYTES, sum(self._current.values()) // _PARTS)
        if self._last is not None and self._lengths[self._last] < most:
            return self._last
        make_folder(self._folder)
        there = [int(match[1]) for path in self._folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return max([0, *there, *self._lengths]) + 1

    def _set(self, client: ClientId, place: RecordPlace | None, segment: int) -> None:
        """Note where a client's current record is; None if a segment says that it has none."""
        if (before := self.places.pop(client, None)) is not None:
            self._current[before.segment] -= _HEADER_BYTES + before.size
            self._states.take(client, before.digest)
        self._gone.pop(client, None)
        if place is None:
            self._gone[client] = segment
            return
        self.places[client] = place
        self._current[segment] += _HEADER_BYTES + place.size
        self._states.add(client, place.digest)


class StatesDigest:
    """A digest of all clients' records that is kept up to date with each that changes.

    It is the sum, modulo 2^256, of a hash for each client of its number and its record's digest, so that it does not
    depend on the order in which they were written, nor on where they are.
    """

    def __init__(self) -> None:
        self._sum = 0

    @property
    def text(self) -> str:
        """64 hex digits."""
        return f"{self._sum:064x}"

    def add(self, client: ClientId, of_record: bytes) -> None:
        """Add a client with this digest of its record."""
        self._sum = (self._sum + _term(client, of_record)) % 2**256

    def take(self, client: ClientId, of_record: bytes) -> None:
        """Take a client away that was added with this digest."""
        self._sum = (self._sum - _term(client, of_record)) % 2**256


def segment_name(number: int) -> str:
    """The name of a segment's file."""
    return f"states-{number:06}.segment"


def _number(name: str, folder: Path) -> int:
    if (match := _NAME.fullmatch(name)) is None:
        raise CheckpointError(f"{folder / name} is no name of a segment; the checkpoint cannot be resumed")
    return int(match[1])


def _term(client: ClientId, of_record: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(struct.pack("<q", client) + of_record, digest_size=32).digest(), "little")


def _digest(record: bytes) -> bytes:
    return hashlib.blake2b(record, digest_size=16).digest()  # as in `core.ground.digest`


def _header(client: ClientId, record: bytes | None) -> bytes:
    facts = _FACTS.pack(client, -1 if record is None else len(record), _digest(record or b""))
    return facts + _CHECKSUM.pack(zlib.crc32(facts))


def _scanned(path: Path, number: int, length: int) -> Iterator[tuple[ClientId, RecordPlace | None]]:
    """The records of a segment up to a length, each with its client, in the order in which they were written.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    if not path.is_file():
        raise _missing(path)
    if path.stat().st_size < length:
        raise _damaged(path, path.stat().st_size)
    if length == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ) as content:
        at = 0
        while at < length:
            header, start = content[at : at + _HEADER_BYTES], at + _HEADER_BYTES
            facts = header[: _FACTS.size]
            if len(header) < _HEADER_BYTES or header[_FACTS.size :] != _CHECKSUM.pack(zlib.crc32(facts)):
                raise _damaged(path, at)
            client, size, known = _FACTS.unpack(facts)
            at = start + max(size, 0)
            if at > length or _digest(content[start:at]) != known:
                raise _damaged(path, start)
            yield client, RecordPlace(number, start, size, known) if size >= 0 else None


def _missing(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is missing; the checkpoint cannot be resumed")


def _damaged(path: Path, at: int) -> CheckpointError:
    return CheckpointError(f"{path} is damaged, at byte {at}; the checkpoint cannot be resumed")
