"""Learning curves: the primary metric over rounds, and over the megabytes that they cost."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from potluck.analysis.groups import Group, enumerated, group, heading
from potluck.analysis.plots.drawn import AS_MEASURED, Drawn
from potluck.analysis.read import StoredRun, last
from potluck.analysis.tables import CurvePoint, curve, metric_of
from potluck.records import ACCURACY, MAIN_MEASURES, TITLES, TITLES_OF_A_CLIENT, Measure, Metric, RoundRecord

Figure = Any  # matplotlib's, which is imported only inside the functions that draw
Axes = Any

_INCHES = (10.0, 4.2)
_DOTS_PER_INCH = 150
_INK, _FAINT = "#333333", "#6b6b6b"
# Okabe and Ito's palette, which people with any colour vision can tell apart; without yellow, too light for a line.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("-", "--")  # further lines repeat the colours with another dash
_OTHERS = "#cfcfcf"  # of lines beyond those that can be told apart
_OTHER_DASHES = ("--", ":")  # of the measures beside the one that is shown
_TARGET = "#b3261e"
_PALE = 0.35
_MARKED_POINTS = 12
_LETTERS_A_LINE = 138  # of the caption
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
    """One line of a panel: label, points and style; if the points are smoothed, `measured` are those before."""

    label: str
    points: list[CurvePoint]
    colour: str
    measured: Sequence[CurvePoint] = ()
    dash: str = "-"
    width: float = 1.6
    band: bool = False
    named: bool = True


def draw_curves(runs: Sequence[StoredRun], how: Drawn = AS_MEASURED) -> Figure:
    """The learning curves of runs, as a picture of two panels.

    The left panel shows one measure of the primary metric over rounds: of one experiment a line for each
    architecture and for the mean over clients; of several experiments a line for each. The right panel shows
    it over the megabytes sent until then. Seeds of an experiment are averaged, with a band around. Of more lines than
    can be told apart, those that end best are in colour, and the others grey, which the caption says.

    Args:
        runs: one or more.
        how: which measure, how much smoothed, over pale lines as measured, and whether a target is shown.

    Returns:
        A matplotlib figure that belongs to no window and no global state.

    Raises:
        CheckpointError: the runs have several primary metrics.
    """
    from matplotlib.figure import Figure as NewFigure

    groups, metric, measure, smooth = group(runs), metric_of(runs), how.measure, how.smooth
    with style():
        figure = NewFigure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
        over_rounds, over_traffic = figure.subplots(1, 2, sharey=True)
        alone = len(groups) == 1
        lines = _experiment_lines(groups[0], measure, smooth) if alone else _method_lines(groups, measure, smooth)
        left = _told_apart(lines, metric)
        right = _measure_lines(groups[0], measure, smooth) if alone else left
        _draw(over_rounds, left, lambda point: point.round, metric.percent)
        _draw(over_traffic, right, lambda point: point.megabytes, metric.percent)
        over_rounds.set_title(f"{_measured(measure, of_lines=alone)}, over rounds")
        over_traffic.set_title(f"{_mean_name(measure)}, over traffic" if alone else "the same, over traffic")
        _finish(over_rounds, over_traffic, metric, how.target)
        _label_ends(over_rounds, left)
        _label_ends(over_traffic, right if alone else [])  # the left panel already labels every line
        _caption(figure, groups, how, sum(not line.named for line in left))
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # otherwise it would move the panels a little at every drawing
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG; the same figure always gives the same bytes."""
    with style():
        figure.savefig(path, format="png", dpi="figure", facecolor="white", metadata={"Software": None})


@contextmanager
def style() -> Generator[None]:
    """Matplotlib's defaults and ours, whatever the user has configured; restored afterwards."""
    from matplotlib import style as styles

    with styles.context(["default", _STYLE]):
        yield


def _measured(measure: Measure, *, of_lines: bool) -> str:
    """What a panel shows: on what, of whom. Lines of architectures and of clients say themselves of whom."""
    if measure not in TITLES_OF_A_CLIENT:
        return TITLES[measure]
    return f"{'' if of_lines else 'mean over clients '}on {TITLES[measure]}"


def _mean_name(measure: Measure) -> str:
    return "mean over clients" if measure in TITLES_OF_A_CLIENT else TITLES[measure]


def _experiment_lines(members: Group, measure: Measure, smooth: int) -> list[_Line]:
    """A line for each architecture, unless there is only one, and the mean over clients in black."""
    records = [record for run in members.runs if (record := last(run))]
    metric = members.runs[0].metric.name
    names = list(dict.fromkeys(name for record in records for name in record.by_architecture(measure, metric)))

    def of(name: str) -> Callable[[RoundRecord], float | None]:
        return lambda record: record.by_architecture(measure, metric).get(name)

    lines = [_of(name, members, of(name), smooth, colour=_OTHERS) for name in names]
    return [*(lines if len(lines) > 1 else []), _mean_line(_mean_name(measure), members, measure, smooth)]


def _method_lines(groups: Sequence[Group], measure: Measure, smooth: int) -> list[_Line]:
    return [_line(members.label, members, measure, smooth, colour=_OTHERS, band=True) for members in groups]


def _measure_lines(members: Group, measure: Measure, smooth: int) -> list[_Line]:
    """The curves of the measure that is shown, and of the other main ones: of the clients' models and the server's."""
    names: dict[Measure, str] = {**TITLES, "global": f"{TITLES['global']},\n{TITLES['common']}"}
    others: list[Measure] = [other for other in MAIN_MEASURES if other != measure]
    lines = [
        _mean_line(names[measure], members, measure, smooth),
        *(
            _line(names[other], members, other, smooth, colour=_FAINT, dash=dash)
            for other, dash in zip(others, _OTHER_DASHES, strict=False)
        ),
    ]
    return [line for line in lines if line.points]


def _mean_line(label: str, members: Group, measure: Measure, smooth: int) -> _Line:
    return _line(label, members, measure, smooth, colour="black", width=2.2, band=True)


def _line(label: str, members: Group, measure: Measure, smooth: int, **look: Any) -> _Line:
    metric = members.runs[0].metric.name
    return _of(label, members, lambda record: record.value(measure, metric), smooth, **look)


def _of(label: str, members: Group, value: Callable[[RoundRecord], float | None], smooth: int, **look: Any) -> _Line:
    """The line of a value, and what was measured if that is smoothed."""
    measured = curve(members.runs, value) if smooth > 1 else ()
    return _Line(label, curve(members.runs, value, smooth), measured=measured, **look)


def _told_apart(lines: Sequence[_Line], metric: Metric) -> list[_Line]:
    """The lines, each with a look of its own; if there are too many, the best, and behind them the others in grey."""
    plain = [line for line in lines if line.colour == _OTHERS]
    sign = 1 if metric.higher_is_better else -1

    def rank(line: _Line) -> float:
        points = line.measured or line.points
        return sign * points[-1].value.mean if points else -math.inf

    looks = [(colour, dash) for dash in _DASHES for colour in COLOURS]
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
        if line.measured and line.named:
            before = [point.value.mean for point in line.measured]
            axes.plot(at, before, color=line.colour, linestyle=line.dash, linewidth=0.8, alpha=_PALE)
        axes.plot(at, means, color=line.colour, linestyle=line.dash, linewidth=line.width, marker=marker)
        if line.band:
            spreads = [point.value.std or 0.0 for point in line.points]
            least, most = (0.0, 1.0) if shares else (-math.inf, math.inf)
            low = [max(least, mean - std) for mean, std in zip(means, spreads, strict=True)]
            high = [min(most, mean + std) for mean, std in zip(means, spreads, strict=True)]
            axes.fill_between(at, low, high, color=line.colour, alpha=0.15, linewidth=0)


def _finish(over_rounds: Axes, over_traffic: Axes, metric: Metric, target: float | None) -> None:
    """Label the axes, and draw the line of a target; rounds and megabytes start at 0 and end with the data."""
    from matplotlib.ticker import MaxNLocator

    label = metric.label if metric == ACCURACY else f"{metric.label} ({metric.direction})"
    over_rounds.set(xlabel="round", ylabel=label)
    over_traffic.set(xlabel="megabytes sent, down and up, all clients")
    over_rounds.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (over_rounds, over_traffic):
        ends = [max(line.get_xdata(), default=0) for line in axes.lines]
        axes.set_xlim(0, max(ends, default=0) * 1.03 or 1)
    empty = not any(len(line.get_xdata()) for line in over_rounds.lines)
    if target is not None:
        for axes in (over_rounds, over_traffic):
            axes.axhline(target, color=_TARGET, linestyle=":", linewidth=1.4)
    if metric.percent:
        over_rounds.yaxis.set_major_formatter(_percent)
        over_rounds.set_ylim(_share_limits(*over_rounds.get_ylim()))
    if empty:
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
        dashed = "- - " if line.dash == _DASHES[1] and line.colour in COLOURS else ""
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


def _caption(figure: Figure, groups: Sequence[Group], how: Drawn, grey: int) -> None:
    """The heading above the panels, and below them how lines were averaged and are drawn."""
    clients = enumerated(sorted({members.runs[0].client_count for members in groups}))
    whose, metric = TITLES["global"] if how.measure == "global" else "clients' models", groups[0].runs[0].metric
    title = f"{heading(groups)}, {clients} clients: {metric.label} of the {whose}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    words = " ".join([_averaging(groups), *_looks(how, metric, grey)])
    figure.supxlabel(fill(words, _LETTERS_A_LINE), x=0.01, ha="left", fontsize=8, color=_FAINT)


def _looks(how: Drawn, metric: Metric, grey: int) -> Generator[str]:
    """What the caption says of the lines that look unlike others."""
    if grey:
        yield f"Grey: {grey} more, which end worse or were not measured."
    if how.smooth > 1:
        yield f"Smoothed: mean of the latest {how.smooth} values; pale: as measured."
    if how.target is not None:
        yield f"Red, dotted: the target, {metric.text(how.target)}, {TITLES[how.measure]}."


def _averaging(groups: Sequence[Group]) -> str:
    counts = sorted({len(members.runs) for members in groups})
    if counts == [1]:
        seeds = sorted({members.seeds[0] for members in groups})
        over = f"Seed{'s' if len(seeds) > 1 else ''} {enumerated(seeds)}."
    else:
        over = f"Lines: mean over {enumerated(counts)} seeds; bands: ± one standard deviation over seeds."
    return f"{over} Megabytes are 10⁶ bytes of training messages."
