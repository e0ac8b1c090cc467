"""How much of the gate, and of the operator's attention, callers may take."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

Say = Callable[[str], None]

LOG_LINES = 10
"""The most lines about refusals between two turns of a `Reports`."""


class Reports:
    """Reports each line once, and no more than so many; the rest are counted until the next turn.

    A refused node keeps trying, and a stranger can be refused for a thousand reasons a second.

    Args:
        say: called with each line.
        who: of whom the lines are, for the count.
    """

    def __init__(self, say: Say, who: str) -> None:
        self._say = say
        self._who = who
        self._told: set[str] = set()
        self._untold = 0

    def __call__(self, line: str) -> None:
        """Report a line, unless it was reported or there were too many."""
        if line in self._told:
            return
        if len(self._told) >= LOG_LINES:
            self._untold += 1
            return
        self._told.add(line)
        self._say(line)

    def turn(self) -> None:
        """Tell how many lines were not told, and forget those that were."""
        if self._untold:
            self._say(f"and {self._untold} more refusals of {self._who}")
        self._told, self._untold = set(), 0


class Pace:
    """A budget of requests that refills steadily; whoever has spent it waits.

    Waiting, not refusing: Flower's nodes end at most refusals.

    Args:
        rate: requests per second.
        burst: requests at once.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at = time.monotonic()

    async def wait(self) -> None:
        """Take one request from the budget, as soon as there is one."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - 1.0
        self._at = now
        if self._left < 0:
            await asyncio.sleep(-self._left / self._rate)


class WaitingRoom:
    """Callers who have not proven who they are: when there are too many, the one that has waited longest has to go.

    A node proves itself within a fraction of a second, so that those who hold a place without a proof go first,
    however many come.

    Args:
        places: the most callers.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._here: dict[asyncio.Task[None], None] = {}

    def enter(self, caller: asyncio.Task[None]) -> None:
        """Take a place; the caller that has waited longest is cancelled if there is none."""
        if len(self._here) >= self._places:
            longest = next(iter(self._here))
            del self._here[longest]
            longest.cancel()
        self._here[caller] = None

    def leave(self, caller: asyncio.Task[None]) -> None:
        """Give the place free, if it is still the caller's."""
        self._here.pop(caller, None)


class Shares:
    """At most so many of something for each key at a time.

    Args:
        most: of each key.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = Counter[bytes]()

    @contextmanager
    def one(self, key: bytes) -> Generator[bool]:
        """Hold one of the key's share; whether there was one."""
        free = self._taken[key] < self._most
        self._taken[key] += free
        try:
            yield free
        finally:
            self._taken[key] -= free
            if not self._taken[key]:
                del self._taken[key]
