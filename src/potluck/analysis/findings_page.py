"""An analysis as one page of HTML, and its tables and figures as files."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from markupsafe import Markup

from potluck.analysis.compare import Interval
from potluck.analysis.export import TextTable, caption, latex, table_of, target_table_of
from potluck.analysis.findings import Findings, as_csv, points
from potluck.analysis.groups import group, heading
from potluck.analysis.pivot import pivot_of
from potluck.analysis.plots.findings import draw_findings
from potluck.analysis.plots.panels import save_figure
from potluck.analysis.rendering import NOTHING, score, svg_address, template
from potluck.records import TITLES, TITLES_OF_A_CLIENT

PAGE, FILES = "analysis.html", "analysis"
_SHOWN = 40  # rows of a table that are not folded


@dataclass(frozen=True)
class Shown:
    """A table or figures of the page.

    Attributes:
        title: what it shows.
        table: its cells; None for figures.
        figures: by name, as addresses that hold them.
        words: how to read it.
    """

    title: str
    table: TextTable | None = None
    figures: tuple[tuple[str, str], ...] = ()
    words: str = ""

    @property
    def folded(self) -> bool:
        """Whether it is shown only when asked for."""
        return self.table is not None and len(self.table.rows) > _SHOWN


def write_findings(findings: Findings, to: Path) -> Path:
    """Write `analysis.html` into a folder, and all tables and figures into its `analysis/`.

    The same findings always give the same bytes.

    Returns:
        The path of the page.
    """
    place = to / FILES
    place.mkdir(parents=True, exist_ok=True)
    for name, rows in findings.tables.items():
        (place / f"{name}.csv").write_text(as_csv(rows), encoding="utf-8")
    for name, table in _for_papers(findings).items():
        (place / f"{name}.tex").write_text(latex(table), encoding="utf-8")
    figures = draw_findings(findings)
    for name, figure in figures.items():
        save_figure(figure, place, name)
    drawn = {name: svg_address((place / f"{name}.svg").read_bytes()) for name in figures}
    (to / PAGE).write_text(_page(findings, drawn), encoding="utf-8")
    return to / PAGE


def _for_papers(findings: Findings) -> dict[str, TextTable]:
    """The tables that are written as LaTeX."""
    found = {"gains": _gains(findings), "fairness": _fairness(findings), "costs": _costs(findings)}
    found["pivot"] = _pivot(findings)
    return {name: table for name, table in found.items() if table.rows}


def _page(findings: Findings, drawn: dict[str, str]) -> str:
    groups = group(findings.runs)
    style = files("potluck.analysis").joinpath("templates", "page.css").read_text(encoding="utf-8")
    return template("analysis.html.j2", findings.metric).render(
        style=Markup(style),
        title=heading(groups),
        metric=findings.metric,
        sentences=findings.sentences,
        remarks=findings.remarks,
        parts={name: [one for one in shown if _has(one)] for name, shown in _parts(findings, drawn).items()},
        measure=TITLES_OF_A_CLIENT[findings.measure],
        runs=[(one.name, one.round) for one in findings.inside],
        tables=[f"{name}.csv" for name in findings.tables],
        papers=[f"{name}.tex" for name in _for_papers(findings)],
        figures=[f"{name}.svg" for name in drawn],
        files=FILES,
    )


def _has(one: Shown) -> bool:
    return bool(one.figures) or bool(one.table and one.table.rows)


def _parts(findings: Findings, drawn: dict[str, str]) -> dict[str, list[Shown]]:
    """Tables and figures by the heading under which they stand."""

    def figures(title: str, words: str, *names: str) -> Shown:
        return Shown(title, figures=tuple((name, drawn[name]) for name in names if name in drawn), words=words)

    heatmaps, maps = ([name for name in drawn if name.startswith(kind)] for kind in ("heatmaps-", "map-"))
    return {
        "Who profits, who loses": [
            Shown("Experiments beside training alone", _gains(findings), words=_ON_GAINS),
            figures("Clients by their gain", "Dots: means over seeds; bars: intervals of 95 % over seeds.", "gains"),
            Shown("Architectures", _architectures(findings)),
            Shown("Classes", _classes(findings), words=_ON_CLASSES),
            Shown("Clients", _clients(findings), words="p: of a paired t-test over seeds, by Holm's method."),
        ],
        "How fairly": [Shown("Over clients", _fairness(findings), words=_ON_FAIRNESS)],
        "What it costs": [
            Shown("Experiments", _costs(findings), words=caption(findings.rows, findings.measure)),
            Shown("Until the target", _target(findings)),
            Shown(f"By setting, {TITLES[findings.measure]}", _pivot(findings)),
        ],
        "How alike clients see": [
            figures("CKA between clients, by stage", _ON_SIMILARITY, "similarity"),
            figures("Client by client, and stage by stage", "Unbiased linear CKA, mean over seeds.", *heatmaps),
            Shown("Mean over pairs of clients", _similarity(findings)),
            figures("CKA between clients, over rounds", _ON_ROUNDS, "similarity-over-rounds"),
            figures("Features before the head, in two dimensions", _ON_MAPS, *maps),
            Shown("Silhouette of these features", _separation(findings)),
            figures("Silhouette over rounds", _ON_ROUNDS, "silhouette-over-rounds"),
        ],
        "How far weights are apart": [
            figures("By layer", _ON_DRIFT, "drift"),
            figures("Over rounds", _ON_ROUNDS, "drift-over-rounds"),
            Shown("Layers", _drift(findings)),
        ],
        "How sure predictions are": [
            figures("Confidence and accuracy", _ON_CALIBRATION, "calibration"),
            Shown("Calibration", _calibration(findings)),
        ],
    }


_ON_GAINS = (
    "Gain: how much better a client's model is than the same client's trained alone, with the same seed. ± half of the"
    " interval of 95 % confidence over seeds, and over clients. In brackets those that the test tells from chance. p:"
    " of a paired t-test over seeds, by Holm's method for the number of experiments."
)
_ON_CLASSES = (
    "Gain in the share of a class's examples that are classified right (points), over all own test parts together."
)
_ON_FAIRNESS = (
    "Worst tenth: mean over the worst tenth of the clients. Spread: standard deviation over clients. Gini: 0 if all"
    " clients are equal. ± half of the interval of 95 % confidence over seeds."
)
_ON_SIMILARITY = (
    "1 if two clients' networks see the examples of the common test set alike up to rotation and scale; about 0 of"
    " unrelated ones. Mean over pairs of clients."
)
_ON_MAPS = (
    "Of clients whose features have one width, the same examples at each, of each experiment's first run: by principal"
    " components and by t-SNE, coloured by client and by class."
)
_ON_DRIFT = "Distance of a layer's weights to their mean over clients, over that mean's length; mean over clients."
_ON_ROUNDS = "After the rounds that runs have kept; mean over seeds, where all have the round."
_ON_CALIBRATION = (
    "On the dotted line predictions are right as often as they are sure. ECE: mean gap to it over bins of confidence."
    " Brier: squared distance of probabilities to the actual class."
)


def _gains(findings: Findings) -> TextTable:
    unit = " (points)" if findings.metric.percent else ""
    columns = ("", "seeds", "clients", "profit", "lose", f"gain{unit}", "± over seeds", "± over clients", "p")
    lines: list[tuple[str, ...]] = []
    for gain in findings.gains:
        counts = [
            f"{len(members)}{f' ({sure})' if (sure := sum(one.sure for one in members)) else ''}"
            for members in (gain.profiting, gain.losing)
        ]
        halves = [_plain(findings, half.half) for half in (gain.over_seeds, gain.over_clients)]
        mean = points(findings.metric, gain.over_seeds.mean).removesuffix(" points")
        sizes = str(gain.over_seeds.count), str(len(gain.clients))
        lines.append((gain.experiment, *sizes, *counts, mean, *halves, _p(gain.p)))
    return TextTable(columns, tuple(lines))


def _clients(findings: Findings) -> TextTable:
    lines = [
        (
            f"client {one.client}",
            gain.experiment,
            one.architecture,
            _plain(findings, one.alone),
            _plain(findings, one.value),
            _signed(findings, one.gain),
            _p(one.p),
        )
        for gain in findings.gains
        for one in sorted(gain.clients, key=lambda one: one.gain.mean)
    ]
    return TextTable(("", "experiment", "architecture", "alone", "with it", "gain", "p"), tuple(lines))


def _architectures(findings: Findings) -> TextTable:
    lines = [
        (name, gain.experiment, _signed(findings, over))
        for gain in findings.gains
        for name, over in gain.by_architecture.items()
    ]
    return TextTable(("", "experiment", "gain"), tuple(lines))


def _classes(findings: Findings) -> TextTable:
    """One row for each class, and a column for each experiment."""
    numbers = sorted({number for gain in findings.gains for number in gain.by_class})
    lines = [
        (f"class {number}", *(_in_points(gain.by_class.get(number)) for gain in findings.gains)) for number in numbers
    ]
    return TextTable(("", *(gain.experiment for gain in findings.gains)), tuple(lines))


def _in_points(share: Interval | None) -> str:
    if share is None:
        return NOTHING
    return f"{100 * share.mean:+.1f}" + ("" if share.half is None else f" ± {100 * share.half:.1f}")


def _fairness(findings: Findings) -> TextTable:
    lines = [
        (
            row.experiment,
            *(score(findings.metric, value) for value in (row.mean, row.spread, row.worst, row.worst_tenth)),
            NOTHING if row.gini is None else f"{row.gini.mean:.3f}",
        )
        for row in findings.fairness
    ]
    return TextTable(("", "mean", "spread", "worst", "worst tenth", "Gini"), tuple(lines))


def _pivot(findings: Findings) -> TextTable:
    return pivot_of(findings.rows, findings.metric, findings.measure)


def _costs(findings: Findings) -> TextTable:
    return table_of(findings.rows, findings.metric)


def _target(findings: Findings) -> TextTable | None:
    return target_table_of(findings.rows) if any(row.reached for row in findings.rows) else None


def _similarity(findings: Findings) -> TextTable:
    lines = [
        (one.name, str(stage), f"{unbiased:.3f}", f"{exact:.3f}")
        for one in findings.inside
        for stage, (exact, unbiased) in one.between_clients().items()
    ]
    return TextTable(("", "stage, from 0", "CKA, unbiased", "CKA, exact"), tuple(lines))


def _separation(findings: Findings) -> TextTable:
    lines = [
        (one.name, str(len(found.clients)), str(found.width), *map(_shown, (found.by_client, found.by_class)))
        for one in findings.inside
        if (found := one.map)
    ]
    return TextTable(("", "clients", "width", "by client", "by class"), tuple(lines))


def _shown(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _drift(findings: Findings) -> TextTable:
    lines = [
        (row.layer, one.name, str(row.networks), f"{row.mean:.4g}", f"{row.largest:.4g}")
        for one in findings.inside
        for row in one.drift
    ]
    return TextTable(("", "run", "clients", "mean", "largest"), tuple(lines))


def _calibration(findings: Findings) -> TextTable:
    lines = [
        (
            one.whose,
            run.name,
            str(one.values.examples),
            *(f"{100 * value:.1f}" for value in (one.values.accuracy, one.values.confidence, one.values.ece)),
            f"{one.values.brier:.3f}",
        )
        for run in findings.inside
        for one in run.calibration
    ]
    columns = ("", "run", "examples", "accuracy (%)", "confidence (%)", "ECE (%)", "Brier")
    return TextTable(columns, tuple(lines))


def _plain(findings: Findings, value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{100 * value:.1f}" if findings.metric.percent else f"{value:.4g}"


def _signed(findings: Findings, value: Interval) -> str:
    mean = points(findings.metric, value.mean).removesuffix(" points")
    return mean if value.half is None else f"{mean} ± {_plain(findings, value.half)}"


def _p(p: float | None) -> str:
    return NOTHING if p is None else f"{p:.2g}"
