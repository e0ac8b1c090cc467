"""Who is asked when, whose replies have come, and when a round closes: of asynchronous rounds, by any clock."""

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from potluck.core.federation import ClientId
from potluck.engine.rounds.asynchrony.rules import Asynchrony
from potluck.engine.rounds.lost import Lost


class Attending(Protocol):
    """Who is there."""

    def absent(self, clients: Collection[ClientId]) -> Mapping[ClientId, str]:
        """Those of the clients that are not there now, and why."""
        ...


class Presence(Attending, Protocol):
    """The time, and who is there when.

    Attributes:
        now: seconds since the first round began.
    """

    now: float

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
        self._under_way: dict[ClientId, float | None] = {}  # and when each is done, if that is known
        self._order: list[tuple[float, ClientId]] = []  # those of whom it is, as a heap
        self._waiting: list[ClientId] = []  # in the order in which they have come
        self._spent: set[ClientId] = set()
        self._left: set[ClientId] = set()  # those of the spent that were not there to the end
        self._tiers: dict[ClientId, int] = {}
        self._without_tier: list[ClientId] = []  # while tiers form,
        self._everybody = 0  # of so many

    @property
    def under_way(self) -> frozenset[ClientId]:
        """The clients that are under way."""
        return frozenset(self._under_way)

    @property
    def waiting(self) -> frozenset[ClientId]:
        """The clients whose replies wait for their round to close."""
        return frozenset(self._waiting)

    def begin(self) -> None:
        """A round begins: also those may be asked that have failed or left in the last one."""
        self._spent.clear()
        self._left.clear()

    def to_ask(self, order: Sequence[ClientId], course: Attending) -> list[ClientId]:
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

    def may_come(self, order: Sequence[ClientId]) -> bool:
        """Whether a client of these that is not there, or was not to the end, could still be asked once it is."""
        return bool(self._left) or next(self._candidates(order), None) is not None

    def depart(self, dues: Mapping[ClientId, float | None], order: Sequence[ClientId]) -> None:
        """Clients are under way from now on.

        Args:
            dues: by client, when it is done, or leaves; None if nobody can know.
            order: all clients; by the first of them that are under way, tiers are formed.
        """
        self._under_way |= dues
        known = {client: due for client, due in dues.items() if due is not None}
        for client, due in known.items():
            heapq.heappush(self._order, (due, client))
        if self._rule.tiers and not self._tiers and not self._without_tier:
            self._without_tier = sorted(order, key=lambda client: (known.get(client, math.inf), client))
            self._everybody = len(order)
            if len(known) == len(dues):
                self._rank(list(self._without_tier))

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

    def land(self, client: ClientId, counted: bool, left: bool = False) -> None:
        """A client is done: its reply counts and waits, or does not count.

        Args:
            client: where it is known when each is done, the first of them.
            counted: whether its reply counts.
            left: whether it does not since the client was not there to the end.
        """
        if self._under_way.pop(client) is not None:
            _, first = heapq.heappop(self._order)
            assert first == client
        if counted:
            self._waiting.append(client)
        else:
            self._spent.add(client)
        if left:
            self._left.add(client)
        if client in self._without_tier:
            self._rank([client])
            if not self._under_way.keys() & self._without_tier:  # the others were not there
                self._rank(list(self._without_tier))

    def ready(self) -> list[ClientId]:
        """The clients whose replies close a round now, ascending; none while it stays open."""
        if not self._rule.tiers:
            return sorted(self._waiting) if len(self._waiting) >= (self._rule.buffer or 1) else []
        forming = self._tier_of(len(self._tiers))
        at_work = {self._tiers.get(client, forming) for client in self._under_way}
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
        slowest = enumerate(self._without_tier if self._tiers else (), start=len(self._tiers))
        tiers = {**self._tiers, **{client: self._tier_of(place) for place, client in slowest}}
        return {"under_way": dict(self._under_way), "waiting": list(self._waiting), "tiers": tiers}

    def go_on(self, state: Mapping[str, Any], without: Collection[ClientId] = ()) -> None:
        """Go on from the state of others, where these clients are under way no more."""
        self._under_way = {client: due for client, due in state["under_way"].items() if client not in without}
        self._waiting = list(state["waiting"])
        self._order = sorted((due, client) for client, due in self._under_way.items() if due is not None)
        self._tiers, self._without_tier = dict(state["tiers"]), []
        self.begin()

    def _room(self) -> float:
        return math.inf if self._rule.tiers else self._at_once - len(self._under_way)

    def _candidates(self, order: Sequence[ClientId]) -> Iterator[ClientId]:
        """Who may be asked, if it is there; under tiers, whose tier has nothing to do."""
        if len(self._under_way) + len(self._waiting) + len(self._spent) >= len(order):
            return
        occupied = {*self._waiting, *self._spent}
        busy = (
            {self._tiers.get(client) for client in (*self._under_way, *self._waiting)}
            if self._tiers
            else set[int | None]()
        )
        for client in order:
            if client not in self._under_way and client not in occupied and self._tiers.get(client) not in busy:
                yield client

    def _rank(self, clients: Sequence[ClientId]) -> None:
        """Clients are the next fastest, in this order."""
        for client in clients:
            self._tiers[client] = self._tier_of(len(self._tiers))
            self._without_tier.remove(client)

    def _tier_of(self, place: int) -> int:
        """The tier of a client that so many are faster than, while tiers form."""
        return place * (self._rule.tiers or 1) // max(1, self._everybody)
