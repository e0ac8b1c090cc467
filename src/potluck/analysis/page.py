"""The report as one page of HTML that holds everything it needs, and asks for nothing else."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup

from potluck.analysis.compare import ComparedRow, compare
from potluck.analysis.costs import work_table
from potluck.analysis.courses import COLUMNS, WORDS
from potluck.analysis.embedded import Embedded, as_json, embedded, page_value, series_of
from potluck.analysis.findings import Findings, find, gain_sentences
from potluck.analysis.findings_page import OF_RECORDS, Shown, parts_inside
from potluck.analysis.groups import Group, enumerated, group, heading, values_with_owners
from potluck.analysis.names import run_names
from potluck.analysis.plots.drawn import Drawn, how_drawn
from potluck.analysis.plots.still import HEIGHT, WIDTH, Still, still
from potluck.analysis.provenance import provenance
from potluck.analysis.read import CONFIG, StoredRun, by_class, chosen, joules, last, partition, timings
from potluck.analysis.rendering import amount, score, template
from potluck.analysis.settings import differing, settings
from potluck.analysis.tables import (
    BYTES_PER_MEGABYTE,
    GroupRow,
    architecture_table,
    group_table,
    metric_of,
    metric_table,
    note_table,
    target_table,
    traffic_table,
    warnings_of,
)
from potluck.analysis.virtual import Virtual, virtual_of
from potluck.core.ground.errors import ConfigError
from potluck.records import MAIN_MEASURES, TITLES, TITLES_OF_A_CLIENT, Measure, Metric

LARGEST_PAGE = 2_000_000
"""Bytes that a page has at most, as long as its tables leave its curves any room."""
_ROOM_FOR_CURVES, _ROOM_FOR_FIGURES = 200_000, 1_200_000
_SCRIPTS = ("chart.js", "tables.js", "classes.js", "page.js")


@dataclass(frozen=True)
class Card:
    """One of the numbers at the top.

    Attributes:
        title: what was measured.
        value: as text, with its unit.
        note: whose value it is, and its interval.
    """

    title: str
    value: str
    note: str


def page_text(
    runs: Sequence[StoredRun],
    target: float | None = None,
    measure: Measure = "personal",
    *,
    smooth: int = 1,
    remarks: Sequence[str] = (),
    findings: Findings | None = None,
) -> str:
    """The page on these runs.

    Args:
        runs: of one task.
        target: a value of the primary metric, for which the page shows what it took to reach it.
        measure: whose predictions, and on what, reach the target, and whose curves are shown first.
        smooth: a run's curve at each round is the mean of its latest so many values.
        remarks: what could not be read, or not be checked.
        findings: what an analysis of these runs has found; by default what their records tell.

    Raises:
        CheckpointError: the runs have several primary metrics, or a file of one is damaged.
    """
    groups, metric = group(runs), metric_of(runs)
    names = dict(zip((run.folder for run in runs), run_names(runs), strict=True))
    rows, how = compare(runs, measure, target=target), how_drawn(runs, measure, smooth, target)
    findings = findings or _findings(runs, measure)
    found, too_large = _fitting(parts_inside(findings)) if findings else ({}, list[str]())
    virtual = virtual_of(groups, runs, names, target, measure)
    script, style = Markup("\n".join(map(_part, _SCRIPTS))), Markup(_part("page.css"))
    seal = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    shown_to_all = {
        "script": script,
        "style": style,
        "seal": seal,
        "title": heading(groups),
        "subtitle": _subtitle(groups),
        "profits": gain_sentences(findings.gains, metric) if findings else [],
        "of_records": {name: parts for name, parts in found.items() if name in OF_RECORDS},
        "of_models": {name: parts for name, parts in found.items() if name not in OF_RECORDS},
        "cards": _cards(rows, group_table(runs), metric, virtual),
        "remarks": list(dict.fromkeys([*remarks, *(findings.remarks if findings else ())])),
        "unfinished": [_unfinished(run, names) for run in runs if _is_unfinished(run)],
        "cautions": warnings_of(runs),
        "private": [(names[run.folder], run.manifest["privacy"]) for run in runs if run.manifest.get("privacy")],
        "metric": metric,
        "unit": " (%)" if metric.percent else "",
        "seeds": any(len(members.runs) > 1 for members in groups),
        "repeated": len(runs) > sum(len(members.runs) for members in groups),
        "experiments": _experiments(rows, runs, groups),
        "target": None if target is None else metric.text(target),
        "target_measure": TITLES[measure],
        "smooth": smooth,
        "runs": [_run(run, names, target, measure) for run in runs],
        "architectures": [(members.label, row) for members in groups for row in architecture_table(members.runs)],
        "metrics": [(members.label, row) for members in groups for row in metric_table(members.runs)],
        "traffic": [(members.label, row) for members in groups for row in traffic_table(members.runs)],
        "work": [(members.label, row) for members in groups for row in work_table(members.runs)],
        "virtual": virtual,
        "columns": COLUMNS,
        "words_on_columns": WORDS,
        "times": [row for members in groups if (row := _times(members))],
        "notes": [(names[run.folder], row) for run in runs for row in note_table([run])],
        "has_classes": any(by_class(run) for run in runs),
        "has_partition": any(partition(run) for run in runs),
        "shared": shared(groups),
        "different": different(groups, by_method=False),
        "different_by_method": different(groups, by_method=True),
        "configurations": [(members.label, members.seeds[0], _configuration(members.runs[0])) for members in groups],
        "stills": _stills(groups, how),
        "clients": _clients(groups[0].runs[0], names),
        "width": WIDTH,
        "height": HEIGHT,
    }
    page = template("report.html.j2", metric)
    without = page.render(shown_to_all, numbers=Markup(""), left_out=[])
    room = max(_ROOM_FOR_CURVES, LARGEST_PAGE - len(without.encode()) - _ROOM_FOR_WORDS)
    data = embedded(groups, names, room, how)
    return page.render(shown_to_all, numbers=Markup(as_json(data.content)), left_out=[*too_large, *_in_words(data)])


_ROOM_FOR_WORDS = 20_000  # for the list of what was left out
_FEW = 12


def _in_words(data: Embedded) -> list[str]:
    """What was left out; a count of what would be a long list."""
    return [*data.left_out[:_FEW], *([f"{len(data.left_out) - _FEW} more"] if len(data.left_out) > _FEW else [])]


def _part(name: str) -> str:
    return files("potluck.analysis").joinpath("templates", name).read_text(encoding="utf-8")


def _subtitle(groups: Sequence[Group]) -> str:
    """How much was run, in one line."""
    runs = [run for members in groups for run in members.runs]
    lengths = sorted({len(run.rounds) for run in runs})
    architectures = {line.architecture for run in runs for line in run.clients}
    parts = [
        *([_counted(len(groups), "experiment")] if len(groups) > 1 else []),
        _counted(len(runs), "run"),
        f"{' to '.join(dict.fromkeys([str(lengths[0]), str(lengths[-1])]))} round{'s' if lengths[-1] > 1 else ''}",
        f"{enumerated(sorted({run.client_count for run in runs}))} clients",
        *([_counted(len(architectures), "architecture")] if architectures else []),
    ]
    return " · ".join(parts)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _cards(
    rows: Sequence[ComparedRow], means: Sequence[GroupRow], metric: Metric, virtual: Virtual | None
) -> list[Card]:
    """The best value of each measure; of a single experiment also what training sent and took."""
    cards: list[Card] = []
    for measure in MAIN_MEASURES:
        found = [(row.label, value) for row in rows if (value := row.scores[measure])]
        if found:
            best = max(found, key=lambda item: item[1].mean if metric.higher_is_better else -item[1].mean)
            unit = " %" if metric.percent else ""
            cards.append(Card(f"{metric.label}, {TITLES[measure]}", f"{score(metric, best[1])}{unit}", best[0]))
    worst = [(row.label, row.last.worst) for row in means if row.last.worst]
    if worst:
        sign = 1 if metric.higher_is_better else -1
        best_worst = max(worst, key=lambda item: sign * item[1].mean)
        value = page_value(best_worst[1].mean, metric.percent)
        cards.append(Card("worst client", f"{value}{' %' if metric.percent else ''}", best_worst[0]))
    if len(rows) == 1:
        cards.append(Card("sent for training", f"{amount(rows[0].megabytes)} MB", ""))
        cards += [Card("time of training", f"{amount(rows[0].seconds)} s", "")] if rows[0].seconds else []
        cards += (
            [Card("time on the devices", virtual.rows[0].cells[1], "")] if virtual and len(virtual.rows) == 1 else []
        )
    return cards


def _findings(runs: Sequence[StoredRun], measure: Measure) -> Findings | None:
    """What the records of these runs tell; None where several might stand for training alone."""
    try:
        return find(runs, measure=measure if measure in TITLES_OF_A_CLIENT else "personal")
    except ConfigError:
        return None


def _fitting(parts: dict[str, list[Shown]]) -> tuple[dict[str, list[Shown]], list[str]]:
    """The parts without the figures for which the page has no room, and what these show; small ones go before."""
    sizes = {name: len(address) for found in parts.values() for one in found for name, address in one.figures}
    room, kept = _ROOM_FOR_FIGURES, set[str]()
    for name in sorted(sizes, key=lambda name: sizes[name]):
        room -= sizes[name]
        kept |= {name} if room >= 0 else set()
    fitting = {
        heading: [replace(one, figures=tuple(of for of in one.figures if of[0] in kept)) for one in found]
        for heading, found in parts.items()
    }
    return fitting, [f"the figure {name}" for name in sizes if name not in kept]


def _is_unfinished(run: StoredRun) -> bool:
    return run.manifest.get("status") != "finished" or len(run.rounds) < run.rounds_planned


def _unfinished(run: StoredRun, names: Mapping[Path, str]) -> str:
    status = run.manifest.get("status", "unknown")
    return f"{names[run.folder]} has {len(run.rounds)} of {run.rounds_planned} rounds (status: {status})"


def _experiments(
    rows: Sequence[ComparedRow], runs: Sequence[StoredRun], groups: Sequence[Group]
) -> list[dict[str, Any]]:
    """The experiments' rows, each with the worst client, and the values at the chosen round."""
    return [
        {
            "row": row,
            "worst": means.last.worst,
            "chosen": at_chosen.scores["personal"],
            "failures": sum(len(record.failed) for run in members.runs for record in run.rounds),
        }
        for row, at_chosen, means, members in zip(
            rows, compare(runs, at="chosen"), group_table(runs), groups, strict=True
        )
    ]


def _run(run: StoredRun, names: Mapping[Path, str], target: float | None, measure: Measure) -> dict[str, Any]:
    """What the table of runs says of one, and what is needed to repeat it."""
    return {
        "name": names[run.folder],
        "folder": run.name,
        "method": run.method,
        "dataset": run.dataset,
        "seed": run.seed,
        "rounds": len(run.rounds),
        "last": last(run),
        "chosen": chosen(run),
        "metric": run.metric.name,
        "megabytes": sum(record.bytes_down + record.bytes_up for record in run.rounds) / BYTES_PER_MEGABYTE,
        "evaluation": sum(record.bytes_evaluation for record in run.rounds) / BYTES_PER_MEGABYTE,
        "reached": None if target is None else target_table([run], target, measure)[0].text,
        "provenance": provenance(run),
        "digests": run.digests,
    }


def _clients(run: StoredRun, names: Mapping[Path, str]) -> dict[str, Any]:
    """The clients of the run that the table of clients shows first."""
    record = last(run)
    return {"run": names[run.folder], "rows": [line for line in run.clients if record and line.round == record.round]}


def _times(members: Group) -> dict[str, Any] | None:
    """Seconds of a round by kind, and joules, mean over seeds and the rounds that tell; None if a seed has none."""
    spent = [[*timings(run).values()] for run in members.runs]
    if not all(spent):
        return None

    def mean(kind: Callable[[Any], float]) -> float:
        return fmean(fmean(map(kind, of_run)) for of_run in spent)

    local, server = mean(lambda s: s.local), mean(lambda s: s.server)
    evaluated = [
        sum(s.evaluation for s in of_run) / max(1, sum(record.evaluated for record in run.rounds))
        for of_run, run in zip(spent, members.runs, strict=True)
    ]
    energy = [[*joules(run).values()] for run in members.runs]
    taken = fmean(map(fmean, energy)) if all(energy) else None
    return {"label": members.label, "local": local, "server": server, "evaluation": fmean(evaluated), "joules": taken}


def shared(groups: Sequence[Group]) -> dict[str, str]:
    """The settings that all experiments have in common."""
    trees = [settings(members.runs[0]) for members in groups]
    others = set(differing(trees))
    return {key: value for key, value in trees[0].items() if key not in others}


def different(groups: Sequence[Group], *, by_method: bool) -> dict[str, list[tuple[str, str]]]:
    """By key of a setting that differs, each value with the experiments that have it, or how many if that is most.

    Args:
        groups: the experiments.
        by_method: the hyper-parameters, other than those of local training, in which only different methods differ: two
            methods may call unlike things a temperature. Otherwise all the others, on which a comparison depends.
    """
    trees = {members.label: settings(members.runs[0]) for members in groups}
    found: dict[str, list[tuple[str, str]]] = {}
    for key in differing(list(trees.values())):
        if _only_methods_differ(key, groups, trees) != by_method:
            continue
        owned = values_with_owners({label: tree[key] for label, tree in trees.items() if key in tree})
        if len(owned) > 1 and key != "method.name":
            found[key] = owned
    return found


def _only_methods_differ(key: str, groups: Sequence[Group], trees: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether a method's own setting has one value in all experiments of each method."""
    values: dict[str, set[str | None]] = {}
    for members in groups:
        values.setdefault(members.method, set()).add(trees[members.label].get(key))
    own = key.startswith("method.") and not key.startswith("method.training.")
    return own and all(len(found) == 1 for found in values.values())


def _configuration(run: StoredRun) -> str:
    return (run.folder / CONFIG).read_text(encoding="utf-8").strip()


def _stills(groups: Sequence[Group], how: Drawn) -> list[Still]:
    """The two main curves as drawings."""
    series = list(series_of([run for members in groups for run in members.runs], how.measure))[:2]
    found: list[Still | None] = []
    for item in series:
        unit = " (%)" if item.percent else ""
        title = item.label if item.kind == "training" else f"{item.kind}{unit}, {item.label}"
        text = partial(page_value, percent=item.percent)
        draw = partial(still, f"{title}, over rounds", groups, item.value, text, shares=item.percent)
        found.append(draw(smooth=how.smooth, target=how.target if item is series[0] else None))
    return [drawing for drawing in found if drawing]
