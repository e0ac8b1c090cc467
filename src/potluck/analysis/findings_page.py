"""An analysis as one page of HTML, and its tables and figures as files."""

import re
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from markupsafe import Markup

from potluck.analysis import findings_shown as shown
from potluck.analysis.export import TextTable, caption, latex
from potluck.analysis.findings import Findings
from potluck.analysis.findings_tables import as_csv, tables_of
from potluck.analysis.groups import group, heading
from potluck.analysis.plots.findings import draw_findings
from potluck.analysis.plots.panels import save_figure
from potluck.analysis.rendering import svg_address, template
from potluck.records import TITLES, TITLES_OF_A_CLIENT

PAGE, FILES = "analysis.html", "analysis"
OF_RECORDS = ("Who profits, who loses", "How fairly")
"""Headings of what records alone tell."""
_COSTS = "What it costs"
_SHOWN = 40  # rows of a table that is not folded in any case


@dataclass(frozen=True)
class Shown:
    """A table or figures of the page.

    Attributes:
        title: what it shows.
        table: its cells; None for figures.
        figures: by name, as addresses that hold them.
        words: how to read it.
        folded: whether its table is shown only when asked for.
    """

    title: str
    table: TextTable | None = None
    figures: tuple[tuple[str, str], ...] = ()
    words: str = ""
    folded: bool = False


def write_findings(findings: Findings, to: Path) -> Path:
    """Write `analysis.html` into a folder, and all tables and figures into its `analysis/`.

    The same findings always give the same bytes.

    Returns:
        The path of the page.
    """
    place = to / FILES
    place.mkdir(parents=True, exist_ok=True)
    tables = tables_of(findings)
    for name, rows in tables.items():
        (place / f"{name}.csv").write_text(as_csv(rows), encoding="utf-8")
    for name, table in _for_papers(findings).items():
        (place / f"{name}.tex").write_text(latex(table), encoding="utf-8")
    drawn = _drawn(findings, place)
    (to / PAGE).write_text(_page(findings, drawn, list(tables)), encoding="utf-8")
    return to / PAGE


def parts_inside(findings: Findings) -> dict[str, list[Shown]]:
    """What another page shows of findings: who profits and how fairly, and of models, where there are any, the rest."""
    if not findings.inside:
        return {name: found for name, found in shown_of(findings, {}).items() if name in OF_RECORDS}
    with TemporaryDirectory() as place:
        drawn = _drawn(findings, Path(place))
    return {name: found for name, found in shown_of(findings, drawn).items() if name != _COSTS}


def _drawn(findings: Findings, place: Path) -> dict[str, str]:
    """Write the figures into a folder; by name the address that holds each."""
    figures = draw_findings(findings)
    for name, figure in figures.items():
        save_figure(figure, place, name)
    return {name: svg_address((place / f"{name}.svg").read_bytes()) for name in figures}


def _for_papers(findings: Findings) -> dict[str, TextTable]:
    """The tables that are written as LaTeX."""
    found = {
        "gains": shown.table_of_gains(findings),
        "groups": shown.table_of_groups(findings),
        "fairness": shown.table_of_fairness(findings),
        "costs": shown.table_of_costs(findings),
        "target": shown.table_of_target(findings),
        "pivot": shown.table_of_pivot(findings),
        "calibration": shown.table_of_calibration(findings, "all", "group"),
    }
    return {name: table for name, table in found.items() if table.rows}


def _page(findings: Findings, drawn: dict[str, str], tables: list[str]) -> str:
    groups = group(findings.runs)
    style = files("potluck.analysis").joinpath("templates", "page.css").read_text(encoding="utf-8")
    return template("analysis.html.j2", findings.metric).render(
        style=Markup(style),
        title=heading(groups),
        metric=findings.metric,
        sentences=findings.sentences,
        remarks=findings.remarks,
        parts=shown_of(findings, drawn),
        measure=TITLES_OF_A_CLIENT[findings.measure],
        runs=[(one.name, one.round) for one in findings.inside],
        tables=[f"{name}.csv" for name in tables],
        papers=[f"{name}.tex" for name in _for_papers(findings)],
        figures=[f"{name}.svg" for name in drawn],
        files=FILES,
    )


def shown_of(findings: Findings, drawn: dict[str, str]) -> dict[str, list[Shown]]:
    """Tables and figures by the heading under which they stand, without those that are empty."""
    parts = {name: [_folded(one) for one in found if _has(one)] for name, found in _parts(findings, drawn).items()}
    return {name: found for name, found in parts.items() if found}


def _folded(one: Shown) -> Shown:
    """Folded if its table is long."""
    return replace(one, folded=True) if one.table and len(one.table.rows) > _SHOWN else one


def _has(one: Shown) -> bool:
    return bool(one.figures) or bool(one.table and one.table.rows)


def _parts(findings: Findings, drawn: dict[str, str]) -> dict[str, list[Shown]]:
    """Tables and figures by the heading under which they stand."""

    def figures(title: str, words: str, *names: str) -> Shown:
        return Shown(title, figures=tuple((name, drawn[name]) for name in names if name in drawn), words=words)

    def several(title: str, words: str, kind: str) -> Shown:
        return figures(title, words, *(name for name in drawn if re.fullmatch(rf"{kind}-\d+", name)))

    return {
        "Who profits, who loses": [
            Shown("Experiments beside training alone", shown.table_of_gains(findings), words=_ON_GAINS),
            figures("Clients by their gain", "Dots: means over seeds; bars: intervals of 95 % over seeds.", "gains"),
            Shown("Clients", shown.table_of_clients(findings), words=_ON_CLIENTS),
            figures("Groups by their gain", "Bars: intervals of 95 % over seeds.", "groups"),
            Shown("Groups", shown.table_of_groups(findings), words=_ON_GROUPS),
            Shown("Architectures", shown.table_of_architectures(findings)),
            Shown("Classes", shown.table_of_classes(findings), words=_ON_CLASSES),
            several("Clients by class", _ON_CLIENTS_BY_CLASS, "gains-by-class"),
            *(
                Shown(f"Clients by class: {name}", table, folded=True)
                for name, table in shown.table_of_client_classes(findings).items()
            ),
        ],
        "How fairly": [Shown("Over clients", shown.table_of_fairness(findings), words=_ON_FAIRNESS)],
        _COSTS: [
            Shown("Experiments", shown.table_of_costs(findings), words=caption(findings.rows, findings.measure)),
            figures("Over what it costs", _ON_COSTS, "costs"),
            Shown("Until the target", shown.table_of_target(findings), words=_ON_TARGET),
            Shown(f"By setting, {TITLES[findings.measure]}", shown.table_of_pivot(findings)),
        ],
        "How alike clients see": [
            figures("CKA between clients, by stage", _ON_SIMILARITY, "similarity"),
            several("Client by client, and stage by stage", "Unbiased linear CKA, mean over seeds.", "heatmaps"),
            several("The same by canonical correlations", _ON_CORRELATIONS, "correlations"),
            Shown("Mean over pairs of clients", shown.table_of_similarity(findings), words=_OVER_SEEDS),
            figures("CKA between clients, over rounds", _ON_ROUNDS, "similarity-over-rounds"),
            several("Features before the head, in two dimensions", _ON_MAPS, "map"),
            Shown("Silhouette of these features", shown.table_of_separation(findings), words=_OVER_SEEDS),
            figures("Silhouette over rounds", _ON_ROUNDS, "silhouette-over-rounds"),
        ],
        "How far weights are apart": [
            figures("By layer", _ON_DRIFT, "drift"),
            figures("Over rounds", _ON_ROUNDS, "drift-over-rounds"),
            Shown("Layers", shown.table_of_drift(findings), words=_OVER_SEEDS),
        ],
        "How sure predictions are": [
            figures("Confidence and accuracy", _ON_CALIBRATION, "calibration"),
            Shown(
                "Calibration", shown.table_of_calibration(findings, "all", "architecture", "group"), words=_OVER_SEEDS
            ),
            Shown("Clients", shown.table_of_calibration(findings, "client"), words=_OVER_SEEDS),
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
_ON_CLIENTS = (
    "Who loses most first. p: of a paired t-test over seeds, by Holm's method for the number of clients. Where data are"
    " divided by a draw, a number stands for other data in each seed."
)
_ON_GROUPS = (
    "Gain in the share of a group's test examples that are classified right, all clients together. p: of a paired"
    " t-test over seeds, by Holm's method for the number of groups."
)
_ON_CLIENTS_BY_CLASS = (
    "Gain in the share of a client's examples of a class that are classified right (points), mean over seeds; empty"
    " where it has none. Few examples make large numbers."
)
_ON_COSTS = "Mean over clients and seeds after each evaluated round, over what was spent until then."
_ON_TARGET = (
    "Rounds, megabytes and seconds: means over the seeds that reached it; >T: none did in T rounds. Speed-up: the"
    " rounds of FedAvg over those of the experiment, seed by seed where both did."
)
_OVER_SEEDS = "Mean over seeds ± half of the interval of 95 % confidence."
_ON_FAIRNESS = (
    "Worst tenth: mean over the worst tenth of the clients. Spread: standard deviation over clients. Gini: 0 if all"
    " clients are equal. ± half of the interval of 95 % confidence over seeds."
)
_ON_SIMILARITY = (
    "1 if two clients' networks see the examples of the common test set alike up to rotation and scale; about 0 of"
    " unrelated ones. Mean over pairs of clients."
)
_ON_CORRELATIONS = (
    "Mean canonical correlation of channels, each the mean over positions: 1 up to any invertible map. Empty where both"
    " networks have together as many directions as there are examples."
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
