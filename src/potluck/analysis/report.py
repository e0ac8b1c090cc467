"""The report on one or more runs: a page of HTML, and a short one of Markdown with a picture, for plain text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from potluck.analysis.groups import Group, enumerated, group, heading
from potluck.analysis.names import run_names
from potluck.analysis.page import different, page_text, shared
from potluck.analysis.plots.curves import draw_curves, save
from potluck.analysis.read import CONFIG, StoredRun, find_runs, last, read_run
from potluck.analysis.tables import (
    BYTES_PER_MEGABYTE,
    MetricRow,
    Spread,
    architecture_table,
    group_table,
    metric_of,
    metric_table,
    note_table,
    run_table,
    target_table,
    traffic_table,
)
from potluck.records import Measure, Metric

PAGE, REPORT, PICTURE = "report.html", "report.md", "curves.png"
_NOTHING = "–"
_MEASURED: dict[Measure, str] = {
    "personal": "mean over clients on their own test parts",
    "common": "mean over clients on the common test set",
    "global": "the global model on the common test set",
}


@dataclass(frozen=True)
class Target:
    """A target value of the primary metric.

    Attributes:
        value: an accuracy is a share between 0 and 1.
        measure: of the clients' models on their own test parts or on the common test set, or of the global model.
        against: name of the run that the speed-up is measured against; None omits the speed-up.
    """

    value: float
    measure: Measure = "personal"
    against: str | None = None


def write_report(paths: Sequence[Path], to: Path, target: Target | None = None) -> Path:
    """Write `report.html` on the runs at `paths`, and beside it `report.md` and `curves.png` for plain text.

    The same runs always give the same bytes.

    Args:
        paths: runs, or folders of runs.
        to: the folder to write into; made if it is not there.
        target: adds how many rounds each run took to an accuracy.

    Returns:
        The path of `report.html`.

    Raises:
        CheckpointError: there is no run to read, or one is damaged.
    """
    runs = [read_run(folder) for folder in find_runs(paths)]
    text = report_text(runs, target)
    page = page_text(runs, target.value, target.measure) if target else page_text(runs)
    to.mkdir(parents=True, exist_ok=True)
    save(draw_curves(runs), to / PICTURE)
    (to / REPORT).write_text(text, encoding="utf-8")
    (to / PAGE).write_text(page, encoding="utf-8")
    return to / PAGE


def report_text(runs: Sequence[StoredRun], target: Target | None = None) -> str:
    """The report in Markdown."""
    groups, metric = group(runs), metric_of(runs)
    names = dict(zip((run.folder for run in runs), run_names(runs), strict=True))
    return (
        _environment(metric)
        .get_template(f"{REPORT}.j2")
        .render(
            heading=heading(groups),
            picture=PICTURE,
            page=PAGE,
            runs=runs,
            names=names,
            evaluated=any(last(run) for run in runs),
            run_rows=list(zip(names.values(), run_table(runs), strict=True)),
            group_rows=group_table(runs),
            experiments=[_experiment(members) for members in groups],
            metric=metric,
            unit=" (%)" if metric.percent else "",
            shared=shared(groups),
            different=different(groups),
            note_rows=[(names[run.folder], row) for run in runs for row in note_table([run])],
            target=target,
            measured=_MEASURED[target.measure] if target else "",
            target_rows=list(
                zip(names.values(), target_table(runs, target.value, target.measure, target.against), strict=True)
            )
            if target
            else [],
        )
    )


def _environment(metric: Metric) -> Environment:
    environment = Environment(
        loader=PackageLoader("potluck.analysis"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        score=partial(_score, metric), megabytes=_megabytes, cell=_cell, number=_number, enumerated=enumerated
    )
    return environment


def _experiment(members: Group) -> dict[str, Any]:
    """The section on one experiment, besides its rows in the tables."""
    runs = members.runs
    evaluation = sum(record.bytes_evaluation for run in runs for record in run.rounds)
    training = sum(record.bytes_down + record.bytes_up for run in runs for record in run.rounds)
    return {
        "label": members.label,
        "clients": runs[0].client_count,
        "seeds": members.seeds,
        "architectures": architecture_table(runs),
        "metrics": [_metric_row(row) for row in metric_table(runs)],
        "traffic": traffic_table(runs),
        "training_megabytes": training / len(runs) / BYTES_PER_MEGABYTE,
        "evaluation_megabytes": evaluation / len(runs) / BYTES_PER_MEGABYTE,
        "failures": sum(len(record.failed) for run in runs for record in run.rounds),
        "toml": (runs[0].folder / CONFIG).read_text(encoding="utf-8").strip(),
    }


def _metric_row(row: MetricRow) -> list[str]:
    """The cells of a metric: its name, direction and values."""
    values = (row.personal, row.worst, row.pooled, row.common, row.global_model)
    name = f"{row.metric.label}{' (%)' if row.metric.percent else ''}"
    return [name, row.metric.direction.removesuffix(" is better"), *(_score(row.metric, value) for value in values)]


def _score(metric: Metric, value: float | Spread | None, std: float | None = None) -> str:
    """A value, in percent with one decimal if it is a share, and its standard deviation if there is one."""
    if value is None:
        return _NOTHING
    if isinstance(value, Spread):
        return _score(metric, value.mean, value.std)
    shown = [value] if std is None else [value, std]
    return " ± ".join(f"{100 * number:.1f}" if metric.percent else f"{number:.4g}" for number in shown)


def _megabytes(amount: float) -> str:
    """Megabytes with two decimals, or three significant digits if they are few."""
    decimals = 2 - math.floor(math.log10(amount)) if amount else 0
    return f"{amount:,.{decimals if amount < 1 else 2}f}"


def _number(value: float) -> str:
    """A number of any size with four significant digits."""
    return f"{value:.4g}"


def _cell(value: object) -> str:
    """Text escaped for a cell of a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", " ")
