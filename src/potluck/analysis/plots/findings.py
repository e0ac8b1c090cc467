"""Figures of an analysis, as wide as a column of a paper."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from potluck.analysis.costs import COSTS, over_cost
from potluck.analysis.findings import Findings
from potluck.analysis.gains import Gain
from potluck.analysis.groups import group
from potluck.analysis.inside import EVERYBODY, Calibrated, Inside, Similarity, by_experiment
from potluck.analysis.plots.curves import COLOURS, Axes, Figure, style
from potluck.analysis.plots.over_rounds import draw_over_rounds
from potluck.analysis.plots.panels import MOST, few, look_of, panel_of_lines, panels_of

_LONG = 3  # letters of a name that stands on end
_APART = 0.12  # experiments beside one another


def draw_findings(findings: Findings) -> dict[str, Figure]:
    """A figure for each thing that was found, by its name."""
    drawn: dict[str, Figure | None] = {
        "gains": _gains(findings),
        **{f"gains-by-class-{number}": _by_class(findings, gain) for number, gain in enumerate(findings.gains, 1)},
        "groups": _groups(findings),
        "costs": _costs(findings),
        "similarity": _similarity(findings.inside),
        **_heatmaps(findings.inside, "heatmaps", lambda row: row.unbiased_cka, "CKA, unbiased"),
        **_heatmaps(findings.inside, "correlations", lambda row: row.cca, "CCA, mean"),
        **{f"map-{number}": _maps(findings, *one) for number, one in enumerate(by_experiment(findings.inside), 1)},
        "calibration": _reliability(findings.inside),
        "drift": _drift(findings.inside),
        **draw_over_rounds(findings.inside),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _gains(findings: Findings) -> Figure | None:
    """The clients of each experiment by their gain, with its interval over seeds."""
    shown = findings.gains[:MOST]
    if not shown:
        return None
    scale = 100.0 if findings.metric.percent else 1.0
    with style():
        figure, panels = panels_of(2.6, len(shown), share=True)
        for axes, gain in zip(panels, shown, strict=True):
            _gain_of_clients(axes, gain, scale)
        unit = "points" if findings.metric.percent else findings.metric.label
        panels[0].set_ylabel(f"gain over {shown[0].against} ({unit})")
    return figure


def _gain_of_clients(axes: Axes, gain: Gain, scale: float) -> None:
    ranked = sorted(gain.clients, key=lambda one: one.gain.mean)
    for place, one in enumerate(ranked):
        colour = COLOURS[0] if one.gain.mean >= 0 else COLOURS[1]
        half = None if one.gain.half is None else scale * one.gain.half
        axes.errorbar(place, scale * one.gain.mean, yerr=half, fmt="o", color=colour, markersize=3, linewidth=0.9)
    axes.axhline(0, color="#333333", linewidth=0.8)
    axes.axhline(scale * gain.over_seeds.mean, color=COLOURS[0], linewidth=0.9, linestyle="--")
    axes.set(title=gain.experiment, xlabel="client, by gain", xticks=few(range(len(ranked))))
    _name_ticks(axes, [ranked[place].name for place in few(range(len(ranked)))])


def _name_ticks(axes: Axes, names: Sequence[str], *, up: bool = False) -> None:
    """Names of clients at an axis, without what all numbers share; long ones on end."""
    short = [name.removeprefix("client ") for name in names]
    if up:
        axes.set_yticklabels(short)
    else:
        axes.set_xticklabels(short, rotation=90 if max(map(len, short), default=0) > _LONG else 0)


def _by_class(findings: Findings, gain: Gain) -> Figure | None:
    """What each client gains in each of its classes."""
    rows = [row for row in findings.classes if row.experiment == gain.experiment]
    if not rows:
        return None
    clients, labels = list(dict.fromkeys(row.name for row in rows)), sorted({row.label for row in rows})
    cells = {(row.name, row.label): 100 * row.gain.mean for row in rows}
    values = [[cells.get((name, label), np.nan) for label in labels] for name in clients]
    most = max(abs(100 * row.gain.mean) for row in findings.classes) or 1.0  # so that experiments are compared
    with style():
        figure, (axes,) = panels_of(3.0)
        image = axes.imshow(values, vmin=-most, vmax=most, cmap="RdBu", aspect="auto")
        across, down = few(range(len(labels))), few(range(len(clients)))
        axes.set(title=gain.experiment, xlabel="class", ylabel="client", xticks=across, yticks=down)
        _name_ticks(axes, [findings.class_name(labels[place]).removeprefix("class ") for place in across])
        _name_ticks(axes, [clients[place] for place in down], up=True)
        axes.grid(False)
        figure.colorbar(image, ax=axes, label=f"gain over {gain.against} (points)")
    return figure


def _groups(findings: Findings) -> Figure | None:
    """What groups of test examples gain, an experiment beside another."""
    experiments = list(dict.fromkeys(row.experiment for row in findings.groups))[:MOST]
    names = list(dict.fromkeys(row.group for row in findings.groups))
    if not experiments:
        return None
    with style():
        figure, (axes,) = panels_of(2.6)
        for place, experiment in enumerate(experiments):
            rows = [row for row in findings.groups if row.experiment == experiment]
            at = [names.index(row.group) + (place - (len(experiments) - 1) / 2) * _APART for row in rows]
            halves = [100 * (row.gain.half or 0.0) for row in rows]
            means = [100 * row.gain.mean for row in rows]
            axes.errorbar(at, means, yerr=halves, fmt="o", color=COLOURS[place], markersize=3, label=experiment)
        axes.axhline(0, color="#333333", linewidth=0.8)
        axes.set(xticks=range(len(names)), ylabel="gain over training alone (points)")
        _name_ticks(axes, names)
        axes.legend(fontsize=6, frameon=False)
    return figure


def _costs(findings: Findings) -> Figure | None:
    """The metric over what it costs, a panel for each currency, a line for each experiment."""
    groups, of = group(findings.runs), findings.measure
    curves = {
        cost.label: {members.label: points for members in groups if (points := over_cost(members, cost, of))}
        for cost in COSTS
    }
    shown = {label: lines for label, lines in curves.items() if lines}
    if not shown:
        return None
    scale = 100.0 if findings.metric.percent else 1.0
    with style():
        figure, panels = panels_of(2.6, len(shown), share=True)
        for axes, (label, lines) in zip(panels, shown.items(), strict=True):
            for place, (name, points) in enumerate(lines.items()):
                spent, values = zip(*points, strict=True)
                axes.plot(spent, scale * np.array(values), label=name, **look_of(place))
            axes.set(xlabel=label, xlim=(0, None))
        panels[0].set_ylabel(f"{findings.metric.label}{' (%)' if findings.metric.percent else ''}")
        if len(groups) > 1:
            panels[0].legend(fontsize=6, frameon=False)
    return figure


def _similarity(inside: Sequence[Inside]) -> Figure | None:
    """CKA between clients by stage, a line for each experiment, mean over its runs."""

    def drawn(axes: Axes, runs: Sequence[Inside], look: dict[str, Any]) -> None:
        found: dict[int, list[float]] = {}
        for one in runs:
            for stage, (_, unbiased) in one.between_clients().items():
                found.setdefault(stage, []).append(unbiased)
        axes.plot(list(found), [np.mean(values) for values in found.values()], **look)

    known = [one for one in inside if one.between_clients()]
    figure = panel_of_lines(known, drawn)
    if figure:
        figure.axes[0].set_xticks(sorted({stage for one in known for stage in one.between_clients()}))
        figure.axes[0].set(xlabel="stage, from 0", ylabel="CKA between clients, unbiased", ylim=(-0.05, 1.05))
    return figure


def _heatmaps(
    inside: Sequence[Inside], name: str, value: Callable[[Similarity], float | None], scale: str
) -> dict[str, Figure | None]:
    """A figure for each experiment, of one measure of similarity."""
    return {
        f"{name}-{number}": _heatmaps_of(label, runs, value, scale)
        for number, (label, runs) in enumerate(by_experiment(inside), 1)
    }


def _heatmaps_of(
    label: str, runs: Sequence[Inside], value: Callable[[Similarity], float | None], scale: str
) -> Figure | None:
    """Each client with each at each stage, and stage with stage over all pairs of clients; mean over these runs."""
    clients: dict[tuple[int, int, int], list[float]] = {}
    stages: dict[tuple[int, int], list[float]] = {}
    for row in (row for one in runs for row in one.similarity if row.client != row.other_client):
        if (alike := value(row)) is None:
            continue
        one, other = (row.client, row.stage), (row.other_client, row.other_stage)
        for (of, at), (of_other, at_other) in ((one, other), (other, one)):
            stages.setdefault((at, at_other), []).append(alike)
            if at == at_other:
                clients.setdefault((at, of, of_other), []).append(alike)
    if not clients:
        return None
    last = sorted({at for at, *_ in clients})[1 - MOST :]
    called = runs[0].client_name if len({one.client_names for one in runs}) == 1 else str
    with style():
        figure, panels = panels_of(3.0, 1 + len(last))
        for axes, stage in zip(panels, last, strict=False):
            pairs = {(of, other): values for (at, of, other), values in clients.items() if at == stage}
            whole = {**pairs, **{(of, of): [1.0] for of, _ in pairs}}
            _heatmap(axes, whole, f"stage {stage}, client by client", called)
        image = _heatmap(panels[-1], stages, "stage by stage")
        figure.colorbar(image, ax=panels[-1], label=scale)
        figure.suptitle(label, fontsize=9, x=0.01, ha="left")
    return figure


def _heatmap(
    axes: Axes,
    values: Mapping[tuple[int, int], Sequence[float]],
    title: str,
    called: Callable[[int], str] = str,
) -> Any:
    """The means of values by row and column, each with the name that it is called."""
    names = sorted({name for name, _ in values})
    matrix = [[np.mean(values.get((row, column), [np.nan])) for column in names] for row in names]
    image = axes.imshow(matrix, vmin=0, vmax=1, cmap="viridis")
    places = few(range(len(names)))
    labels = [called(names[place]) for place in places]
    axes.set(title=title, xticks=places, yticks=places)
    _name_ticks(axes, labels)
    _name_ticks(axes, labels, up=True)
    axes.grid(False)
    return image


def _maps(findings: Findings, label: str, runs: Sequence[Inside]) -> Figure | None:
    """Features of the first of these runs, by principal components and by t-SNE, coloured by client and by class."""
    run = next((one for one in runs if one.map and one.map.points), None)
    found = run and run.map
    if run is None or found is None:
        return None
    points = np.array([(one.pca_x, one.pca_y, one.tsne_x, one.tsne_y) for one in found.points])
    kinds = {"client": [one.client for one in found.points], "class": [one.label for one in found.points]}
    shown = {name: owners for name, owners in kinds.items() if None not in owners and len(set(owners)) > 1}
    called = {"client": run.client_name, "class": findings.class_name}
    with style():
        figure, panels = panels_of(3.0, 2 * len(shown))
        left = iter(panels)
        for name, owners in shown.items():
            for title, at in (("PCA", slice(2)), ("t-SNE", slice(2, 4))):
                _map(next(left), points[:, at], owners, f"{title}, by {name}", called[name])
        figure.suptitle(label, fontsize=9, x=0.01, ha="left")
    return figure


def _map(axes: Axes, points: Any, owners: Sequence[Any], title: str, called: Callable[[int], str]) -> None:
    from matplotlib import colormaps

    names = list(dict.fromkeys(owners))
    colours = colormaps["tab10" if len(names) <= 10 else "tab20"]
    for place, name in enumerate(sorted(names)):
        mine = points[[owner == name for owner in owners]]
        label = called(name).removeprefix("client ").removeprefix("class ")
        axes.scatter(mine[:, 0], mine[:, 1], s=4, color=colours(place % colours.N), label=label, linewidths=0)
    axes.set(title=title, xticks=[], yticks=[])
    axes.legend(fontsize=6, frameon=False, ncols=2, markerscale=2, handletextpad=0.1, columnspacing=0.5)


def _reliability(inside: Sequence[Inside]) -> Figure | None:
    """How often predictions of a confidence are right, all clients and all runs of an experiment together."""

    def drawn(axes: Axes, runs: Sequence[Inside], look: dict[str, Any]) -> None:
        values = [one.values for run in runs for one in _everybody(run)]
        counts, hits, sure = (np.sum([getattr(one, name) for one in values], axis=0) for name in _BINNED)
        has = counts > 0
        axes.plot(sure[has] / counts[has], hits[has] / counts[has], **look)

    figure = panel_of_lines([one for one in inside if _everybody(one)], drawn)
    if figure:
        axes = figure.axes[0]
        axes.plot([0, 1], [0, 1], color="#6b6b6b", linewidth=0.8, linestyle=":")
        axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    return figure


_BINNED = ("counts", "hits", "sure")


def _everybody(one: Inside) -> list[Calibrated]:
    return [found for found in one.calibration if found.whose == EVERYBODY]


def _drift(inside: Sequence[Inside]) -> Figure | None:
    """Distance of clients' weights to their mean, by layer, a line for each experiment, mean over its runs."""
    known = [one for one in inside if one.drift]
    layers = list(dict.fromkeys(row.layer for one in known for row in one.drift))

    def drawn(axes: Axes, runs: Sequence[Inside], look: dict[str, Any]) -> None:
        found = {name: [row.mean for one in runs for row in one.drift if row.layer == name] for name in layers}
        places = [place for place, name in enumerate(layers) if found[name]]
        axes.plot(places, [np.mean(found[layers[place]]) for place in places], **look)

    figure = panel_of_lines(known, drawn)
    if figure:
        places = few(range(len(layers)))
        axes = figure.axes[0]
        axes.set(ylabel="distance to mean", xticks=places, ylim=(0, None))
        axes.set_xticklabels([layers[place] for place in places], rotation=90, fontsize=6)
    return figure
