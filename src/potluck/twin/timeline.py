"""The course of a federation by a virtual clock: who works until when, and when an exchange closes."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from potluck.core.federation import ClientId
from potluck.twin.devices import Fleet

_NEAR = 1.0  # seconds: so near a moment at which a device comes or leaves it is looked up, not remembered
Fate = Literal["counted", "late", "left", "absent", "failed"]
"""What became of a client's part in an exchange: its reply counts; it came after the exchange had closed; its device
left in the middle; it was not there, or still at work on what came too late; or its work failed."""

UNAWAITED = 0
"""Instead of an exchange's number: the client was on its way alone, and nobody waited for it."""


@dataclass(frozen=True)
class Errand:
    """What a client's part in an exchange takes.

    Attributes:
        flops: operations; None if its work failed.
        memory: bytes of tensors.
        exchange: its number within the round, from 1.
    """

    flops: int | None
    bytes_down: int
    bytes_up: int
    memory: int = 0
    exchange: int = 1


class Turn(NamedTuple):
    """One client's part in an exchange.

    Attributes:
        start: in seconds since the first round began.
        finish: when it was done, or left.
        computing: seconds of that which it computed.
        joules: that its device took.
    """

    client: ClientId
    fate: Fate
    start: float
    finish: float
    computing: float = 0.0
    joules: float = 0.0


@dataclass(frozen=True)
class Closing:
    """When an exchange closes, in seconds.

    Attributes:
        deadline: after which it closes with the replies that are there; with fewer than the quorum it stays open.
        quorum: the least number of replies.
        over_select: share of the clients asked that were asked beyond those that are needed: when the others have
            answered, it closes.
    """

    deadline: float = math.inf
    quorum: int = 1
    over_select: float = 0.0

    def enough(self, asked: int) -> int:
        """After how many replies an exchange with so many clients closes."""
        return max(1, math.floor(asked / (1 + self.over_select) + 1e-9))

    def at(self, began: float, finishes: Collection[float], asked: int) -> float:
        """When an exchange closes.

        Args:
            began: the moment at which it began.
            finishes: when each reply comes that comes at all.
            asked: the number of clients that were asked.
        """
        order = sorted(finishes)
        if not order:
            return began
        end = order[min(self.enough(asked), len(order)) - 1]
        needed = order[min(self.quorum, len(order)) - 1]
        return min(end, max(began + self.deadline, needed))


class Timeline:
    """A clock, and what clients are at work on.

    Args:
        fleet: the clients' devices.
        closing: when exchanges close.
        starts_at: the hour of the day at which the clock starts.
        server_gflops: the server's sustained speed; None has it compute in no time.

    Attributes:
        now: seconds since the clock started.
    """

    def __init__(
        self, fleet: Fleet, closing: Closing, starts_at: float = 0.0, server_gflops: float | None = None
    ) -> None:
        self.now = 0.0
        self._fleet, self._closing = fleet, closing
        self._midnight = -starts_at * 3600.0
        self._server_gflops = server_gflops
        self._busy: dict[ClientId, float] = {}
        self._stays: dict[ClientId, tuple[bool, float]] = {}
        self._taken: dict[ClientId, tuple[Errand, tuple[float, float]]] = {}

    def absent(self, clients: Collection[ClientId]) -> dict[ClientId, str]:
        """Those of the clients that are not there now, or still at work, and which it is."""
        found = dict.fromkeys(self.at_work(clients), "is still at work on what came too late")
        return found | {
            client: "is not there" for client in clients if client not in found and not self._stay(client)[0]
        }

    def at_work(self, clients: Collection[ClientId]) -> set[ClientId]:
        """Those of the clients that are still at work on what came too late."""
        return {client for client in clients if self._busy.get(client, 0.0) > self.now}

    def wait(self, clients: Collection[ClientId]) -> float:
        """Let time pass until another one of the clients is there; return the seconds, infinity if none ever is."""
        moment = self.comes(self.absent(clients))
        if moment == math.inf:
            return math.inf
        before, self.now = self.now, max(self.now, moment)
        return self.now - before

    def comes(self, clients: Collection[ClientId]) -> float:
        """The next moment at which one of the clients, who are not there, will be; infinity if none ever is."""
        moments: list[float] = []
        for client in clients:
            free = max(self.now, self._busy.get(client, 0.0))
            moments.append(self._fleet.availability(client).comes(free - self._midnight) + self._midnight)
        return min(moments, default=math.inf)

    def exchange(self, parts: Mapping[ClientId, Errand]) -> list[Turn]:
        """The clients' turns in an exchange that begins now, by client; the clock goes on to its close."""
        away = self.absent(parts)
        turns = {
            client: Turn(client, "absent", self.now, self.now) if client in away else self.turn(client, part)
            for client, part in sorted(parts.items())
        }
        done = [turn.finish for turn in turns.values() if turn.fate in ("counted", "failed")]
        replies = [turn.finish for turn in turns.values() if turn.fate == "counted"]
        close = self._closing.at(self.now, replies, len(parts)) if replies else max(done, default=self.now)
        late = {client for client, turn in turns.items() if turn.fate == "counted" and turn.finish > close}
        self._busy = {client: until for client, until in self._busy.items() if until > close}
        self._busy |= {client: turns[client].finish for client in late}
        self.now = close
        return [_fated(turn, "late") if turn.client in late else turn for turn in turns.values()]

    def serve(self, flops: int) -> None:
        """Let the server compute."""
        if self._server_gflops is not None:
            self.now += flops / (self._server_gflops * 1e9)

    def turn(self, client: ClientId, part: Errand) -> Turn:
        """The turn of a client that is there and begins now, if nobody closes before it is done."""
        if not self._fleet[client].has_room_for(part.memory):
            part = replace(part, flops=None, bytes_up=0)
        computing, carrying = self._seconds(client, part)
        finish = self.now + computing + carrying
        leaves = self._stay(client)[1] + self._midnight
        fate: Fate = "failed" if part.flops is None else "counted"
        if leaves < finish:
            share = (leaves - self.now) / (finish - self.now)
            fate, finish, computing = "left", leaves, computing * share
        return Turn(client, fate, self.now, finish, computing, self._fleet[client].watts * (finish - self.now))

    def _seconds(self, client: ClientId, part: Errand) -> tuple[float, float]:
        """What the part takes the client's device; known from the last time, if it was the same."""
        last = self._taken.get(client)
        if last is None or last[0] is not part:
            seconds = self._fleet[client].seconds(part.flops or 0, part.bytes_down, part.bytes_up, part.exchange)
            last = self._taken[client] = part, seconds
        return last[1]

    def _stay(self, client: ClientId) -> tuple[bool, float]:
        """Whether a client's device is there now, and until when that is so, in seconds since midnight."""
        at, known = self.now - self._midnight, self._stays.get(client)
        if known is None or at > known[1] - _NEAR:
            availability = self._fleet.availability(client)
            there = availability.is_on(at)
            known = self._stays[client] = there, availability.leaves(at) if there else availability.comes(at)
        return known

    def state(self) -> dict[str, Any]:
        """The clock, and who is at work, from which another course can go on."""
        return {"now": self.now, "busy": {str(client): until for client, until in sorted(self._busy.items())}}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another course."""
        self.now = float(state["now"])
        self._busy = {int(client): float(until) for client, until in state["busy"].items()}
        self._stays.clear()


def _fated(turn: Turn, fate: Fate) -> Turn:
    return turn._replace(fate=fate)
