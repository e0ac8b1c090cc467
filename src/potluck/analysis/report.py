"""The report on one or more runs: a page of HTML, and a short one of Markdown with a picture, for plain text."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.analysis.findings import Findings
from potluck.analysis.groups import Group, group, heading
from potluck.analysis.names import run_names
from potluck.analysis.page import different, page_text, shared
from potluck.analysis.plots.curves import draw_curves, save
from potluck.analysis.plots.drawn import how_drawn
from potluck.analysis.provenance import provenance
from potluck.analysis.read import CONFIG, StoredRun, find_runs, last, read_runs
from potluck.analysis.rendering import template
from potluck.analysis.tables import (
    BYTES_PER_MEGABYTE,
    ArchitectureRow,
    Spread,
    architecture_table,
    check_target,
    group_table,
    metric_of,
    metric_table,
    note_table,
    run_table,
    target_table,
    traffic_table,
    warnings_of,
)
from potluck.records import Measure

PAGE, REPORT, PICTURE = "report.html", "report.md", "curves.png"
_MOST_COLUMNS = 8  # of architectures beside one another


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


def write_report(
    paths: Sequence[Path],
    to: Path,
    target: Target | None = None,
    *,
    measure: Measure = "personal",
    smooth: int = 1,
    findings: Findings | None = None,
) -> Path:
    """Write `report.html` on the runs at `paths`, and beside it `report.md` and `curves.png` for plain text.

    The same runs always give the same bytes.

    Args:
        paths: runs, or folders of runs.
        to: the folder to write into; made if it is not there.
        target: adds how many rounds each run took to an accuracy, and a line there in the curves.
        measure: whose curves are drawn, and shown first; a target's own measure goes before.
        smooth: a run's curve at each round is the mean of its latest so many values, over a pale one as measured.
        findings: what an analysis of these runs has found; by default what their records tell.

    Returns:
        The path of `report.html`.

    Raises:
        CheckpointError: there is no run to read, or all are damaged.
        ConfigError: the target is no number, or no share, though the metric is one.
    """
    reading = read_runs(find_runs(paths))
    runs, remarks = reading.runs, reading.remarks
    value, measure = (target.value, target.measure) if target else (None, measure)
    check_target(value, metric_of(runs))
    text = report_text(runs, target, remarks)
    page = page_text(runs, value, measure, smooth=smooth, remarks=remarks, findings=findings)
    to.mkdir(parents=True, exist_ok=True)
    save(draw_curves(runs, how_drawn(runs, measure, smooth, value)), to / PICTURE)
    (to / REPORT).write_text(text, encoding="utf-8")
    (to / PAGE).write_text(page, encoding="utf-8")
    return to / PAGE


def report_text(runs: Sequence[StoredRun], target: Target | None = None, remarks: Sequence[str] = ()) -> str:
    """The report in Markdown: of one experiment run by run, of several one line for each in every table.

    `remarks` say what could not be read, or not be checked.
    """
    groups, metric = group(runs), metric_of(runs)
    names = dict(zip((run.folder for run in runs), run_names(runs), strict=True))
    return template(f"{REPORT}.j2", metric).render(
        heading=heading(groups),
        picture=PICTURE,
        page=PAGE,
        runs=runs,
        remarks=remarks,
        names=names,
        evaluated=any(last(run) for run in runs),
        run_rows=list(zip(names.values(), run_table(runs), strict=True)),
        group_rows=group_table(runs),
        experiments=[_experiment(members) for members in groups],
        architectures=_columns([(members.label, architecture_table(members.runs)) for members in groups]),
        metric=metric,
        unit=" (%)" if metric.percent else "",
        shared=shared(groups),
        different=different(groups, by_method=False),
        different_by_method=different(groups, by_method=True),
        cautions=warnings_of(runs),
        note_rows=[(names[run.folder], row) for run in runs for row in note_table([run])],
        target=target,
        target_rows=list(
            zip(names.values(), target_table(runs, target.value, target.measure, target.against), strict=True)
        )
        if target
        else [],
        provenances=_provenances(runs),
    )


def _experiment(members: Group) -> dict[str, Any]:
    """What is said of one experiment, besides its rows in the tables."""
    runs = members.runs
    evaluation = sum(record.bytes_evaluation for run in runs for record in run.rounds)
    training = sum(record.bytes_down + record.bytes_up for run in runs for record in run.rounds)
    return {
        "label": members.label,
        "clients": runs[0].client_count,
        "seeds": members.seeds,
        "architectures": architecture_table(runs),
        "metrics": metric_table(runs),
        "traffic": traffic_table(runs),
        "training_megabytes": training / len(runs) / BYTES_PER_MEGABYTE,
        "evaluation_megabytes": evaluation / len(runs) / BYTES_PER_MEGABYTE,
        "failures": sum(len(record.failed) for run in runs for record in run.rounds),
        "toml": (runs[0].folder / CONFIG).read_text(encoding="utf-8").strip(),
    }


def _columns(
    tables: Sequence[tuple[str, list[ArchitectureRow]]],
) -> tuple[list[str], list[tuple[str, list[Spread | None]]]]:
    """The names of all architectures, and for each experiment its clients' score by architecture, in this order.

    Without any name if there are more than a table of plain text has room for.
    """
    names = list(dict.fromkeys(row.architecture for _, table in tables for row in table))
    if len(names) > _MOST_COLUMNS:
        return [], []
    found = [(label, {row.architecture: row.personal_last for row in table}) for label, table in tables]
    return names, [(label, [scores.get(name) for name in names]) for label, scores in found]


def _provenances(runs: Sequence[StoredRun]) -> list[tuple[tuple[str, ...], int]]:
    """Code, versions, machine and data, each with how many runs had them, in order of appearance."""
    return list(Counter(map(_provenance, runs)).items())


def _provenance(run: StoredRun) -> tuple[str, ...]:
    """What a run was made with, in the order of the table's columns."""
    found = provenance(run)
    return (found.commit, found.python, *found.packages.values(), found.machine, found.data, found.division)
