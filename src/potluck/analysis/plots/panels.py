"""Panels as wide as a column of a paper, a line in them for each experiment, and how they are written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from potluck.analysis.inside import Inside, by_experiment
from potluck.analysis.plots.curves import COLOURS, Axes, Figure, style

COLUMN = 3.4
"""Inches, the width of a column of most papers in two columns."""
MOST = 6
"""Panels or lines, as many as colours can tell apart."""
_TICKS = 24
_MARKERS = "osD^vP"
_FORMATS = ("svg", "pdf")
DrawLine = Callable[[Axes, Sequence[Inside], dict[str, Any]], None]
"""Draws the line of an experiment's runs, with this look."""


def save_figure(figure: Figure, to: Path, name: str) -> None:
    """Write a figure as SVG and as PDF; the same figure always gives the same bytes."""
    from matplotlib import rc_context

    with style(), rc_context({"svg.hashsalt": name, "svg.fonttype": "path", "pdf.fonttype": 42}):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # otherwise it would move the panels a little at every drawing
        for kind in _FORMATS:
            date = "Date" if kind == "svg" else "CreationDate"
            figure.savefig(to / f"{name}.{kind}", format=kind, facecolor="white", metadata={date: None})


def panels_of(height: float, columns: int = 1, *, share: bool = False) -> tuple[Figure, Sequence[Axes]]:
    """A figure with panels beside one another, each as wide as a column."""
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(COLUMN * columns, height), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(1, columns, sharey=share)))


def panel_of_lines(inside: Sequence[Inside], draw: DrawLine) -> Figure | None:
    """One panel with a line for each experiment of these runs; None if there are none."""
    if not inside:
        return None
    with style():
        figure, (axes,) = panels_of(2.6)
        draw_lines(axes, inside, draw)
    return figure


def look_of(place: int) -> dict[str, Any]:
    """The look of a line among others."""
    return {"color": COLOURS[place % MOST], "marker": _MARKERS[place // MOST % MOST], "markersize": 3}


def draw_lines(axes: Axes, inside: Sequence[Inside], draw: DrawLine) -> None:
    """A line for each experiment of these runs, each with its look, and a legend of several."""
    experiments = by_experiment(inside)
    for place, (label, runs) in enumerate(experiments):
        draw(axes, runs, {**look_of(place), "label": label})
    if len(experiments) > 1:
        axes.legend(fontsize=6, frameon=False)


def few(places: Sequence[int]) -> list[int]:
    """As many of these as have room for a text each."""
    step = max(1, -(-len(places) // _TICKS))
    return list(places[::step])
