"""Runs by a virtual clock: how long rounds took, what came of the clients' work, and when a target was reached."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from potluck.analysis.read import StoredRun, courses
from potluck.analysis.tables import rounds_to
from potluck.records import Measure, duration
from potluck.twin.simulate import Summary, Timed, summed

COLUMNS = ("rounds", "time", "a round", "counted", "waiting", "dropped", "energy")
"""What `VirtualCourse.cells` are."""
WORDS = (
    "a round: the median one; counted: the share of what clients were asked for that counts; waiting: of the time of"
    " devices that were asked, the share in which they were done and others were not; dropped: of what devices computed"
    " the share that does not count"
)
_SHORT = 10.0  # seconds, below which a duration has decimals
_KILOWATT_HOUR = 3.6e6  # joules


@dataclass(frozen=True)
class VirtualCourse:
    """What some rounds come to by a virtual clock.

    Attributes:
        found: their summary.
        each: the seconds of each round.
    """

    found: Summary
    each: tuple[float, ...]

    @classmethod
    def of(cls, rounds: Sequence[Timed]) -> "VirtualCourse":
        """That of these rounds."""
        return cls(summed(rounds), tuple(timed.end - timed.start for timed in rounds))

    @property
    def cells(self) -> list[str]:
        """The columns of a table as text; without any round all but the first are empty."""
        found = self.found
        if not found.rounds:
            return ["0", *[""] * (len(COLUMNS) - 1)]
        heard = f"{found.counted / found.asked:.0%}" if found.asked else ""
        shares = (f"{found.idle_share:.0%}", f"{found.dropped_share:.0%}")
        energy = f"{found.joules / _KILOWATT_HOUR:.3g} kWh" if found.joules else ""
        return [str(found.rounds), virtual(found.seconds), virtual(median(self.each)), heard, *shares, energy]

    @property
    def numbers(self) -> list[float | None]:
        """The same as numbers, by which a table can be sorted."""
        found = self.found
        heard = found.counted / found.asked if found.asked else None
        pace = median(self.each) if self.each else None
        return [found.rounds, found.seconds, pace, heard, found.idle_share, found.dropped_share, found.joules or None]


def course_of(run: StoredRun) -> list[Timed]:
    """The finished rounds of a run with a twin, by its virtual clock; none of another run."""
    return [Timed.of(record) for record in courses(run)]


def reached_at(run: StoredRun, rounds: Sequence[Timed], target: float, measure: Measure = "personal") -> float:
    """The virtual second at which the primary metric was first as good as this; infinity if it never was."""
    ends = {timed.number: timed.end for timed in rounds}
    return ends.get(rounds_to(run, target, measure) or 0, math.inf)


def median_round(rounds: Sequence[Timed]) -> Timed:
    """The first round of median length; of an even number the lower median."""
    ranked = sorted(rounds, key=lambda timed: timed.end - timed.start)
    return ranked[(len(ranked) - 1) // 2]


def virtual(seconds: float) -> str:
    """A virtual duration, which may be shorter than a second; "never" for one without an end."""
    if math.isinf(seconds):
        return "never"
    return f"{seconds:.2g} s" if seconds < _SHORT else duration(seconds)
