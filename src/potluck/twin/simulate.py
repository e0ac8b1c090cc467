"""The course of many rounds without training: what each client's part takes is known or foreseen."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from potluck.core.federation import ClientId
from potluck.core.ground.rng import Key
from potluck.engine.rounds.asynchrony.departures import Departures
from potluck.engine.rounds.lost import Lost
from potluck.twin.devices import TwinDevice
from potluck.twin.timeline import UNAWAITED, Errand, Timeline, Turn


@dataclass(frozen=True)
class Load:
    """What a round takes.

    Attributes:
        exchanges: of each, the parts of the clients that are asked.
        server: floating-point operations of the server.
    """

    exchanges: Sequence[Mapping[ClientId, Errand]]
    server: int = 0


@dataclass(frozen=True)
class Timed:
    """A round by a virtual clock: when it began and ended, in seconds, and the clients' turns in each exchange."""

    number: int
    start: float
    end: float
    turns: tuple[tuple[int, Turn], ...]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Timed":
        """The round of a line of `twin.jsonl`."""
        turns = tuple((exchange, Turn(*turn)) for exchange, *turn in record["turns"])
        return cls(record["round"], record["start"], record["end"], turns)


def simulate(course: Timeline, loads: Iterable[Load], needed: Callable[[int], int]) -> Iterator[Timed]:
    """The rounds one after the other, as a run with a twin has them.

    Args:
        course: the clock at its start.
        loads: of each round; the clients of the first exchange are its cohort.
        needed: how many of so many clients must be there before a round begins.
    """
    for number, load in enumerate(loads, start=1):
        start, turns = course.now, list[tuple[int, Turn]]()
        cohort = list(load.exchanges[0]) if load.exchanges else []
        while len(cohort) - len(course.absent(cohort)) < needed(len(cohort)):
            if course.wait(cohort) == math.inf:
                return
        lost = set[ClientId]()
        for place, parts in enumerate(load.exchanges, start=1):
            found = course.exchange({client: part for client, part in parts.items() if client not in lost})
            lost |= {turn.client for turn in found if turn.fate != "counted"}
            turns += [(place, turn) for turn in found]
        course.serve(load.server)
        yield Timed(number, start, course.now, tuple(turns))


def simulate_asynchronously(
    course: Timeline,
    departures: Departures,
    load: Callable[[int, list[ClientId]], Load],
    order: Callable[[int], Sequence[ClientId]],
) -> Iterator[Timed]:
    """The rounds one after the other, as a run with a twin has them whose rounds are asynchronous.

    Args:
        course: the clock at its start.
        departures: likewise.
        load: what clients that are asked in a round take, all in one exchange.
        order: all clients in a round, those first that are preferred.
    """
    under_way: dict[ClientId, Turn] = {}
    for number in count(1):
        start, landed, clients = course.now, list[tuple[int, Turn]](), order(number)
        departures.begin()
        while not (ready := departures.ready()):
            if asked := departures.to_ask(clients, course):
                (parts,) = load(number, asked).exchanges
                turns = {client: course.turn(client, parts[client]) for client in asked}
                under_way |= turns
                departures.depart({client: turn.finish for client, turn in turns.items()}, clients)
                continue
            try:
                client = departures.pass_time(clients, course)
            except Lost:
                return
            if client is not None:
                landed.append((UNAWAITED, turn := under_way.pop(client)))
                departures.land(client, turn.fate == "counted")
        departures.merge(ready)
        course.serve(load(number, ready).server)
        yield Timed(number, start, course.now, tuple(landed))


@dataclass
class Summary:
    """What some rounds come to.

    Attributes:
        rounds: how many.
        seconds: from the beginning of the first to the end of the last.
        asked: parts of clients in exchanges.
        counted: those whose replies count.
        computing: seconds that devices have computed.
        dropped: those of them whose results do not count.
        idle: seconds in which devices had been asked, were done, and others were not.
        open: seconds of exchanges, times the devices that were asked and there.
        joules: that devices have taken.
    """

    rounds: int = 0
    seconds: float = 0.0
    asked: int = 0
    counted: int = 0
    computing: float = 0.0
    dropped: float = 0.0
    idle: float = 0.0
    open: float = 0.0
    joules: float = 0.0

    def add(self, timed: Timed) -> None:
        """Add a round."""
        self.rounds += 1
        self.seconds += timed.end - timed.start
        by_exchange: dict[int, list[Turn]] = {}
        for place, turn in timed.turns:
            by_exchange.setdefault(place, []).append(turn)
        for place, turns in by_exchange.items():
            self._add(turns, together=place != UNAWAITED)

    def _add(self, turns: Sequence[Turn], together: bool) -> None:
        self.asked += len(turns)
        close = max((turn.finish for turn in turns if turn.fate == "counted"), default=None)
        for _, fate, start, finish, computing, joules in turns:
            if fate == "absent":
                continue
            self.computing += computing
            self.joules += joules
            if fate == "counted":
                self.counted += 1
            else:
                self.dropped += computing
            if not together or fate == "left":  # it waits for nobody
                self.open += finish - start
            elif close is not None:
                self.open += close - start
                self.idle += max(0.0, close - finish)

    @property
    def idle_share(self) -> float:
        """Of the time in which exchanges were open, the share that devices waited for others."""
        return self.idle / self.open if self.open else 0.0

    @property
    def dropped_share(self) -> float:
        """Of what devices computed, the share that did not count."""
        return self.dropped / self.computing if self.computing else 0.0


def summed(rounds: Iterable[Timed], within: float = math.inf) -> Summary:
    """The summary of the rounds that end within so many seconds."""
    found = Summary()
    for timed in rounds:
        if timed.end > within:
            break
        found.add(timed)
    return found


def doubted(devices: Sequence[TwinDevice], doubt: float, key: Key) -> list[TwinDevice]:
    """The devices, each as fast as it could be if what is said of it were wrong.

    Speed and bandwidth are multiplied by a factor of their own, whose logarithm is normal with a standard deviation of
    `doubt`.
    """
    draws = torch.randn(len(devices), 3, generator=key.generator(), dtype=torch.float64).mul(doubt).exp().tolist()
    return [
        replace(
            device,
            gflops=device.gflops * speed,
            gflops_later=None if device.gflops_later is None else device.gflops_later * speed,
            down_mbit=None if device.down_mbit is None else device.down_mbit * down,
            up_mbit=None if device.up_mbit is None else device.up_mbit * up,
        )
        for device, (speed, down, up) in zip(devices, draws, strict=True)
    ]
