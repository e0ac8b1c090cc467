"""Learning curves as points of a drawing that stands in a page, for readers without the page's script."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from potluck.analysis.groups import Group
from potluck.analysis.tables import CurvePoint, curve
from potluck.records import RoundRecord

WIDTH, HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 30
_NARROWEST = 0.1  # the least span of shares that fills the height
_TICKS = 5


@dataclass(frozen=True)
class Still:
    """One drawing, in units of a view box of WIDTH by HEIGHT.

    Attributes:
        title: what it shows.
        lines: by experiment its label, its points, the last value measured as text, and, if the points are smoothed,
            those measured.
        heights: ticks of the vertical axis, by text.
        places: ticks of the horizontal axis.
        target: height of the line of a target; None for none.
    """

    title: str
    lines: tuple[tuple[str, str, str, str], ...]
    heights: dict[str, float]
    places: dict[str, float]
    target: float | None = None


def still(
    title: str,
    groups: Sequence[Group],
    value: Callable[[RoundRecord], float | None],
    shown: Callable[[float], str],
    *,
    shares: bool,
    smooth: int = 1,
    target: float | None = None,
) -> Still | None:
    """The curves of a value over rounds, mean over seeds; None if it was never measured.

    Args:
        title: what they show.
        groups: experiments, each of which has a curve.
        value: of a round.
        shown: a value as text.
        shares: whether values are shares.
        smooth: of how many values of a run, up to each, a curve is the mean.
        target: a value to draw a line at.
    """
    curves = [
        (members.label, curve(members.runs, value, smooth), points)
        for members in groups
        if (points := curve(members.runs, value))
    ]
    if not curves:
        return None
    values = [point.value.mean for _, *both in curves for points in both for point in points]
    values += [] if target is None else [target]
    final = max(point.round for _, _, points in curves for point in points)
    low, high = _span(min(values), max(values), shares)

    def x(number: float) -> float:
        return round(_LEFT + (WIDTH - _LEFT - _RIGHT) * number / final, 1)

    def y(height: float) -> float:
        return round(HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (height - low) / (high - low), 1)

    def path(points: Sequence[CurvePoint]) -> str:
        return " ".join(f"{x(point.round)},{y(point.value.mean)}" for point in points)

    return Still(
        title,
        tuple(
            (label, path(points), shown(measured[-1].value.mean), path(measured) if smooth > 1 else "")
            for label, points, measured in curves
        ),
        {shown(height): y(height) for height in _between(low, high)},
        {str(number): x(number) for number in sorted({round(place) for place in _between(0, final)})},
        None if target is None else y(target),
    )


def _between(low: float, high: float) -> list[float]:
    return [low + (high - low) * place / (_TICKS - 1) for place in range(_TICKS)]


def _span(low: float, high: float, shares: bool) -> tuple[float, float]:
    """Limits around the values, apart even if the values are not."""
    least = _NARROWEST if shares else (abs(high) or 1.0) * 1e-6
    lacking = max(0.0, least - (high - low)) / 2
    return low - lacking, high + lacking
