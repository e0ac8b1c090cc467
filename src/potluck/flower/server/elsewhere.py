"""The store of clients' states if nodes keep them: the server has only their names."""

import re
from collections.abc import Container, Mapping
from typing import Any

from potluck.core.federation import ClientId
from potluck.core.ground.errors import CheckpointError
from potluck.core.schema import Misfit
from potluck.engine.disk.segments import StatesDigest
from potluck.engine.disk.store import ClientStore, Layout

_NAME = re.compile(rb"[0-9a-f]{32}")
_FILE = re.compile(r"(\d+)-([0-9a-f]{32})\.safetensors")


class KeptElsewhere(ClientStore):
    """A record here is the digest of the record that the node keeps.

    A checkpoint has the digest that it would have if the server kept the records.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[ClientId, bytes] = {}

    def read(self, client: ClientId) -> bytes | None:
        """The name of the client's record, or None if it has none."""
        return self._names.get(client)

    def write(self, client: ClientId, record: bytes) -> None:
        """Note another name."""
        self._names[client] = record

    def check(self, record: bytes) -> None:
        """Check that a record is a valid name.

        Raises:
            Misfit: it is not.
        """
        if _NAME.fullmatch(record) is None:
            raise Misfit("what it keeps has no name that a record has; expected 32 hex digits")

    def mark(self) -> Any:
        """A snapshot of the names."""
        return dict(self._names)

    def roll_back(self, mark: Any) -> None:
        """Restore the names; each job tells its node which record to start from."""
        self._names = dict(mark)

    def save(self, mark: Any = None, held: Container[str] = ()) -> Layout:
        """The names, and those of a mark; nothing is written."""
        digest = StatesDigest()
        for client, name in self._names.items():
            digest.add(client, bytes.fromhex(name.decode("ascii")))
        before = None if mark is None else _as_text(mark)
        return Layout(digest.text if self._names else "", {}, _as_text(self._names), before)

    def restore(self, layout: Layout) -> Any:
        """Start from the names that `save` gave; return the mark, if there was one.

        Raises:
            CheckpointError: they are invalid.
        """
        names = _checked(layout.names)
        mark = None if layout.before is None else _checked(layout.before)
        self._names = names
        return mark

    def adopt(self, files: Mapping[ClientId, str]) -> None:
        """Start from the names of files that earlier versions gave them.

        Raises:
            CheckpointError: they are invalid.
        """
        found: dict[ClientId, bytes] = {}
        for client, file in files.items():
            match = _FILE.fullmatch(file)
            if match is None or int(match[1]) != client:
                raise _invalid(client, file)
            found[client] = match[2].encode("ascii")
        self._names = found

    def discard_except(self, names: Container[str]) -> None:
        """Nothing to do: nodes delete old records themselves."""


def _as_text(names: Mapping[ClientId, bytes]) -> dict[ClientId, str]:
    return {client: names[client].decode("ascii") for client in sorted(names)}


def _checked(names: Mapping[ClientId, Any]) -> dict[ClientId, bytes]:
    for client, name in names.items():
        if not isinstance(name, str) or _NAME.fullmatch(name.encode()) is None:
            raise _invalid(client, name)
    return {client: name.encode("ascii") for client, name in names.items()}


def _invalid(client: ClientId, name: Any) -> CheckpointError:
    return CheckpointError(f"{name} is not a name of client {client}'s record; the checkpoint cannot be resumed")
