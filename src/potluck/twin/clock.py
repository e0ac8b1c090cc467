"""A virtual clock for a run: by it clients' devices are slow, away or late, whatever this machine takes."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from potluck.core.federation import ClientId
from potluck.core.ground.errors import ConfigError
from potluck.core.message import Message
from potluck.core.roles import Failure
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Answer
from potluck.engine.executors import Executor, Pending
from potluck.engine.executors.held import Held
from potluck.engine.numerics.costs import Cost
from potluck.engine.rounds.asynchrony.departures import Departures
from potluck.engine.rounds.clock import Clock
from potluck.twin.devices import MIB
from potluck.twin.timeline import UNAWAITED, Errand, Timeline, Turn

_WHY = {
    "late": "its answer would have come after {:.6g} s, when the exchange had closed",
    "left": "its device left in the middle of its work, after {:.6g} s",
    "failed": "its work takes {:.3g} MiB of tensors, for which its device has no room",
}


class TwinClock(Clock):
    """The clock of a twin.

    Clients that are not there are not asked. All others work, and then it is seen whose replies count; a client whose
    reply does not count is as it was before.

    Args:
        course: the time, and who is at work.

    Attributes:
        course: the same.
    """

    virtual = True

    def __init__(self, course: Timeline) -> None:
        self.course = course
        self._turns: list[tuple[int, Turn]] = []
        self._exchanges = 0
        self._began = course.now

    def now(self) -> float:
        """Virtual seconds since the run began."""
        return self.course.now

    def absent(self, executor: Executor, clients: Collection[ClientId]) -> Mapping[ClientId, str]:
        """See `Clock`."""
        return dict.fromkeys(self.course.absent(clients), "its device")

    def wait(self, clients: Collection[ClientId]) -> None:
        """Go on to the moment at which another one of the clients is there.

        Raises:
            ConfigError: none ever is.
        """
        if self.course.wait(clients) == math.inf:
            raise ConfigError(f"run.twin.devices: clients {sorted(clients)} are never there")

    def away(self, clients: Collection[ClientId]) -> Mapping[ClientId, str]:
        """Those whose devices are not there, or still at work on what came too late."""
        return {client: f"its device {why}" for client, why in self.course.absent(clients).items()}

    def outcomes(
        self,
        executor: Executor,
        host: ClientRuntime,
        tasks: Mapping[ClientId, Pending],
        away: Mapping[ClientId, str],
        handler: str,
        bytes_down: Mapping[ClientId, int],
    ) -> Iterator[Outcome]:
        """See `Clock`; all replies are held until it is known when the exchange closes, beyond a cap in files."""
        held, parts, late = Held(), dict.fromkeys(away, Errand(0, 0, 0)), self.course.at_work(away)
        self._exchanges += 1
        for place, outcome in enumerate(executor.run(host, list(tasks.values()))):
            parts[outcome.client] = _part(outcome, bytes_down[outcome.client], self._exchanges)
            held[place] = outcome
        turns = {turn.client: turn for turn in self.course.exchange(parts)}
        self._turns += [(self._exchanges, turn) for turn in turns.values()]
        places = {client: place for place, client in enumerate(tasks)}
        for client, turn in turns.items():
            if client in away:
                yield Failure(client, handler, away[client], kind="absence", late=client in late)
                continue
            yield _judged(held.pop(places[client]), turn, handler)

    def serve(self, flops: int) -> None:
        """Let the server take its time."""
        self.course.serve(flops)

    def take(self, number: int) -> dict[str, Any]:
        """The record of a round that ends now, from which a later process can go on; begins the next round."""
        turns = [[exchange, *turn] for exchange, turn in self._turns]
        found = {"round": number, "start": self._began, "end": self.course.now, "turns": turns, **self.course.state()}
        self._begin()
        return found

    def go_on(self, record: Mapping[str, Any] | None) -> None:
        """Go on after the round of this record; from the start, if there is none."""
        self.course.go_on(record or {"now": 0.0, "busy": {}})
        self._begin()

    def _begin(self) -> None:
        self._turns, self._exchanges, self._began = [], 0, self.course.now


class AsynchronousTwinClock(TwinClock):
    """The clock of a twin whose rounds are asynchronous.

    Whoever is asked works at once as far as this process is concerned, and is under way until its turn ends.
    """

    def __init__(self, course: Timeline) -> None:
        super().__init__(course)
        self._under_way: dict[ClientId, Turn] = {}

    def due(self, client: ClientId) -> float:
        """When a client that is under way is done, or leaves."""
        return self._under_way[client].finish

    def pass_time(self, departures: Departures, order: Sequence[ClientId]) -> ClientId | None:
        """Let time pass until a client is done, and return it, or until another one is there."""
        return departures.pass_time(order, self.course)

    def land(self, client: ClientId) -> None:
        """Note that a client is under way no more."""
        self._turns.append((UNAWAITED, self._under_way.pop(client)))

    def outcomes(
        self,
        executor: Executor,
        host: ClientRuntime,
        tasks: Mapping[ClientId, Pending],
        away: Mapping[ClientId, str],
        handler: str,
        bytes_down: Mapping[ClientId, int],
    ) -> Iterator[Outcome]:
        """See `Clock`; only who leaves in the middle does not count."""
        for outcome in executor.run(host, list(tasks.values())):
            client = outcome.client
            turn = self._under_way[client] = self.course.turn(client, _part(outcome, bytes_down[client], 1))
            yield _judged(outcome, turn, handler)

    def take(self, number: int) -> dict[str, Any]:
        """See `TwinClock`; it also says who is under way."""
        under_way = [list(turn) for turn in self._under_way.values()]
        return {**super().take(number), "under_way": under_way}

    def go_on(self, record: Mapping[str, Any] | None) -> None:
        """See `TwinClock`."""
        turns = [Turn(*turn) for turn in (record or {}).get("under_way", ())]
        self._under_way = {turn.client: turn for turn in turns}
        super().go_on(record)


def _judged(outcome: Outcome, turn: Turn, handler: str) -> Outcome:
    """The outcome, or by the client's turn a failure instead of an answer."""
    if turn.fate == "failed" and isinstance(outcome, Answer):
        taken = (outcome.cost.memory if outcome.cost else 0) / MIB
        return Failure(turn.client, handler, _WHY["failed"].format(taken), unheard=True)
    if turn.fate not in ("late", "left"):
        return outcome
    kind = "absence" if turn.fate == "left" else "error"
    why, late = _WHY[turn.fate].format(turn.finish - turn.start), turn.fate == "late"
    return Failure(turn.client, handler, why, unheard=True, kind=kind, late=late)


def _part(outcome: Outcome, bytes_down: int, exchange: int) -> Errand:
    """What an outcome took its client."""
    if not isinstance(outcome, Answer):
        return Errand(None, bytes_down, 0, exchange=exchange)
    try:
        sizes = Message.decode(outcome.payload, views=True).sizes()
    except Exception:  # it is refused later
        sizes = {}
    cost = outcome.cost or Cost()
    return Errand(cost.flops, bytes_down, sum(sizes.values()), cost.memory, exchange)
