"""The clock of asynchronous rounds whose clients take their own time: nobody knows who is done before a reply comes."""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from potluck.core.federation import ClientId
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.executors import Executor, OneByOne, Pending
from potluck.engine.rounds.asynchrony.departures import Attending, Departures
from potluck.engine.rounds.clock import MachineClock
from potluck.engine.rounds.lost import Deserted, Lost

_LOOK_EVERY = 1.0  # seconds, for clients that were not there


class ArrivalClock(MachineClock):
    """This machine's clock, by which clients are under way until their outcomes have come.

    Args:
        executor: carries out the work, somewhere else.
        clients: all of the federation.

    Attributes:
        course: says who is there, and may be a second late.
    """

    def __init__(self, executor: OneByOne, clients: Collection[ClientId]) -> None:
        self.course = _Seen(executor, clients)
        self._executor = executor
        self._arrived: dict[ClientId, Outcome] = {}

    def outcomes(
        self,
        executor: Executor,
        host: ClientRuntime,
        tasks: Mapping[ClientId, Pending],
        away: Mapping[ClientId, str],
        handler: str,
        bytes_down: Mapping[ClientId, int],
    ) -> Iterator[Outcome]:
        """See `Clock`; the tasks begin now, and an outcome can be read when `pass_time` has named its client."""
        self.course.looked_anew = False
        for task in tasks.values():
            self._executor.begin(host, task)
        return (self._arrived.pop(client) for client in tasks)

    def due(self, client: ClientId) -> None:
        """Nobody can know."""

    def pass_time(self, departures: Departures, order: Sequence[ClientId]) -> ClientId | None:
        """Wait for an outcome, and return its client; None if it is time to look who else may be asked.

        Raises:
            Deserted: nobody is under way, and those that could be asked are not there, or were not to the end.
            Lost: nobody is under way, and nobody can be asked.
        """
        if not departures.under_way:
            if departures.may_come(order):
                if self.course.look_anew():
                    return None
                raise Deserted("nobody is at work, and of those that could be asked nobody is there")
            raise Lost("nobody is left to ask")
        outcome = self._executor.ended(_LOOK_EVERY)
        if outcome is None:
            return None
        self._arrived[outcome.client] = outcome
        return outcome.client

    def land(self, client: ClientId) -> None:
        """Nothing to note."""


class _Seen(Attending):
    """Who is there, looked up once a second.

    Attributes:
        looked_anew: whether it was looked up for want of anybody, and nobody has been asked since.
    """

    def __init__(self, executor: OneByOne, clients: Collection[ClientId]) -> None:
        self._executor, self._clients = executor, clients
        self._looked, self._absent = -math.inf, dict[ClientId, str]()
        self.looked_anew = False

    def absent(self, clients: Collection[ClientId]) -> Mapping[ClientId, str]:
        """See `Attending`."""
        if (now := time.monotonic()) >= self._looked + _LOOK_EVERY:
            self._looked, self._absent = now, dict(self._executor.absent(self._clients))
        return {client: self._absent[client] for client in clients if client in self._absent}

    def look_anew(self) -> bool:
        """Have it looked up at once; whether that is worth it, since it was not done just now."""
        worth = not self.looked_anew
        self._looked, self.looked_anew = -math.inf, True
        return worth
