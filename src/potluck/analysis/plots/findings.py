"""Figures of an analysis, as wide as a column of a paper."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from potluck.analysis.findings import Findings
from potluck.analysis.gains import Gain
from potluck.analysis.inside import EVERYBODY, Calibrated, Inside
from potluck.analysis.plots.curves import COLOURS, Axes, Figure, style
from potluck.analysis.plots.over_rounds import draw_over_rounds
from potluck.analysis.plots.panels import MOST, by_experiment, few, lines_of, panels_of


def draw_findings(findings: Findings) -> dict[str, Figure]:
    """A figure for each thing that was found, by its name."""
    drawn: dict[str, Figure | None] = {
        "gains": _gains(findings),
        "similarity": _similarity(findings.inside),
        **{f"heatmaps-{number}": _heatmaps(*one) for number, one in enumerate(by_experiment(findings.inside), 1)},
        **{f"map-{number}": _maps(*one) for number, one in enumerate(by_experiment(findings.inside), 1)},
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
    axes.set_xticklabels([str(ranked[place].client) for place in few(range(len(ranked)))])


def _similarity(inside: Sequence[Inside]) -> Figure | None:
    """CKA between clients by stage, a line for each experiment, mean over its runs."""

    def drawn(axes: Axes, runs: Sequence[Inside], look: dict[str, Any]) -> None:
        found: dict[int, list[float]] = {}
        for one in runs:
            for stage, (_, unbiased) in one.between_clients().items():
                found.setdefault(stage, []).append(unbiased)
        axes.plot(list(found), [np.mean(values) for values in found.values()], **look)

    known = [one for one in inside if one.between_clients()]
    figure = lines_of(known, drawn)
    if figure:
        figure.axes[0].set_xticks(sorted({stage for one in known for stage in one.between_clients()}))
        figure.axes[0].set(xlabel="stage, from 0", ylabel="CKA between clients, unbiased", ylim=(-0.05, 1.05))
    return figure


def _heatmaps(label: str, runs: Sequence[Inside]) -> Figure | None:
    """CKA of each client with each at each stage, and of stage with stage over all pairs; mean over these runs."""
    clients: dict[tuple[int, int, int], list[float]] = {}
    stages: dict[tuple[int, int], list[float]] = {}
    for row in (row for one in runs for row in one.similarity if row.client != row.other_client):
        one, other = (row.client, row.stage), (row.other_client, row.other_stage)
        for (of, at), (of_other, at_other) in ((one, other), (other, one)):
            stages.setdefault((at, at_other), []).append(row.unbiased_cka)
            if at == at_other:
                clients.setdefault((at, of, of_other), []).append(row.unbiased_cka)
    if not clients:
        return None
    last = sorted({at for at, *_ in clients})[1 - MOST :]
    with style():
        figure, panels = panels_of(3.0, 1 + len(last))
        for axes, stage in zip(panels, last, strict=False):
            pairs = {(of, other): values for (at, of, other), values in clients.items() if at == stage}
            _heatmap(axes, {**pairs, **{(of, of): [1.0] for of, _ in pairs}}, f"stage {stage}, client by client")
        image = _heatmap(panels[-1], stages, "stage by stage")
        figure.colorbar(image, ax=panels[-1], label="CKA, unbiased")
        figure.suptitle(label, fontsize=9, x=0.01, ha="left")
    return figure


def _heatmap(axes: Axes, values: Mapping[tuple[int, int], Sequence[float]], title: str) -> Any:
    """The means of values by row and column."""
    names = sorted({name for name, _ in values})
    matrix = [[np.mean(values.get((row, column), [np.nan])) for column in names] for row in names]
    image = axes.imshow(matrix, vmin=0, vmax=1, cmap="viridis")
    places = few(range(len(names)))
    labels = [str(names[place]) for place in places]
    axes.set(title=title, xticks=places, yticks=places, xticklabels=labels, yticklabels=labels)
    axes.grid(False)
    return image


def _maps(label: str, runs: Sequence[Inside]) -> Figure | None:
    """Features of the first of these runs, by principal components and by t-SNE, coloured by client and by class."""
    found = next((one.map for one in runs if one.map), None)
    if found is None:
        return None
    points = np.array([(one.pca_x, one.pca_y, one.tsne_x, one.tsne_y) for one in found.points])
    kinds = {"client": [one.client for one in found.points], "class": [one.label for one in found.points]}
    shown = {name: owners for name, owners in kinds.items() if None not in owners}
    with style():
        figure, panels = panels_of(3.0, 2 * len(shown))
        left = iter(panels)
        for name, owners in shown.items():
            for title, at in (("PCA", slice(2)), ("t-SNE", slice(2, 4))):
                _map(next(left), points[:, at], owners, f"{title}, by {name}")
        figure.suptitle(label, fontsize=9, x=0.01, ha="left")
    return figure


def _map(axes: Axes, points: Any, owners: Sequence[int | None], title: str) -> None:
    from matplotlib import colormaps

    names = list(dict.fromkeys(owners))
    colours = colormaps["tab10" if len(names) <= 10 else "tab20"]
    for place, name in enumerate(sorted(names, key=lambda name: name or 0)):
        mine = points[[owner == name for owner in owners]]
        axes.scatter(mine[:, 0], mine[:, 1], s=4, color=colours(place % colours.N), label=str(name), linewidths=0)
    axes.set(title=title, xticks=[], yticks=[])
    axes.legend(fontsize=6, frameon=False, ncols=2, markerscale=2, handletextpad=0.1, columnspacing=0.5)


def _reliability(inside: Sequence[Inside]) -> Figure | None:
    """How often predictions of a confidence are right, all clients and all runs of an experiment together."""

    def drawn(axes: Axes, runs: Sequence[Inside], look: dict[str, Any]) -> None:
        values = [one.values for run in runs for one in _everybody(run)]
        counts, hits, sure = (np.sum([getattr(one, name) for one in values], axis=0) for name in _BINNED)
        has = counts > 0
        axes.plot(sure[has] / counts[has], hits[has] / counts[has], **look)

    figure = lines_of([one for one in inside if _everybody(one)], drawn)
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

    figure = lines_of(known, drawn)
    if figure:
        places = few(range(len(layers)))
        axes = figure.axes[0]
        axes.set(ylabel="distance to mean", xticks=places, ylim=(0, None))
        axes.set_xticklabels([layers[place] for place in places], rotation=90, fontsize=6)
    return figure
