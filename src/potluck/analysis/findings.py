"""What an analysis of runs finds: who profits and who loses, how fairly, at what cost, and what the models show."""

from collections.abc import Sequence
from dataclasses import dataclass

from potluck.analysis.compare import At, ComparedRow, Interval, compare, confidence_interval, interval, record_at
from potluck.analysis.gains import ALONE, ClientGain, Gain, gains
from potluck.analysis.groups import Group, enumerated, group
from potluck.analysis.inside import Inside
from potluck.analysis.names import run_names
from potluck.analysis.numbers.fairness import Fairness, fairness
from potluck.analysis.parted import ClassGain, GroupGain, class_gains, group_gains
from potluck.analysis.read import StoredRun
from potluck.analysis.speed import Speed, speeds
from potluck.analysis.tables import check_target, metric_of
from potluck.core.ground.errors import ConfigError
from potluck.records import TITLES_OF_A_CLIENT, Measure, Metric

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
        groups: what groups of test examples gain, by what models predict; `classes` what each client's classes gain.
        speeds: of each experiment the rounds to the target; empty without one.
        remarks: what is left out, and why.
    """

    runs: tuple[StoredRun, ...]
    metric: Metric
    measure: Measure
    gains: tuple[Gain, ...]
    fairness: tuple[FairnessRow, ...]
    rows: tuple[ComparedRow, ...]
    inside: tuple[Inside, ...] = ()
    groups: tuple[GroupGain, ...] = ()
    classes: tuple[ClassGain, ...] = ()
    speeds: tuple[Speed, ...] = ()
    remarks: tuple[str, ...] = ()

    def class_name(self, number: int) -> str:
        """What a class is called, the same in all runs; else its number."""
        known = {tuple(run.manifest.get("classes") or ()) for run in self.runs}
        names = known.pop() if len(known) == 1 else ()
        name = names[number] if number < len(names) else str(number)
        return f"class {name}" if name.isdecimal() else name

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
    found = gains(runs, measure, at=at, alone=alone)
    folders = {name: run.folder for name, run in zip(run_names(runs), runs, strict=True)}
    seen = {folders[one.name]: one for one in inside if one.name in folders}
    said = [*remarks, *(f"{one.experiment}: {remark}" for one in inside for remark in one.remarks)]
    return Findings(
        runs=tuple(runs),
        metric=metric_of(runs),
        measure=measure,
        gains=tuple(found),
        fairness=tuple(row for members in group(runs) if (row := _fairness(members, measure, at))),
        rows=tuple(compare(runs, measure, at=at, target=target)),
        inside=tuple(inside),
        groups=tuple(group_gains(found, seen)),
        classes=tuple(class_gains(found, seen)),
        speeds=() if target is None else tuple(speeds(runs, target, measure)),
        remarks=tuple(dict.fromkeys(said)),
    )


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
    named = [one.name.removeprefix("client ") for one in losing[:_FEW]]
    named += [f"{len(losing) - _FEW} more"] if len(losing) > _FEW else []
    certainty = f", {_beyond(losing)} beyond chance" if any(one.p is not None for one in gain.clients) else ""
    verb, noun = ("loses", "client ") if len(losing) == 1 else ("lose", "clients ")
    noun = noun if losing[0].name.startswith("client ") else ""
    most = points(metric, losing[0].gain.mean)
    return f"{len(losing)} {verb}: {noun}{enumerated(named)} (the most {most}{certainty})"


def _beyond(losing: Sequence[ClientGain]) -> str:
    """How many of them the test tells from chance, as words before "beyond chance"."""
    sure = sum(one.sure for one in losing)
    if len(losing) == 1:
        return "and" if sure else "not"
    return f"{sure or 'none'} of them"
