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
        lines: by experiment its label, its points, and the last value as text.
        heights: ticks of the vertical axis, by text.
        places: ticks of the horizontal axis.
    """

    title: str
    lines: tuple[tuple[str, str, str], ...]
    heights: dict[str, float]
    places: dict[str, float]


def still(
    title: str,
    groups: Sequence[Group],
    value: Callable[[RoundRecord], float | None],
    shown: Callable[[float], str],
    *,
    shares: bool,
) -> Still | None:
    """The curves of a value over rounds, mean over seeds; None if it was never measured."""
    curves = [(members.label, points) for members in groups if (points := curve(members.runs, value))]
    if not curves:
        return None
    values = [point.value.mean for _, points in curves for point in points]
    final = max(point.round for _, points in curves for point in points)
    low, high = _span(min(values), max(values), shares)

    def x(number: float) -> float:
        return round(_LEFT + (WIDTH - _LEFT - _RIGHT) * number / final, 1)

    def y(height: float) -> float:
        return round(HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (height - low) / (high - low), 1)

    def path(points: Sequence[CurvePoint]) -> str:
        return " ".join(f"{x(point.round)},{y(point.value.mean)}" for point in points)

    return Still(
        title,
        tuple((label, path(points), shown(points[-1].value.mean)) for label, points in curves),
        {shown(height): y(height) for height in _between(low, high)},
        {str(number): x(number) for number in sorted({round(place) for place in _between(0, final)})},
    )


def _between(low: float, high: float) -> list[float]:
    return [low + (high - low) * place / (_TICKS - 1) for place in range(_TICKS)]


def _span(low: float, high: float, shares: bool) -> tuple[float, float]:
    """Limits around the values, apart even if the values are not."""
    least = _NARROWEST if shares else (abs(high) or 1.0) * 1e-6
    lacking = max(0.0, least - (high - low)) / 2
    return low - lacking, high + lacking
