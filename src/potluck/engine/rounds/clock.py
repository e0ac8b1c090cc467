"""The clock by which a run waits for clients, and exchanges close."""

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from potluck.core.federation import ClientId
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.executors import Executor, Pending

_LOOK_EVERY = 1.0  # seconds, for clients that are waited for


class Clock(Protocol):
    """Says which clients are there, and which of their outcomes count.

    Attributes:
        virtual: whether its time passes here alone, so that also clients that are not there can be evaluated.
    """

    virtual: bool

    def now(self) -> float:
        """Seconds, of which only differences mean something."""
        ...

    def absent(self, executor: Executor, clients: Collection[ClientId]) -> Mapping[ClientId, str]:
        """Those of the clients that cannot be reached now, with the names of their machines."""
        ...

    def away(self, clients: Collection[ClientId]) -> Mapping[ClientId, str]:
        """Those of the clients that are not even asked now, and why."""
        ...

    def wait(self, clients: Collection[ClientId]) -> None:
        """Let time pass, until more of the clients may be there."""
        ...

    def outcomes(
        self,
        executor: Executor,
        host: ClientRuntime,
        tasks: Mapping[ClientId, Pending],
        away: Mapping[ClientId, str],
        handler: str,
        bytes_down: Mapping[ClientId, int],
    ) -> Iterator[Outcome]:
        """One outcome for each client of an exchange, in order of client id.

        Args:
            executor: carries out the tasks.
            host: the runtime that they are for.
            tasks: by client, ascending.
            away: the other clients, and why they are not asked.
            handler: the full name of what is called.
            bytes_down: the payload that is sent to each client.
        """
        ...

    def serve(self, flops: int) -> None:
        """Note what the server has computed in a round."""


class MachineClock(Clock):
    """This machine's clock: every client is heard that the executor hears."""

    virtual = False

    def now(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def absent(self, executor: Executor, clients: Collection[ClientId]) -> Mapping[ClientId, str]:
        """See `Clock`."""
        return executor.absent(clients)

    def away(self, clients: Collection[ClientId]) -> Mapping[ClientId, str]:
        """None: who cannot be reached is found when it is asked."""
        return {}

    def wait(self, clients: Collection[ClientId]) -> None:
        """See `Clock`."""
        time.sleep(_LOOK_EVERY)

    def outcomes(
        self,
        executor: Executor,
        host: ClientRuntime,
        tasks: Mapping[ClientId, Pending],
        away: Mapping[ClientId, str],
        handler: str,
        bytes_down: Mapping[ClientId, int],
    ) -> Iterator[Outcome]:
        """See `Clock`."""
        return executor.run(host, list(tasks.values()))
