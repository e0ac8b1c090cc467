"""A count of clients' private releases in a run, which returning to a checkpoint does not reduce.

A client is believed to have released more often than the server has heard of, since answers get lost, but not more
often than it was asked: a handler releases once at most, which the runtime checks in this process.
"""

import json
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from potluck.core.federation import ClientId
from potluck.core.ground.errors import CheckpointError
from potluck.core.method import Releases
from potluck.core.roles import Failure
from potluck.core.schema import Misfit
from potluck.engine.client.runtime import Outcome
from potluck.engine.client.session import Answer
from potluck.engine.disk.files import write_atomically


@dataclass(frozen=True)
class _Account:
    """What is known of one client.

    Attributes:
        releases: those it made, or may have made.
        asked: how often it was asked for an answer that may release something.
    """

    releases: Releases = Releases()
    asked: int = 0


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
        self._accounts: dict[ClientId, _Account] = {}
        if path is not None and path.is_file():
            self._accounts = _read(path)

    @property
    def releases(self) -> dict[ClientId, Releases]:
        """By client, for those that made, or may have made, some."""
        of = {client: account.releases for client, account in sorted(self._accounts.items())}
        return {client: releases for client, releases in of.items() if releases.at_most}

    def check(self, answer: Answer) -> None:
        """Check that an answer claims no more private releases than its client was asked for.

        Raises:
            Misfit: it does; believed, it would make the run's statement of its privacy worthless for all.
        """
        asked = self._of(answer.client).asked
        if answer.releases > 1:
            raise Misfit(f"it claims {answer.releases} private releases in one answer; expected at most 1")
        if answer.released is not None and answer.released > asked:
            raise Misfit(
                f"it claims {answer.released} private releases in this run; expected at most {asked}, as often as it"
                " was asked"
            )

    @contextmanager
    def exchange(self, clients: Iterable[ClientId]) -> Generator[Callable[[Outcome], None]]:
        """The context of an exchange with these clients; yields a function to call with each outcome as it arrives.

        What it is called with has passed `check`; the failure of an answer that has not counts as unheard.
        """
        told = set(clients)
        for client in told:
            before = self._of(client)
            releases = replace(before.releases, unheard=before.releases.unheard + 1)
            self._accounts[client] = _Account(releases, before.asked + 1)
        self._save(told)

        def note(outcome: Outcome) -> None:
            if outcome.client in told:
                self._settle(outcome)
            if isinstance(outcome, Failure):  # saved now, since a failure may end the run
                self._save(told)

        try:
            yield note
        finally:
            self._save(told)

    def _settle(self, outcome: Outcome) -> None:
        before = self._of(outcome.client).releases
        if isinstance(outcome, Answer):
            counted = before.counted + outcome.releases
            if outcome.released is not None and outcome.released >= counted:  # a client may lose its count
                self._change(outcome.client, Releases(outcome.released))
            else:
                self._change(outcome.client, Releases(counted, before.unheard - 1))
        elif isinstance(outcome, Failure) and not outcome.unheard:  # it certainly sent nothing
            self._change(outcome.client, replace(before, unheard=before.unheard - 1))

    def _of(self, client: ClientId) -> _Account:
        return self._accounts.get(client, _Account())

    def _change(self, client: ClientId, releases: Releases) -> None:
        self._accounts[client] = replace(self._of(client), releases=releases)

    def _save(self, told: set[ClientId]) -> None:
        if self._path is not None and told:
            found = {
                str(id): [of.releases.counted, of.releases.unheard, of.asked]
                for id, of in sorted(self._accounts.items())
            }
            write_atomically(self._path, json.dumps(found).encode())


def _read(path: Path) -> dict[ClientId, _Account]:
    try:
        found = json.loads(path.read_text())
        return {
            int(id): _Account(Releases(int(counted), int(unheard)), int(asked))
            for id, (counted, unheard, asked) in found.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged; what clients have released is not known: {error}") from error
