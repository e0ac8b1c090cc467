"""Who is asked when, whose replies have come, and when a round closes: of asynchronous rounds, by any clock."""

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from potluck.core.federation import ClientId
from potluck.engine.rounds.asynchrony.rules import Asynchrony
from potluck.engine.rounds.lost import Lost


class Presence(Protocol):
    """The time, and who is there when.

    Attributes:
        now: seconds since the first round began.
    """

    now: float

    def absent(self, clients: Collection[ClientId]) -> Mapping[ClientId, str]:
        """Those of the clients that are not there now, and why."""
        ...

    def comes(self, clients: Collection[ClientId]) -> float:
        """The next moment at which one of the clients, who are not there, will be; infinity if none ever is."""
        ...


class Departures:
    """Clients that are under way, and those whose replies wait for the round to close.

    A client whose reply waits is not asked before it is merged, and one that has failed or left not again in the same
    round.

    Args:
        rule: when a round closes.
        at_once: how many clients are under way at once, where there are as many.
    """

    def __init__(self, rule: Asynchrony, at_once: int) -> None:
        self._rule, self._at_once = rule, at_once
        self._under_way: dict[ClientId, float] = {}  # and when each is done
        self._order: list[tuple[float, ClientId]] = []  # the same, as a heap
        self._waiting: list[ClientId] = []  # in the order in which they have come
        self._spent: set[ClientId] = set()
        self._tiers: dict[ClientId, int] = {}

    def begin(self) -> None:
        """A round begins: also those may be asked that have failed or left in the last one."""
        self._spent.clear()

    def to_ask(self, order: Sequence[ClientId], course: Presence) -> list[ClientId]:
        """The clients to be asked now, ascending.

        Args:
            order: all clients, those first that are preferred.
            course: says who is there.
        """
        found: list[ClientId] = []
        room = self._room()
        for client in self._candidates(order) if room > 0 else ():
            if not course.absent([client]):
                found.append(client)
                if len(found) >= room:
                    break
        return sorted(found)

    def depart(self, dues: Mapping[ClientId, float], order: Sequence[ClientId]) -> None:
        """Clients are under way from now on.

        Args:
            dues: by client, when it is done, or leaves.
            order: all clients; by the first of them that are under way, tiers are formed.
        """
        self._under_way |= dues
        for client, due in dues.items():
            heapq.heappush(self._order, (due, client))
        if self._rule.tiers and not self._tiers:
            fastest = sorted(order, key=lambda client: (dues.get(client, math.inf), client))
            tiers = self._rule.tiers
            self._tiers = {client: place * tiers // len(fastest) for place, client in enumerate(fastest)}

    def pass_time(self, order: Sequence[ClientId], course: Presence) -> ClientId | None:
        """Let time pass until something happens; return the client that is done, None if another is there now.

        Raises:
            Lost: nothing can happen in this round any more.
        """
        due, client = self._order[0] if self._order else (math.inf, None)
        candidates = list(self._candidates(order)) if self._room() > 0 else []
        comes = course.comes(candidates) if candidates else math.inf
        if math.isinf(min(due, comes)):
            raise Lost("nobody is left to ask")
        course.now = max(course.now, min(due, comes))
        return client if due <= comes else None

    def land(self, client: ClientId, counted: bool) -> None:
        """The client that is done first: its reply counts and waits, or does not count."""
        _, first = heapq.heappop(self._order)
        assert first == client
        del self._under_way[client]
        if counted:
            self._waiting.append(client)
        else:
            self._spent.add(client)

    def ready(self) -> list[ClientId]:
        """The clients whose replies close a round now, ascending; none while it stays open."""
        if not self._rule.tiers:
            return sorted(self._waiting) if len(self._waiting) >= (self._rule.buffer or 1) else []
        at_work = {self._tiers[client] for client in self._under_way}
        complete = {self._tiers[client] for client in self._waiting} - at_work
        return sorted(client for client in self._waiting if complete and self._tiers[client] == min(complete))

    def merge(self, clients: Collection[ClientId]) -> None:
        """The round of these clients closes."""
        self._waiting = [client for client in self._waiting if client not in clients]

    def tier(self, client: ClientId) -> int:
        """The tier of a client, from 0, the fastest."""
        return self._tiers[client]

    def state(self) -> dict[str, Any]:
        """All of this between two rounds, from which others can go on."""
        return {"under_way": dict(self._under_way), "waiting": list(self._waiting), "tiers": dict(self._tiers)}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of others."""
        self._under_way, self._waiting = dict(state["under_way"]), list(state["waiting"])
        self._order = sorted((due, client) for client, due in self._under_way.items())
        self._tiers = dict(state["tiers"])
        self._spent.clear()

    def _room(self) -> float:
        return math.inf if self._rule.tiers else self._at_once - len(self._under_way)

    def _candidates(self, order: Sequence[ClientId]) -> Iterator[ClientId]:
        """Who may be asked, if it is there; under tiers, whose tier has nothing to do."""
        if len(self._under_way) + len(self._waiting) + len(self._spent) >= len(order):
            return
        occupied = {*self._waiting, *self._spent}
        busy = {self._tiers[client] for client in (*self._under_way, *self._waiting)} if self._tiers else set[int]()
        for client in order:
            if client not in self._under_way and client not in occupied and self._tiers.get(client) not in busy:
                yield client
