"""The store of clients' states if nodes keep them: the server has only their names."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from potluck.core.federation import ClientId
from potluck.core.ground.errors import CheckpointError
from potluck.core.schema import Misfit
from potluck.engine.disk.store import ClientStore

_NAME = re.compile(rb"[0-9a-f]{32}")
_FILE = re.compile(r"(\d+)-([0-9a-f]{32})\.safetensors")


class KeptElsewhere(ClientStore):
    """A record here is the digest of the record that the node keeps.

    A checkpoint names the same files as if the server kept them, so that its digest is the same; the files are at the
    nodes.
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

    def save(self) -> dict[ClientId, str]:
        """By client, the name that the file would have."""
        return {client: f"{client}-{name.decode('ascii')}.safetensors" for client, name in sorted(self._names.items())}

    def restore(self, files: Mapping[ClientId, str]) -> None:
        """Start from the names that `save` gave.

        Raises:
            CheckpointError: they are invalid.
        """
        found: dict[ClientId, bytes] = {}
        for client, file in files.items():
            match = _FILE.fullmatch(file)
            if match is None or int(match[1]) != client:
                raise CheckpointError(
                    f"{file} is not a name of client {client}'s record; the checkpoint cannot be resumed"
                )
            found[client] = match[2].encode("ascii")
        self._names = found

    def discard_except(self, names: Iterable[str]) -> None:
        """Nothing to do: nodes delete old records themselves."""
