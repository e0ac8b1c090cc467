"""When a device is there: always, at some hours of every day, or as in a trace."""

import csv
import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.core.ground.errors import ConfigError

HOUR, DAY = 3600.0, 86_400.0


@dataclass(frozen=True)
class Availability:
    """Spans of time in which a device is there, repeated for ever.

    Attributes:
        spans: beginnings and ends in seconds, ascending and apart; none for a device that is always there.
        period: after so many seconds they begin anew; a device that is there at the end of one period and at the
            beginning of the next has not left in between.
    """

    spans: tuple[tuple[float, float], ...] = ()
    period: float = DAY

    def is_on(self, at: float) -> bool:
        """Whether the device is there at this moment, in seconds since midnight of the first day."""
        return not self.spans or self._span(at) is not None

    def leaves(self, at: float) -> float:
        """When the device, which is there, leaves; infinity if it never does."""
        if not self.spans:
            return math.inf
        end, began = at, at
        while (span := self._span(end)) is not None:
            end = math.floor(end / self.period) * self.period + span[1]
            if end - began >= self.period:
                return math.inf
        return end

    def comes(self, at: float) -> float:
        """When the device is there next, which may be now."""
        if self.is_on(at):
            return at
        day, within = divmod(at, self.period)
        later = [begin for begin, _ in self.spans if begin > within]
        return day * self.period + (later[0] if later else self.period + self.spans[0][0])

    def _span(self, at: float) -> tuple[float, float] | None:
        """The span that this moment is in, its beginning included and its end not."""
        within = at % self.period
        place = bisect_right(self.spans, (within, math.inf)) - 1
        return self.spans[place] if place >= 0 and within < self.spans[place][1] else None


ALWAYS = Availability()


def daily(text: str) -> Availability:
    """Hours of every day, such as "22-6" or "0-6.5, 20-24".

    Raises:
        ConfigError: they are not that.
    """
    spans: list[tuple[float, float]] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*-\s*(\d+(?:\.\d+)?)\s*", part)
        begin, end = (float(found[1]), float(found[2])) if found else (0.0, 0.0)
        if begin == end or max(begin, end) > 24:
            raise ConfigError(
                f"available: found {text!r}; expected 'always', hours of the day such as '22-6' or '0-6.5, 20-24', or"
                " the name of a CSV file with client, from_s and to_s"
            )
        spans += [(begin, end)] if begin < end else [(begin, 24.0), (0.0, end)]
    return _of([(begin * HOUR, end * HOUR) for begin, end in spans if begin < end], DAY)


def traces(path: Path) -> dict[int, Availability]:
    """The availability of each client in a CSV file with the columns `client`, `from_s` and `to_s`.

    The whole trace, to the last moment in it, is repeated for ever.

    Raises:
        ConfigError: it cannot be read, or a line is not two moments of a client.
    """
    spans: dict[int, list[tuple[float, float]]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            for number, row in enumerate(csv.DictReader(lines), start=2):
                client, begin, end = int(row["client"]), float(row["from_s"]), float(row["to_s"])
                if not 0 <= begin < end < math.inf:
                    raise ConfigError(f"{path}, line {number}: found {begin:g} to {end:g} s; expected 0 <= from < to")
                spans.setdefault(client, []).append((begin, end))
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: {type(error).__name__}: {error}; expected a CSV file with numbers in the columns client, from_s"
            " and to_s"
        ) from error
    if not spans:
        raise ConfigError(f"{path}: found no spans; expected a line for each time that a client is there")
    period = max(end for of_one in spans.values() for _, end in of_one)
    return {client: _of(of_one, period) for client, of_one in spans.items()}


def _of(spans: Sequence[tuple[float, float]], period: float) -> Availability:
    """Spans in order, those that touch joined."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return ALWAYS if joined == [(0.0, period)] else Availability(tuple(joined), period)
