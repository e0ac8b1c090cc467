"""The states of a node's client, kept for as long as the server may return to them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import CheckpointError
from potluck.engine.disk.files import write_atomically
from potluck.flower.node.room import Room

_NAME = re.compile(r"[0-9a-f]{32}")


class NodeStore:
    """A client's states, in files named by their content.

    All records of two rounds in a row are kept, so that the server can return to the start of the last one, or of the
    one before it; of earlier ones only the record that a job names is kept.

    Args:
        folder: of the client in this run.
        room: what the folder for the node's state may take; None for any number of bytes.
    """

    def __init__(self, folder: Path, room: Room | None = None) -> None:
        self._folder, self._room = folder, room
        self._journal = folder / "rounds.json"
        self._ledger = folder / "releases.json"
        self._sums = folder / "sums.json"

    def pin(self, facts: Mapping[str, Any]) -> None:
        """Store the facts about the client, or compare them with those stored when the run began.

        Raises:
            CheckpointError: they have changed.
        """
        place, found = self._folder / "client.json", dict(facts)
        if not place.is_file():
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(place, json.dumps(found, indent=1).encode())
            return
        noted = json.loads(place.read_text())
        for name, value in found.items():
            if noted.get(name) != value:
                raise CheckpointError(
                    f"{self._folder}: the {name} was {noted.get(name)} when the run began and is {value} now"
                )

    def read(self, name: str) -> bytes:
        """The record with this name.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        path = self._folder / name
        if not _NAME.fullmatch(name) or not path.is_file():
            raise CheckpointError(f"{path}: the client's state that the server names is missing")
        record = path.read_bytes()
        if digest(record) != name:
            raise CheckpointError(f"{path} is damaged")
        return record

    def write(self, record: bytes | None, base: bytes | None, round_number: int) -> bytes | None:
        """Store a record and return its name.

        Args:
            record: the client's state; None if it has none.
            base: the name of the record that it started from.
            round_number: the round of the job.

        Raises:
            NoRoom: the node's owner has not given it so much disk; nothing is written.
        """
        if record is not None and self._room is not None:
            self._room.check(len(record))
        rounds: dict[str, int] = json.loads(self._journal.read_text()) if self._journal.is_file() else {}
        kept = {name: at for name, at in rounds.items() if at >= round_number - 1}
        if base is not None:
            kept[base.decode("ascii")] = round_number
        name = None if record is None else digest(record)
        if record is not None and name is not None:
            kept[name] = round_number
            write_atomically(self._folder / name, record)
        if kept != rounds:
            write_atomically(self._journal, json.dumps(kept).encode())
        for old in rounds.keys() - kept.keys():
            (self._folder / old).unlink(missing_ok=True)
        return None if name is None else name.encode("ascii")

    def count(self, releases: int) -> int | None:
        """Add to this client's count of private releases in the run, which never decreases.

        Returns:
            The total; None if there have never been any.

        Raises:
            CheckpointError: the count is damaged.
        """
        if not releases and not self._ledger.is_file():
            return None
        try:
            before = int(json.loads(self._ledger.read_text())) if self._ledger.is_file() else 0
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self._ledger} is damaged: {error}") from error
        write_atomically(self._ledger, json.dumps(before + releases).encode())
        return before + releases

    def last_sums(self) -> int:
        """The number of the last secure sums that the client took part in; 0 if there were none.

        Raises:
            CheckpointError: the number is damaged.
        """
        try:
            return int(json.loads(self._sums.read_text())) if self._sums.is_file() else 0
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self._sums} is damaged: {error}") from error

    def note_sums(self, number: int) -> None:
        """Note that the client takes part in these sums; none up to these are repeated."""
        write_atomically(self._sums, json.dumps(number).encode())
