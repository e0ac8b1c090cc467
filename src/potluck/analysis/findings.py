"""What an analysis of runs finds: who profits and who loses, how fairly, at what cost, and what the models show."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from potluck.analysis.compare import At, ComparedRow, Interval, compare, confidence_interval, interval, record_at
from potluck.analysis.gains import ALONE, ClientGain, Gain, gains
from potluck.analysis.groups import Group, enumerated, group
from potluck.analysis.inside import Inside, Map
from potluck.analysis.numbers.fairness import Fairness, fairness
from potluck.analysis.read import StoredRun
from potluck.analysis.tables import check_target, metric_of
from potluck.core.ground.errors import ConfigError
from potluck.records import TITLES_OF_A_CLIENT, Measure, Metric

Numbers = list[dict[str, Any]]
"""Numbers of numbers and words by column; None where there is none."""
_FEW = 5


@dataclass(frozen=True)
class FairnessRow:
    """How evenly an experiment's metric is spread over clients, over its seeds; see `Fairness`."""

    experiment: str
    seeds: int
    mean: Interval
    spread: Interval
    worst: Interval
    worst_tenth: Interval
    gini: Interval | None


@dataclass(frozen=True)
class Findings:
    """All that was found of some runs.

    Attributes:
        runs: the runs.
        metric: the primary metric, of which gains and fairness are.
        measure: on what the clients' models were scored.
        gains: of each experiment beside training alone.
        fairness: of each experiment.
        rows: the comparison of the experiments, with what they cost.
        inside: what the models of each run show, where they could be made.
        remarks: what is left out, and why.
    """

    runs: tuple[StoredRun, ...]
    metric: Metric
    measure: Measure
    gains: tuple[Gain, ...]
    fairness: tuple[FairnessRow, ...]
    rows: tuple[ComparedRow, ...]
    inside: tuple[Inside, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def sentences(self) -> list[str]:
        """Who profits and who loses, one sentence for each experiment, the one with the largest gain first."""
        if not self.gains:
            return [
                f"Who profits and who loses cannot be told: none of these runs is of {ALONE} on the same federation as"
                f" another, with the same seed and as many rounds; run `potluck run {ALONE} …` with the same settings,"
                " and analyse it too."
            ]
        labels = {label for gain in self.gains for label in (gain.experiment, gain.against)}
        missing = [row.label for row in self.rows if row.label not in labels]
        others = [f"There is no run of {ALONE} to hold beside {enumerated(missing)}."] if missing else []
        return [*gain_sentences(self.gains, self.metric), *others]

    @property
    def tables(self) -> dict[str, Numbers]:
        """All numbers by the name of the table; tables without rows are left out."""
        found = {
            "gains": [_of_gain(gain) for gain in self.gains],
            "clients": [row for gain in self.gains for row in _of_clients(gain)],
            "architectures": [row for gain in self.gains for row in _of_architectures(gain)],
            "classes": [row for gain in self.gains for row in _of_classes(gain)],
            "fairness": [_flat(row) for row in self.fairness],
            "costs": [_of_costs(row) for row in self.rows],
            "similarity": [row for inside in self.inside for row in _of_similarity(inside)],
            "drift": [{**_run(inside), **_flat(row)} for inside in self.inside for row in inside.drift],
            "calibration": [row for inside in self.inside for row in _of_calibration(inside)],
            "bins": [row for inside in self.inside for row in _of_bins(inside)],
            "separation": [_of_map(inside, inside.map) for inside in self.inside if inside.map],
            "map": [{**_run(one), **_flat(point)} for one in self.inside if one.map for point in one.map.points],
            **_over_rounds([one for one in self.inside if len(one.moments) > 1]),
        }
        return {name: rows for name, rows in found.items() if rows}


def find(
    runs: Sequence[StoredRun],
    inside: Sequence[Inside] = (),
    *,
    measure: Measure = "personal",
    at: At = "last",
    alone: str | None = None,
    target: float | None = None,
    remarks: Sequence[str] = (),
) -> Findings:
    """What the records of these runs tell, together with what their models show.

    Args:
        runs: of one task.
        inside: what the models show.
        measure: on what the clients' models are scored.
        at: which round of each run counts.
        alone: name of the experiment that stands for training alone; by default the one of the method `local`.
        target: a value of the metric to reach.
        remarks: what is left out, and why.

    Raises:
        ConfigError: it is no measure of single clients, no target that can be reached, or no experiment is `alone`.
        CheckpointError: the runs have several primary metrics.
    """
    if measure not in TITLES_OF_A_CLIENT:
        raise ConfigError(
            f"measure {measure!r}: who profits is told by scores of single clients; expected one of"
            f" {', '.join(TITLES_OF_A_CLIENT)}"
        )
    check_target(target, metric_of(runs))
    said = [*remarks, *(f"{one.experiment}: {remark}" for one in inside for remark in one.remarks)]
    return Findings(
        runs=tuple(runs),
        metric=metric_of(runs),
        measure=measure,
        gains=tuple(gains(runs, measure, at=at, alone=alone)),
        fairness=tuple(row for members in group(runs) if (row := _fairness(members, measure, at))),
        rows=tuple(compare(runs, measure, at=at, target=target)),
        inside=tuple(inside),
        remarks=tuple(dict.fromkeys(said)),
    )


def as_csv(rows: Numbers) -> str:
    """A table as CSV."""
    text = io.StringIO()
    out = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    out.writeheader()
    out.writerows(rows)
    return text.getvalue()


def points(metric: Metric, value: float) -> str:
    """A difference of a metric, with its sign; of shares in percentage points."""
    return f"{100 * value:+.1f} points" if metric.percent else f"{value:+.4g}"


def _fairness(members: Group, measure: Measure, at: At) -> FairnessRow | None:
    """Of an experiment over its seeds; None if nothing was measured."""
    metric, found = members.runs[0].metric, list[Fairness]()
    for run in members.runs:
        record = record_at(run, at)
        lines = [line.value(measure, metric.name) for line in run.clients if record and line.round == record.round]
        if values := [value for value in lines if value is not None]:
            found.append(fairness(values, higher_is_better=metric.higher_is_better))
    if not found:
        return None
    return FairnessRow(
        experiment=members.label,
        seeds=len(found),
        mean=confidence_interval(one.mean for one in found),
        spread=confidence_interval(one.spread for one in found),
        worst=confidence_interval(one.worst for one in found),
        worst_tenth=confidence_interval(one.worst_tenth for one in found),
        gini=interval(one.gini for one in found),
    )


def gain_sentences(found: Sequence[Gain], metric: Metric) -> list[str]:
    """Who profits and who loses, one sentence for each experiment, the one with the largest gain first."""
    return [_sentence(gain, metric) for gain in sorted(found, key=lambda gain: -gain.over_seeds.mean)]


def _sentence(gain: Gain, metric: Metric) -> str:
    """Of one experiment: how many profit, by how much, and which clients lose."""
    mean, count = gain.over_seeds, len(gain.clients)
    between = ""
    if mean.half is not None:
        low, high = points(metric, mean.mean - mean.half), points(metric, mean.mean + mean.half)
        low, high = low.removesuffix(" points"), high.removesuffix(" points")
        between = f", 95 % interval {low} to {high} over {mean.count} seeds"
    verb = "does" if len(gain.profiting) == 1 else "do"
    words = f"With {gain.experiment} {len(gain.profiting)} of {count} clients {verb} better than alone"
    words += f" ({points(metric, mean.mean)} in the mean{between})"
    return f"{words}; {_losing(gain, metric)}."


def _losing(gain: Gain, metric: Metric) -> str:
    losing = gain.losing
    if not losing:
        return "nobody loses"
    named = [str(one.client) for one in losing[:_FEW]]
    named += [f"{len(losing) - _FEW} more"] if len(losing) > _FEW else []
    certainty = f", {_beyond(losing)} beyond chance" if any(one.p is not None for one in gain.clients) else ""
    verb, noun = ("loses", "client") if len(losing) == 1 else ("lose", "clients")
    most = points(metric, losing[0].gain.mean)
    return f"{len(losing)} {verb}: {noun} {enumerated(named)} (the most {most}{certainty})"


def _beyond(losing: Sequence[ClientGain]) -> str:
    """How many of them the test tells from chance, as words before "beyond chance"."""
    sure = sum(one.sure for one in losing)
    if len(losing) == 1:
        return "and" if sure else "not"
    return f"{sure or 'none'} of them"


def _run(inside: Inside) -> dict[str, Any]:
    return {"run": inside.name, "experiment": inside.experiment, "round": inside.round}


def _flat(row: Any) -> dict[str, Any]:
    """The fields of a row, an interval as its mean and, under `NAME_half`, its half width."""
    found: dict[str, Any] = {}
    for spec in fields(row):
        value = getattr(row, spec.name)
        found |= _both(spec.name, value) if isinstance(value, Interval) else {spec.name: value}
    return found


def _both(name: str, value: Interval | None) -> dict[str, Any]:
    return {name: value and value.mean, f"{name}_half": value and value.half}


def _of_gain(gain: Gain) -> dict[str, Any]:
    return {
        "experiment": gain.experiment,
        "against": gain.against,
        "seeds": gain.over_seeds.count,
        "clients": len(gain.clients),
        "profiting": len(gain.profiting),
        "losing": len(gain.losing),
        "surely_profiting": sum(one.sure for one in gain.profiting),
        "surely_losing": sum(one.sure for one in gain.losing),
        "gain": gain.over_seeds.mean,
        "gain_half_over_seeds": gain.over_seeds.half,
        "gain_half_over_clients": gain.over_clients.half,
        "p": gain.p,
    }


def _of_clients(gain: Gain) -> Numbers:
    return [
        {"experiment": gain.experiment, **_flat(one), "seeds": one.gain.count, "sure": one.sure} for one in gain.clients
    ]


def _of_architectures(gain: Gain) -> Numbers:
    return [
        {"experiment": gain.experiment, "architecture": name, **_both("gain", over), "seeds": over.count}
        for name, over in gain.by_architecture.items()
    ]


def _of_classes(gain: Gain) -> Numbers:
    return [
        {"experiment": gain.experiment, "class": number, **_both("gain", over), "seeds": over.count}
        for number, over in gain.by_class.items()
    ]


def _of_costs(row: ComparedRow) -> dict[str, Any]:
    found = {"experiment": row.label, "block": row.block, "seeds": len(row.seeds), "rounds": row.rounds}
    for name, value in row.scores.items():
        found |= _both(name, value)
    found |= {**_both("megabytes", row.megabytes), **_both("seconds", row.seconds)}
    if row.reached:
        found["seeds_at_target"] = row.reached.count
        for name in ("rounds", "megabytes", "seconds"):
            found |= _both(f"{name}_to_target", getattr(row.reached, name))
    return found


def _of_similarity(inside: Inside) -> Numbers:
    return [{**_run(inside), "examples": inside.examples, **_flat(row)} for row in inside.similarity]


def _of_map(inside: Inside, found: Map) -> dict[str, Any]:
    return {
        **_run(inside),
        "clients": len(found.clients),
        "width": found.width,
        "points": len(found.points),
        "silhouette_by_client": found.by_client,
        "silhouette_by_class": found.by_class,
    }


def _over_rounds(inside: Sequence[Inside]) -> dict[str, Numbers]:
    """What curves over rounds are drawn of."""
    moments = [({**_run(one), "round": moment.round}, moment) for one in inside for moment in one.moments]
    return {
        "similarity_by_round": [
            {**of, "stage": stage, "cka": exact, "unbiased_cka": unbiased}
            for of, moment in moments
            for stage, (exact, unbiased) in moment.similarity.items()
        ],
        "separation_by_round": [
            {**of, "silhouette_by_client": moment.by_client, "silhouette_by_class": moment.by_class}
            for of, moment in moments
            if moment.by_client is not None
        ],
        "drift_by_round": [{**of, **_flat(row)} for of, moment in moments for row in moment.drift],
    }


_OF_BINS = ("counts", "hits", "sure")


def _of_calibration(inside: Inside) -> Numbers:
    return [
        {
            **_run(inside),
            "whose": one.whose,
            "clients": one.clients,
            **{name: value for name, value in _flat(one.values).items() if name not in _OF_BINS},
        }
        for one in inside.calibration
    ]


def _of_bins(inside: Inside) -> Numbers:
    """Bins with examples, of confidence from `low` on to below `high`."""
    return [
        {
            **_run(inside),
            "whose": one.whose,
            "low": place / len(one.values.counts),
            "high": (place + 1) / len(one.values.counts),
            "examples": count,
            "accuracy": one.values.hits[place] / count,
            "confidence": one.values.sure[place] / count,
        }
        for one in inside.calibration
        for place, count in enumerate(one.values.counts)
        if count
    ]
