"""Tables of stored runs, as plain data.

Values are those of a run's primary metric; accuracies are shares between 0 and 1. Megabytes are 10^6 bytes, all clients
together, training messages only.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev

from potluck.analysis.groups import group
from potluck.analysis.names import labels
from potluck.analysis.read import StoredRun, chosen, last
from potluck.core.ground.errors import CheckpointError, ConfigError, nearest
from potluck.records import BUDGETS, Measure, Metric, RoundRecord

BYTES_PER_MEGABYTE = 10**6


@dataclass(frozen=True)
class Spread:
    """Mean of one number over `count` seeds, and its standard deviation (with count - 1); None for one seed."""

    mean: float
    std: float | None
    count: int


@dataclass(frozen=True)
class ArchitectureRow:
    """The clients of one architecture, at the last evaluated round and at the one chosen by validation.

    Attributes:
        architecture: its name.
        clients: the number of clients with it.
        personal_last: mean over them on their own test parts; `common_last` on the common test set.
        personal_chosen: the same at the chosen round, and `common_chosen`.
    """

    architecture: str
    clients: int
    personal_last: Spread | None
    common_last: Spread | None
    personal_chosen: Spread | None
    common_chosen: Spread | None


@dataclass(frozen=True)
class RunRow:
    """One run: its two headline rounds, and its traffic a round."""

    name: str
    label: str
    method: str
    dataset: str
    seed: int
    rounds: int
    rounds_planned: int
    last: RoundRecord | None
    chosen: RoundRecord | None
    megabytes_down: float
    megabytes_up: float


@dataclass(frozen=True)
class Headline:
    """An experiment's results at one of its two headline rounds, over its seeds.

    Attributes:
        rounds: the round of each seed.
        personal: mean over clients on their own test parts; `worst` of the worst client.
        common: mean over clients on the common test set.
        global_model: the server's model on the common test set.
    """

    rounds: tuple[int, ...]
    personal: Spread | None
    worst: Spread | None
    common: Spread | None
    global_model: Spread | None


@dataclass(frozen=True)
class GroupRow:
    """One experiment over its seeds."""

    label: str
    method: str
    dataset: str
    experiment_id: str
    seeds: tuple[int, ...]
    rounds: int
    last: Headline
    chosen: Headline
    megabytes_down: float
    megabytes_up: float


@dataclass(frozen=True)
class MetricRow:
    """One metric of an experiment at the last evaluated round, over its seeds.

    Attributes:
        metric: its name, direction and format.
        personal: mean over clients on their own test parts; `worst` of the worst client.
        pooled: on all own test parts as if they were one.
        common: mean over clients on the common test set.
        global_model: the server's model on the common test set.
    """

    metric: Metric
    personal: Spread | None
    worst: Spread | None
    pooled: Spread | None
    common: Spread | None
    global_model: Spread | None


@dataclass(frozen=True)
class TrafficRow:
    """The bytes in a round of one entry of the messages."""

    entry: str
    megabytes_down: float
    megabytes_up: float


@dataclass(frozen=True)
class NoteRow:
    """The last value of a note.

    Attributes:
        name: of the run.
        note: its name; `clients/NAME` for the mean over clients.
        round: the last round with it.
        value: its value in that round; `first` in the first, `low` and `high` the extremes over all rounds.
    """

    name: str
    note: str
    round: int
    value: float
    first: float
    low: float
    high: float


@dataclass(frozen=True)
class TargetRow:
    """When a run first reached a value of its primary metric.

    Attributes:
        name: of the run, and its `label` and `seed`.
        reached: the first evaluated round that is as good as the target; None if there was none until round `until`.
        until: the last evaluated round; None if there is none.
        speedup: the reference run's rounds divided by this run's; None if either did not reach the target.
    """

    name: str
    label: str
    seed: int
    reached: int | None
    until: int | None
    speedup: float | None

    @property
    def text(self) -> str:
        """The round, or `>T` if the target was not reached in T rounds."""
        if self.reached is not None:
            return str(self.reached)
        return "not evaluated" if self.until is None else f">{self.until}"


@dataclass(frozen=True)
class CurvePoint:
    """An evaluated round: its number, megabytes sent until then in both directions, and a metric over seeds."""

    round: int
    megabytes: float
    value: Spread


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and standard deviation of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known))


def metric_of(runs: Sequence[StoredRun]) -> Metric:
    """The primary metric of all these runs.

    Raises:
        CheckpointError: they have several, which cannot be compared.
    """
    metrics = {run.metric: run for run in reversed(runs)}
    if len(metrics) > 1:
        (first, one), (second, other), *_ = metrics.items()
        raise CheckpointError(
            f"{one.name} measures {first.label} and {other.name} {second.label}; report runs of one task at a time"
        )
    return runs[0].metric


def check_target(target: float | None, metric: Metric) -> None:
    """Check that runs can reach a target.

    Raises:
        ConfigError: it is no number, or no share, though the metric is one.
    """
    if target is None:
        return
    if not math.isfinite(target):
        raise ConfigError(f"target {target:g}: expected a number")
    if metric.percent and not 0 <= target <= 1:
        meant = target / 100 if 1 < target <= 100 else 0.6
        raise ConfigError(f"target {target:g}: {metric.label} is a share; expected 0 to 1, such as {meant:g}")


def traffic_megabytes(run: StoredRun) -> tuple[float, float]:
    """Traffic down and up in a round, mean over the run's rounds."""
    down = fmean(record.bytes_down for record in run.rounds)
    up = fmean(record.bytes_up for record in run.rounds)
    return down / BYTES_PER_MEGABYTE, up / BYTES_PER_MEGABYTE


def architecture_table(runs: Sequence[StoredRun]) -> list[ArchitectureRow]:
    """The architectures of one experiment; means over its seeds. Empty if nothing was evaluated."""
    at_last = [record for run in runs if (record := last(run))]
    at_chosen = [record for run in runs if (record := chosen(run))]
    counts, metric = _clients_by_architecture(runs), metric_of(runs)
    return [
        ArchitectureRow(
            architecture=name,
            clients=count,
            personal_last=spread(record.by_architecture("personal", metric.name).get(name) for record in at_last),
            common_last=spread(record.by_architecture("common", metric.name).get(name) for record in at_last),
            personal_chosen=spread(record.by_architecture("personal", metric.name).get(name) for record in at_chosen),
            common_chosen=spread(record.by_architecture("common", metric.name).get(name) for record in at_chosen),
        )
        for name, count in counts.items()
    ]


def run_table(runs: Sequence[StoredRun]) -> list[RunRow]:
    """The runs one by one."""
    return [
        RunRow(
            name=run.name,
            label=label,
            method=run.method,
            dataset=run.dataset,
            seed=run.seed,
            rounds=len(run.rounds),
            rounds_planned=run.rounds_planned,
            last=last(run),
            chosen=chosen(run),
            megabytes_down=traffic_megabytes(run)[0],
            megabytes_up=traffic_megabytes(run)[1],
        )
        for run, label in zip(runs, labels(runs), strict=True)
    ]


def group_table(runs: Sequence[StoredRun]) -> list[GroupRow]:
    """The experiments over their seeds."""
    return [
        GroupRow(
            label=members.label,
            method=members.method,
            dataset=members.dataset,
            experiment_id=members.runs[0].experiment_id,
            seeds=members.seeds,
            rounds=members.rounds,
            last=_headline([last(run) for run in members.runs], members.runs[0].metric),
            chosen=_headline([chosen(run) for run in members.runs], members.runs[0].metric),
            megabytes_down=fmean(traffic_megabytes(run)[0] for run in members.runs),
            megabytes_up=fmean(traffic_megabytes(run)[1] for run in members.runs),
        )
        for members in group(runs)
    ]


def metric_table(runs: Sequence[StoredRun]) -> list[MetricRow]:
    """Every metric that was measured in one experiment, at its last evaluated round; means over its seeds."""
    records = [record for run in runs if (record := last(run))]
    rows = [
        MetricRow(
            metric=metric,
            personal=spread(record.value("personal", metric.name) for record in records),
            worst=spread(record.value("personal_worst", metric.name) for record in records),
            pooled=spread(record.value("pooled", metric.name) for record in records),
            common=spread(record.value("common", metric.name) for record in records),
            global_model=spread(record.value("global", metric.name) for record in records),
        )
        for metric in runs[0].metrics
    ]
    return [row for row in rows if row.personal or row.pooled or row.common or row.global_model]


def traffic_table(runs: Sequence[StoredRun]) -> list[TrafficRow]:
    """Megabytes a round by entry of the messages; means over rounds, then over the runs of one experiment."""
    down = [[record.bytes_down_by_entry for record in run.rounds] for run in runs]
    up = [[record.bytes_up_by_entry for record in run.rounds] for run in runs]
    entries = {entry for sizes in (*down, *up) for of_round in sizes for entry in of_round}
    return [TrafficRow(entry, _mean_megabytes(down, entry), _mean_megabytes(up, entry)) for entry in sorted(entries)]


def warnings_of(runs: Sequence[StoredRun]) -> list[str]:
    """What runs warn of, such as clients that share nothing, or exceed their budgets; each line once."""
    found = [line for run in runs for line in (*(run.manifest.get("cautions") or ()), *_of_budgets(run.folder))]
    return list(dict.fromkeys(found))


def _of_budgets(folder: Path) -> list[str]:
    """What a run found of its clients' budgets; nothing if it has none, or the file is damaged."""
    try:
        return list(json.loads((folder / BUDGETS).read_text(encoding="utf-8"))["lines"])
    except (OSError, ValueError, LookupError, TypeError):
        return []


def note_table(runs: Sequence[StoredRun]) -> list[NoteRow]:
    """All notes, run by run; empty if there are none."""
    rows: list[NoteRow] = []
    for run in runs:
        seen: dict[str, list[tuple[int, float]]] = {}
        for record in run.rounds:
            for note, value in (record.notes or {}).items():
                seen.setdefault(note, []).append((record.round, value))
        for note, found in sorted(seen.items()):
            values = [value for _, value in found]
            (number, value), first = found[-1], values[0]
            rows.append(NoteRow(run.name, note, number, value, first, min(values), max(values)))
    return rows


def rounds_to(run: StoredRun, target: float, measure: Measure = "personal") -> int | None:
    """The first evaluated round at which the primary metric is as good as this, unsmoothed; None if there is none."""
    for record in run.rounds:
        value = record.value(measure, run.metric.name)
        if value is not None and not run.metric.better(target, value):
            return record.round
    return None


def target_table(
    runs: Sequence[StoredRun], target: float, measure: Measure = "personal", against: str | None = None
) -> list[TargetRow]:
    """Rounds to a value of the primary metric, run by run.

    Args:
        runs: to compare.
        target: the value to reach; an accuracy is a share between 0 and 1.
        measure: whose predictions, and on what.
        against: name of the run, among these, that the others' speed-up is measured against.

    Raises:
        CheckpointError: no run has the name `against`.
    """
    reference = rounds_to(_named(runs, against), target, measure) if against else None
    rows: list[TargetRow] = []
    for run, label in zip(runs, labels(runs), strict=True):
        reached = rounds_to(run, target, measure)
        until = record.round if (record := last(run)) else None
        rows.append(
            TargetRow(
                name=run.name,
                label=label,
                seed=run.seed,
                reached=reached,
                until=until,
                speedup=reference / reached if reference and reached else None,
            )
        )
    return rows


def curve(runs: Sequence[StoredRun], value: Callable[[RoundRecord], float | None], smooth: int = 1) -> list[CurvePoint]:
    """The curve of a metric of one experiment, at the rounds where all of its runs have it.

    Args:
        runs: of the experiment.
        value: of a round; None if it was not measured.
        smooth: of how many values of a run, up to each, the mean is taken, before that over runs.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        sent = accumulate(record.bytes_down + record.bytes_up for record in run.rounds)
        points = [
            (record.round, total, share)
            for record, total in zip(run.rounds, sent, strict=True)
            if (share := value(record)) is not None
        ]
        means = running_means([share for *_, share in points], smooth)
        for (number, total, _), mean in zip(points, means, strict=True):
            found.setdefault(number, []).append((total / BYTES_PER_MEGABYTE, mean))
    return [
        CurvePoint(number, fmean(total for total, _ in points), over_seeds)
        for number, points in sorted(found.items())
        if len(points) == len(runs) and (over_seeds := spread(share for _, share in points))
    ]


def running_means(values: Sequence[float], window: int) -> list[float]:
    """For each value the mean of the latest `window` up to it; of fewer where there are fewer."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _clients_by_architecture(runs: Sequence[StoredRun]) -> dict[str, int]:
    """Clients by architecture, the same for all seeds of an experiment; read from the first evaluated run."""
    for run in runs:
        if record := last(run):
            return dict(Counter(line.architecture for line in run.clients if line.round == record.round))
    return {}


def _headline(records: Iterable[RoundRecord | None], metric: Metric) -> Headline:
    known = [record for record in records if record]
    return Headline(
        rounds=tuple(record.round for record in known),
        personal=spread(record.value("personal", metric.name) for record in known),
        worst=spread(record.value("personal_worst", metric.name) for record in known),
        common=spread(record.value("common", metric.name) for record in known),
        global_model=spread(record.value("global", metric.name) for record in known),
    )


def _mean_megabytes(sizes: Sequence[Sequence[dict[str, int]]], entry: str) -> float:
    """The traffic of one entry, from its bytes by run and round."""
    return fmean(fmean(of_round.get(entry, 0) for of_round in of_run) for of_run in sizes) / BYTES_PER_MEGABYTE


def _named(runs: Sequence[StoredRun], name: str) -> StoredRun:
    for run in runs:
        if run.name == name:
            return run
    names = [run.name for run in runs]
    raise CheckpointError(
        f"no run {name!r} to compare with; expected the name of one of these: {', '.join(nearest(name, names))}"
    )
