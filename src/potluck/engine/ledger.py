"""A count of clients' private releases in a run, which returning to a checkpoint does not reduce."""

import json
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from potluck.core.errors import CheckpointError
from potluck.core.federation import ClientId
from potluck.core.method import Releases
from potluck.core.roles import Failure
from potluck.engine.client.runtime import Outcome
from potluck.engine.client.session import Answer
from potluck.engine.files import write_atomically


class Ledger:
    """The private releases of each client.

    Before an exchange, every client that is asked counts as unheard; its answer settles the count. So if the process is
    killed in between, the count is too high, never too low.

    Args:
        path: the file to keep it in, written once there is something to count; None keeps it in memory.

    Raises:
        CheckpointError: the file is damaged.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._found: dict[ClientId, Releases] = {}
        if path is not None and path.is_file():
            self._found = _read(path)

    @property
    def releases(self) -> dict[ClientId, Releases]:
        """By client, for those that made, or may have made, some."""
        return {client: found for client, found in sorted(self._found.items()) if found.at_most}

    @contextmanager
    def exchange(self, clients: Iterable[ClientId]) -> Generator[Callable[[Outcome], None]]:
        """The context of an exchange with these clients; yields a function to call with each outcome as it arrives."""
        asked = set(clients)
        for client in asked:
            self._change(client, unheard=self._of(client).unheard + 1)
        self._save(asked)

        def note(outcome: Outcome) -> None:
            if outcome.client in asked:
                self._settle(outcome)
            if isinstance(outcome, Failure):  # saved now, since a failure may end the run
                self._save(asked)

        try:
            yield note
        finally:
            self._save(asked)

    def _settle(self, outcome: Outcome) -> None:
        before = self._of(outcome.client)
        if isinstance(outcome, Answer):
            counted = before.counted + outcome.releases
            if outcome.released is not None and outcome.released >= counted:  # a client may lose its count
                self._change(outcome.client, counted=outcome.released, unheard=0)
            else:
                self._change(outcome.client, counted=counted, unheard=before.unheard - 1)
        elif isinstance(outcome, Failure) and not outcome.unheard:  # it certainly sent nothing
            self._change(outcome.client, unheard=before.unheard - 1)

    def _of(self, client: ClientId) -> Releases:
        return self._found.get(client, Releases())

    def _change(self, client: ClientId, **counts: int) -> None:
        self._found[client] = replace(self._of(client), **counts)

    def _save(self, asked: set[ClientId]) -> None:
        if self._path is not None and asked:
            found = {str(id): [of.counted, of.unheard] for id, of in sorted(self._found.items())}
            write_atomically(self._path, json.dumps(found).encode())


def _read(path: Path) -> dict[ClientId, Releases]:
    try:
        found = json.loads(path.read_text())
        return {int(id): Releases(int(counted), int(unheard)) for id, (counted, unheard) in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged; what clients have released is not known: {error}") from error
