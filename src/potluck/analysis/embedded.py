"""The numbers that a report's page holds for its script: curves, clients, classes and the division of the data.

They are those of the records, with six significant digits, or all digits where six would be shown as another number.
The page has a limited size. What matters least is left out first, and what was left out is named.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from potluck.analysis.costs import COSTS
from potluck.analysis.groups import Group
from potluck.analysis.plots.drawn import AS_MEASURED, Drawn
from potluck.analysis.read import StoredRun, by_class, last, partition, seconds
from potluck.analysis.tables import BYTES_PER_MEGABYTE, running_means
from potluck.records import TITLES, TITLES_OF_A_CLIENT, Measure, Metric, RoundRecord

ValueOf = Callable[[RoundRecord], float | None]
Json = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """One quantity that has a curve.

    Attributes:
        id: its name, unique in the page.
        label: the name shown to readers, in the group `kind`.
        value: of a round; None if it was not measured.
        percent: whether values are shares.
        higher: whether higher is better; None if neither is.
    """

    id: str
    kind: str
    label: str
    value: ValueOf
    percent: bool = False
    higher: bool | None = None

    @property
    def facts(self) -> Json:
        """What the script is told of it."""
        return {
            "id": self.id,
            "kind": self.kind,
            "label": self.label,
            "percent": self.percent,
            "higher": self.higher,
        }


@dataclass
class Embedded:
    """The numbers of a page.

    Attributes:
        content: for the script, as JSON can hold it.
        left_out: what did not fit, in words.
    """

    content: Json
    left_out: list[str] = field(default_factory=list[str])


def embedded(
    groups: Sequence[Group],
    names: Mapping[Path, str],
    budget: int,
    how: Drawn = AS_MEASURED,
) -> Embedded:
    """The numbers of these experiments.

    Args:
        groups: the experiments.
        names: of runs by their folders.
        budget: about so many bytes of JSON at most.
        how: curves are drawn.
    """
    runs = [run for members in groups for run in members.runs]
    page = _Page(budget)
    target = None if how.target is None else {"series": _id(runs[0].metric, how.measure), "value": how.target}
    content: Json = {
        "series": [],
        "rounds": [],
        "classes": _class_names(runs),
        "smooth": how.smooth,
        "target": target,
    }
    content["experiments"] = [_experiment(members, names) for members in groups]
    every = _every(runs, page, how.smooth)
    rounds: dict[tuple[int, ...], int] = {}
    for run, into in zip(runs, _runs_of(content), strict=True):
        into["spent"] = _spent(run, every, rounds)
    take = partial(_curves, every=every, rounds=rounds, smooth=how.smooth)
    offered = [(series, take(series, runs)) for series in series_of(runs, how.measure)]
    essential = [item for item in offered if any(curve for curve in item[1])]
    alone = [_by_architecture(groups[0], take)] if len(groups) == 1 else []
    further = [_further(run, every) for run in runs]
    page.take([content, list(rounds)])
    clients, partitions, classes = _clients(runs), _partitions(runs, names), [_by_class(members) for members in groups]
    parts: list[tuple[str, Any]] = [
        *((f"the curve of {series.label} ({series.kind})", (series, curves)) for series, curves in essential[:3]),
        *(("the curves of single architectures", {"by_architecture": curves}) for curves in alone),
        *([("the axes of further costs", {"further": further})] if any(further) else []),
        ("the division of the classes among clients", {"partitions": partitions}),
        ("the tables of single clients", {"clients": clients[0]}),
        ("the matrices of actual and predicted classes", {"by_class": classes}),
        *((f"the curve of {series.label} ({series.kind})", (series, curves)) for series, curves in essential[3:]),
        *([("further metrics of single clients", {"clients_more": clients[1]})] if clients[1]["columns"] else []),
    ]
    for name, part in parts:
        if not page.take(_as_added(*part) if isinstance(part, tuple) else part):
            page.left_out.append(name)
        elif isinstance(part, tuple):
            _add_curves(content, *part)
        else:
            content |= part
    for into, spent in zip(_runs_of(content), content.pop("further", []), strict=False):
        into["spent"] |= spent
    content["rounds"] = [list(numbers) for numbers in rounds]
    return Embedded(content, page.left_out)


class _Page:
    """What still fits."""

    def __init__(self, budget: int) -> None:
        self._left = budget
        self.left_out: list[str] = []

    @property
    def left(self) -> int:
        return self._left

    def take(self, part: Any) -> bool:
        """Whether this fits; if so, it takes its room."""
        size = len(as_json(part))
        if size > self._left:
            return False
        self._left -= size
        return True


def as_json(content: Any) -> str:
    """Compact JSON, which can stand in an element of a page: it has none of the characters that begin or end one."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def series_of(runs: Sequence[StoredRun], first: Measure = "personal") -> Iterator[Series]:
    """Every quantity that these runs may have recorded: this measure, and then the most important first."""
    primary, *others = runs[0].metrics
    main = [_measured(primary, measure) for measure in dict.fromkeys((first, *TITLES))]
    yield main[0]
    yield Series("loss", "training", "training loss", lambda record: record.loss_local, higher=False)
    yield main[1]
    yield main[2]
    yield Series(
        f"{primary.name}.worst",
        primary.label,
        "worst client",
        lambda record: record.value("personal_worst", primary.name),
        primary.percent,
        primary.higher_is_better,
    )
    yield from main[3:]
    yield from (_measured(metric, measure) for measure in TITLES for metric in others)
    notes = dict.fromkeys(note for run in runs for record in run.rounds for note in record.notes or {})
    yield from (Series(f"note.{note}", "notes of the method", note, _noted(note)) for note in notes)


def short(value: float, percent: bool) -> float | int:
    """A number with six significant digits, or all of them if it would be shown as another number otherwise."""
    few = float(f"{value:.6g}")
    if page_value(few, percent) != page_value(value, percent):
        return value
    return int(few) if few.is_integer() and abs(few) < 1e15 else few


def page_value(value: float, percent: bool) -> str:
    """A value as the page shows it: a share as a percentage with one decimal, other numbers with four digits."""
    return f"{100 * value:.1f}" if percent else f"{value:.4g}"


def _measured(metric: Metric, measure: Measure) -> Series:
    def value(record: RoundRecord) -> float | None:
        return record.value(measure, metric.name)

    return Series(_id(metric, measure), metric.label, TITLES[measure], value, metric.percent, metric.higher_is_better)


def _id(metric: Metric, measure: Measure) -> str:
    return f"{metric.name}.{measure}"


def _noted(note: str) -> ValueOf:
    return lambda record: (record.notes or {}).get(note)


def _experiment(members: Group, names: Mapping[Path, str]) -> Json:
    facts = [{"name": names[run.folder], "seed": run.seed, "curves": {}} for run in members.runs]
    return {"name": members.label, "runs": facts}


def _runs_of(content: Json) -> list[Json]:
    return [run for experiment in content["experiments"] for run in experiment["runs"]]


def _every(runs: Sequence[StoredRun], page: _Page, smooth: int) -> int:
    """Every how many rounds a curve has a point: 1, unless the longest curve of each run would not fit."""
    points = sum(len(run.rounds) for run in runs)
    size = _BYTES_A_NUMBER * (_SPENT + _MAIN_CURVES * (2 if smooth > 1 else 1))
    every = max(1, -(-points * size // max(page.left, 1)))
    if every > 1:
        page.left_out.append(f"all points of the curves but those of every {every}th round and of the last evaluation")
    return every


_BYTES_A_NUMBER = 9
_SPENT, _MAIN_CURVES = 2, 3  # time and traffic; curves that are there before anything else


def _kept(run: StoredRun, every: int) -> list[RoundRecord]:
    final = last(run) or run.rounds[-1]
    return [record for record in run.rounds if record.round % every == 0 or record in (final, run.rounds[0])]


def _spent(run: StoredRun, every: int, rounds: dict[tuple[int, ...], int]) -> Json:
    """Megabytes and seconds of training until each round."""
    kept = _kept(run, every)
    sent = list(accumulate((record.bytes_down + record.bytes_up) / BYTES_PER_MEGABYTE for record in run.rounds))
    known = seconds(run)
    time = list(accumulate(known.get(record.round, 0.0) for record in run.rounds))
    found = {"megabytes": sent, **({"seconds": time} if known else {})}
    curves = {name: [short(values[record.round - 1], False) for record in kept] for name, values in found.items()}
    return {"at": _place(rounds, [record.round for record in kept]), **curves}


def _further(run: StoredRun, every: int) -> Json:
    """What else was spent until each round of `_spent`, where it is known of all rounds."""
    found: Json = {}
    for cost in COSTS:
        spent = {} if cost.name in _FIRST else cost.spent(run)
        if spent and all(record.round in spent for record in run.rounds):
            until = list(accumulate(spent[record.round] for record in run.rounds))
            found[cost.name] = [short(until[record.round - 1], False) for record in _kept(run, every)]
    return found


_FIRST = ("rounds", "megabytes", "seconds")  # the axes that are there whatever room there is


def _curves(
    series: Series, runs: Sequence[StoredRun], every: int, rounds: dict[tuple[int, ...], int], smooth: int
) -> list[list[Any]]:
    """Of each run the place of its list of rounds, its values, and the smoothed ones; nothing for a run without any."""
    found: list[list[Any]] = []
    for run in runs:
        measured = {record.round: value for record in run.rounds if (value := series.value(record)) is not None}
        means = dict(zip(measured, running_means(list(measured.values()), smooth), strict=True))
        kept = [record.round for record in _kept(run, every) if record.round in measured]
        curves = [[short(of[number], series.percent) for number in kept] for of in (measured, means)]
        found.append([_place(rounds, kept), *(curves if smooth > 1 else curves[:1])] if kept else [])
    return found


def _by_architecture(members: Group, take: Callable[[Series, Sequence[StoredRun]], list[list[Any]]]) -> list[Json]:
    """The primary metric's curves of the architectures of one experiment, run by run."""
    metric = members.runs[0].metric
    found: dict[str, Json] = {}
    for measure in ("personal", "common"):
        records = [record for run in members.runs for record in run.rounds]
        names = dict.fromkeys(name for r in records for name in r.by_architecture(measure, metric.name))
        for name in names:
            series = replace(_measured(metric, measure), value=_of_architecture(measure, metric, name))
            curves = take(series, members.runs)
            found.setdefault(name, {"name": name, "curves": {}})["curves"][series.id] = curves
    return list(found.values())


def _of_architecture(measure: Measure, metric: Metric, name: str) -> ValueOf:
    return lambda record: record.by_architecture(measure, metric.name).get(name)


def _place(rounds: dict[tuple[int, ...], int], numbers: Iterable[int]) -> int:
    """The place of this list of rounds among the known ones, to which it is added."""
    return rounds.setdefault(tuple(numbers), len(rounds))


def _as_added(series: Series, curves: Sequence[list[Any]]) -> list[Any]:
    """What `_add_curves` adds."""
    return [series.facts, *({series.id: curve} for curve in curves if curve)]


def _add_curves(content: Json, series: Series, curves: Sequence[list[Any]]) -> None:
    content["series"].append(series.facts)
    for run, curve in zip(_runs_of(content), curves, strict=True):
        if curve:
            run["curves"][series.id] = curve


def _clients(runs: Sequence[StoredRun]) -> tuple[Json, Json]:
    """The clients of each run at its last evaluated round: by the primary metric, and by the others."""
    architectures: dict[str, int] = {}
    primary, *others = runs[0].metrics
    columns: list[tuple[Metric, Measure]] = [
        (metric, measure) for metric in (primary, *others) for measure in TITLES_OF_A_CLIENT
    ]
    rows: list[list[list[Any]]] = []
    more: list[list[list[Any]]] = []
    for run in runs:
        record = last(run)
        lines = [line for line in run.clients if record and line.round == record.round]
        values = [[_short(line.value(measure, metric.name), metric) for metric, measure in columns] for line in lines]
        numbered = [architectures.setdefault(line.architecture, len(architectures)) for line in lines]
        facts = [
            [line.client, number, line.examples_train, line.examples_test]
            for line, number in zip(lines, numbered, strict=True)
        ]
        rows.append([[*fact, *of[:3]] for fact, of in zip(facts, values, strict=True)])
        more.append([of[3:] for of in values])
    titles = [
        {"metric": metric.label, "measure": TITLES_OF_A_CLIENT[of], "percent": metric.percent} for metric, of in columns
    ]
    few = {"architectures": list(architectures), "columns": titles[:3], "rows": rows}
    return few, {"columns": titles[3:], "rows": more}


def _short(value: float | None, metric: Metric) -> float | int | None:
    return None if value is None else short(value, metric.percent)


def _class_names(runs: Sequence[StoredRun]) -> list[str]:
    return [str(name) for name in next((run.manifest["classes"] for run in runs if run.manifest.get("classes")), [])]


def _partitions(runs: Sequence[StoredRun], names: Mapping[Path, str]) -> list[Json]:
    """The different divisions of the classes, each with the names of the runs that had it."""
    found: dict[str, Json] = {}
    for run in runs:
        if division := partition(run):
            key = json.dumps(division.train)
            found.setdefault(key, {"train": division.train, "seeds": [], "runs": []})
            found[key]["runs"].append(names[run.folder])
            if run.seed not in found[key]["seeds"]:
                found[key]["seeds"].append(run.seed)
    return list(found.values())


def _by_class(members: Group) -> Json | None:
    """Counts by class of one experiment, added up over its seeds; None unless all of them have some."""
    tables = [by_class(run) for run in members.runs]
    known = [table for table in tables if table]
    if len(known) < len(tables) or len({len(table.counts[0]) for table in known}) > 1:
        return None
    matrices = [table.confusion for table in known if table.confusion]
    return {
        "counts": _added([table.counts for table in known]),
        "confusion": _added(matrices) if len(matrices) == len(known) else None,
        "runs": len(known),
    }


def _added(tables: Sequence[list[list[int]]]) -> list[list[int]]:
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]
