"""Curves over the rounds that runs have kept: how alike clients see, how far apart their weights and features are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from potluck.analysis.inside import Inside, Moment
from potluck.analysis.plots.curves import Axes, Figure, style
from potluck.analysis.plots.panels import MOST, draw_lines, panels_of

_Value = Callable[[Moment], float | None]


def draw_over_rounds(inside: Sequence[Inside]) -> dict[str, Figure | None]:
    """By name a figure with a panel for each stage, or quantity, and in it a line for each experiment."""
    known = [one for one in inside if len(one.moments) > 1]
    stages = sorted({stage for one in known for moment in one.moments for stage in moment.similarity})
    similar = {f"stage {stage}": _similarity_at(stage) for stage in stages[-MOST:]}
    separation: dict[str, _Value] = {"by client": lambda it: it.by_client, "by class": lambda it: it.by_class}
    return {
        "similarity-over-rounds": _figure(known, similar, "CKA between clients, unbiased"),
        "silhouette-over-rounds": _figure(known, separation, "silhouette"),
        "drift-over-rounds": _figure(known, {"": lambda it: it.mean_drift}, "distance to mean, over layers"),
    }


def _similarity_at(stage: int) -> _Value:
    def value(moment: Moment) -> float | None:
        return moment.similarity[stage][1] if stage in moment.similarity else None

    return value


def _figure(inside: Sequence[Inside], values: Mapping[str, _Value], label: str) -> Figure | None:
    """A panel for each value that some run has."""
    shown = {title: value for title, value in values.items() if any(_points([one], value) for one in inside)}
    if not shown:
        return None
    with style():
        figure, panels = panels_of(2.6, len(shown), share=True)
        for axes, (title, value) in zip(panels, shown.items(), strict=True):
            draw_lines(axes, inside, _drawing(value))
            axes.set(title=title, xlabel="round")
            axes.xaxis.get_major_locator().set_params(integer=True)
        panels[0].set_ylabel(label)
    return figure


def _drawing(value: _Value) -> Callable[[Axes, Sequence[Inside], dict[str, Any]], None]:
    def draw(axes: Axes, runs: Sequence[Inside], look: dict[str, Any]) -> None:
        points = _points(runs, value)
        axes.plot(list(points), list(points.values()), **look)

    return draw


def _points(runs: Sequence[Inside], value: _Value) -> dict[int, float]:
    """By round the mean over runs, where all of them have it."""
    found: dict[int, list[float]] = {}
    for moment in (moment for one in runs for moment in one.moments):
        if (known := value(moment)) is not None:
            found.setdefault(moment.round, []).append(known)
    return {number: float(np.mean(all)) for number, all in sorted(found.items()) if len(all) == len(runs)}
