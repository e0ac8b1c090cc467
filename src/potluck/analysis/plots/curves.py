"""Learning curves: the primary metric over rounds, and over the megabytes that they cost."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from potluck.analysis.groups import Group, enumerated, group, heading
from potluck.analysis.read import StoredRun, last
from potluck.analysis.tables import CurvePoint, curve, metric_of
from potluck.records import ACCURACY, TITLES, Measure, Metric, RoundRecord

Figure = Any  # matplotlib's, which is imported only inside the functions that draw
Axes = Any

_INCHES = (10.0, 4.2)
_DOTS_PER_INCH = 150
_INK, _FAINT = "#333333", "#6b6b6b"
# Okabe and Ito's palette, which people with any colour vision can tell apart; without yellow, too light for a line.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("-", "--")  # further lines repeat the colours with another dash
_OTHERS = "#cfcfcf"  # of lines beyond those that can be told apart
_MARKED_POINTS = 12
_LABEL_GAP = 0.065  # of the panel's height: one line of text
_NARROWEST = 0.1  # the least span of a panel, in shares
_STYLE = {
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlecolor": _FAINT,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.8,
    "xtick.color": "#999999",
    "ytick.color": "#999999",
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}


@dataclass(frozen=True)
class _Line:
    """One line of a panel: label, points and style."""

    label: str
    points: list[CurvePoint]
    colour: str
    dash: str = "-"
    width: float = 1.6
    band: bool = False
    named: bool = True


def draw_curves(runs: Sequence[StoredRun]) -> Figure:
    """The learning curves of runs, as a picture of two panels.

    The left panel shows the primary metric on clients' own test parts over rounds: of one experiment a line for each
    architecture and for the mean over clients; of several experiments a line for each. The right panel shows
    it over the megabytes sent until then. Seeds of an experiment are averaged, with a band around. Of more lines than
    can be told apart, those that end best are in colour, and the others grey, which the caption says.

    Args:
        runs: one or more.

    Returns:
        A matplotlib figure that belongs to no window and no global state.

    Raises:
        CheckpointError: the runs have several primary metrics.
    """
    from matplotlib.figure import Figure as NewFigure

    groups, metric = group(runs), metric_of(runs)
    with _style():
        figure = NewFigure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
        over_rounds, over_traffic = figure.subplots(1, 2, sharey=True)
        alone = len(groups) == 1
        left = _told_apart(_experiment_lines(groups[0]) if alone else _method_lines(groups), metric)
        right = _measure_lines(groups[0]) if alone else left
        _draw(over_rounds, left, lambda point: point.round, metric.percent)
        _draw(over_traffic, right, lambda point: point.megabytes, metric.percent)
        over_rounds.set_title(f"{'' if alone else 'mean over clients '}on {TITLES['personal']}, over rounds")
        over_traffic.set_title("mean over clients, over traffic" if alone else "the same, over traffic")
        _finish(over_rounds, over_traffic, metric)
        _label_ends(over_rounds, left)
        _label_ends(over_traffic, right if alone else [])  # the left panel already labels every line
        _caption(figure, groups, sum(not line.named for line in left))
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # otherwise it would move the panels a little at every drawing
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG; the same figure always gives the same bytes."""
    with _style():
        figure.savefig(path, format="png", dpi="figure", facecolor="white", metadata={"Software": None})


@contextmanager
def _style() -> Generator[None]:
    """Matplotlib's defaults and ours, whatever the user has configured; restored afterwards."""
    from matplotlib import style

    with style.context(["default", _STYLE]):
        yield


def _experiment_lines(members: Group) -> list[_Line]:
    """A line for each architecture, unless there is only one, and the mean over clients in black."""
    records = [record for run in members.runs if (record := last(run))]
    metric = members.runs[0].metric.name
    names = list(dict.fromkeys(name for record in records for name in record.by_architecture("personal", metric)))

    def of(name: str) -> Callable[[RoundRecord], float | None]:
        return lambda record: record.by_architecture("personal", metric).get(name)

    lines = [_Line(name, curve(members.runs, of(name)), _OTHERS) for name in names]
    return [*(lines if len(lines) > 1 else []), _mean_line("mean over clients", members)]


def _method_lines(groups: Sequence[Group]) -> list[_Line]:
    return [_Line(members.label, _curve(members, "personal"), _OTHERS, band=True) for members in groups]


def _measure_lines(members: Group) -> list[_Line]:
    """The curves of the clients' models and of the server's."""
    common, whole = _curve(members, "common"), _curve(members, "global")
    lines = [
        _mean_line(TITLES["personal"], members),
        _Line(TITLES["common"], common, _FAINT, "--"),
        _Line(f"{TITLES['global']},\n{TITLES['common']}", whole, _FAINT, ":"),
    ]
    return [line for line in lines if line.points]


def _mean_line(label: str, members: Group) -> _Line:
    return _Line(label, _curve(members, "personal"), "black", width=2.2, band=True)


def _curve(members: Group, measure: Measure) -> list[CurvePoint]:
    metric = members.runs[0].metric.name
    return curve(members.runs, lambda record: record.value(measure, metric))


def _told_apart(lines: Sequence[_Line], metric: Metric) -> list[_Line]:
    """The lines, each with a look of its own; if there are too many, the best, and behind them the others in grey."""
    plain = [line for line in lines if line.colour == _OTHERS]
    sign = 1 if metric.higher_is_better else -1

    def rank(line: _Line) -> float:
        return sign * line.points[-1].value.mean if line.points else -math.inf

    looks = [(colour, dash) for dash in _DASHES for colour in _COLOURS]
    best = {id(line) for line in sorted(plain, key=rank, reverse=True)[: len(looks)]}
    look = iter(looks)
    shown = [
        replace(line, colour=colour, dash=dash) for line in plain if id(line) in best for colour, dash in [next(look)]
    ]
    others = [replace(line, width=0.8, band=False, named=False) for line in plain if id(line) not in best]
    return [*others, *shown, *(line for line in lines if line.colour != _OTHERS)]


def _draw(axes: Axes, lines: Sequence[_Line], place: Callable[[CurvePoint], float], shares: bool) -> None:
    for line in lines:
        at = [place(point) for point in line.points]
        means = [point.value.mean for point in line.points]
        marker = "o" if line.named and len(at) <= _MARKED_POINTS else None
        axes.plot(at, means, color=line.colour, linestyle=line.dash, linewidth=line.width, marker=marker)
        if line.band:
            spreads = [point.value.std or 0.0 for point in line.points]
            least, most = (0.0, 1.0) if shares else (-math.inf, math.inf)
            low = [max(least, mean - std) for mean, std in zip(means, spreads, strict=True)]
            high = [min(most, mean + std) for mean, std in zip(means, spreads, strict=True)]
            axes.fill_between(at, low, high, color=line.colour, alpha=0.15, linewidth=0)


def _finish(over_rounds: Axes, over_traffic: Axes, metric: Metric) -> None:
    """Label the axes; rounds and megabytes start at 0 and end with the data."""
    from matplotlib.ticker import MaxNLocator

    label = metric.label if metric == ACCURACY else f"{metric.label} ({metric.direction})"
    over_rounds.set(xlabel="round", ylabel=label)
    over_traffic.set(xlabel="megabytes sent, down and up, all clients")
    over_rounds.xaxis.set_major_locator(MaxNLocator(integer=True))
    if metric.percent:
        over_rounds.yaxis.set_major_formatter(_percent)
        over_rounds.set_ylim(_share_limits(*over_rounds.get_ylim()))
    for axes in (over_rounds, over_traffic):
        ends = [max(line.get_xdata(), default=0) for line in axes.lines]
        axes.set_xlim(0, max(ends, default=0) * 1.03 or 1)
    if not any(len(line.get_xdata()) for line in over_rounds.lines):
        over_rounds.set_ylim(0, 1)
        over_rounds.text(0.5, 0.5, f"no test {metric.label} recorded", transform=over_rounds.transAxes, ha="center")


def _percent(share: float, _: int) -> str:
    """A tick's text, with the decimals that it needs."""
    return f"{round(100 * share, 2):g}%"


def _share_limits(bottom: float, top: float) -> tuple[float, float]:
    """Limits around the data, wide enough that a small difference looks small, and within 0 to 1 for shares."""
    lacking = max(0.0, _NARROWEST - (top - bottom)) / 2
    return max(0.0, bottom - lacking), min(1.02, top + lacking)


def _label_ends(axes: Axes, lines: Sequence[_Line]) -> None:
    """Write each line's label right of the panel, as high as the line ends, pushed apart where two would touch."""
    bottom, top = axes.get_ylim()
    ends = sorted((line for line in lines if line.points and line.named), key=lambda line: line.points[-1].value.mean)
    heights = _apart([(line.points[-1].value.mean - bottom) / (top - bottom) for line in ends])
    for line, height in zip(ends, heights, strict=True):
        weight = "bold" if line.colour == "black" else "normal"
        dashed = "- - " if line.dash == _DASHES[1] and line.colour in _COLOURS else ""
        axes.text(
            1.015,
            height,
            dashed + line.label,
            transform=axes.transAxes,
            va="center",
            color=line.colour,
            fontweight=weight,
        )


def _apart(heights: Sequence[float]) -> list[float]:
    """Ascending heights moved as little as can be until none is closer to the next than a line of text."""
    blocks: list[list[float]] = []  # labels that touch move together, by the mean of what each would move alone
    for index, height in enumerate(heights):
        blocks.append([height - index * _LABEL_GAP])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            touching = blocks.pop()
            blocks[-1] += touching
    moved = [fmean(block) for block in blocks for _ in block]
    return [place + index * _LABEL_GAP for index, place in enumerate(moved)]


def _caption(figure: Figure, groups: Sequence[Group], grey: int) -> None:
    """The heading above the panels, and below them how lines were averaged."""
    clients = enumerated(sorted({members.runs[0].client_count for members in groups}))
    title = f"{heading(groups)}, {clients} clients: {groups[0].runs[0].metric.label} of the clients' models"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    more = f" Grey: {grey} more, which end worse or were not measured." if grey else ""
    figure.supxlabel(_averaging(groups) + more, x=0.01, ha="left", fontsize=8, color=_FAINT)


def _averaging(groups: Sequence[Group]) -> str:
    counts = sorted({len(members.runs) for members in groups})
    if counts == [1]:
        seeds = sorted({members.seeds[0] for members in groups})
        over = f"Seed{'s' if len(seeds) > 1 else ''} {enumerated(seeds)}."
    else:
        over = f"Lines: mean over {enumerated(counts)} seeds; bands: ± one standard deviation over seeds."
    return f"{over} Megabytes are 10⁶ bytes of training messages."
