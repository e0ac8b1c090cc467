"""How curves are drawn, the same in the page and in the picture."""

from collections.abc import Sequence
from dataclasses import dataclass

from potluck.analysis.read import StoredRun
from potluck.records import Measure


@dataclass(frozen=True)
class Drawn:
    """How curves are drawn.

    Attributes:
        measure: of the primary metric; it is shown first.
        smooth: of how many values of a run, up to each, its curve is the mean.
        target: a value of that measure, drawn as a line; None for none.
    """

    measure: Measure = "personal"
    smooth: int = 1
    target: float | None = None


AS_MEASURED = Drawn()
"""Nothing is smoothed, and there is no target."""


def how_drawn(runs: Sequence[StoredRun], measure: Measure, smooth: int, target: float | None) -> Drawn:
    """How the curves of these runs are drawn: of a measure that none of them has, those of own test parts instead."""
    values = (record.value(measure, run.metric.name) for run in runs for record in run.rounds)
    if all(value is None for value in values):
        return Drawn(smooth=smooth)
    return Drawn(measure, smooth, target)
