"""How many rounds experiments take to a target, and how much faster that is than FedAvg."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from potluck.analysis.blocks import places_of
from potluck.analysis.compare import Interval, had_same_data, interval
from potluck.analysis.groups import Group, group
from potluck.analysis.read import StoredRun, last
from potluck.analysis.tables import rounds_to
from potluck.records import Measure

BASELINE = "fedavg"
"""The method that speed-ups are measured against."""


@dataclass(frozen=True)
class Speed:
    """An experiment's way to a target.

    Attributes:
        experiment: its label.
        seeds: how many there are, of which `reached` reached the target.
        rounds: the first round that did, mean over these seeds.
        until: the last evaluated round of the longest run.
        against: label of FedAvg's experiment, in the same setting; None if there is none, and for it itself.
        speedup: the rounds of FedAvg over those of the experiment, seed by seed, where both reached it.
    """

    experiment: str
    seeds: int
    reached: int
    rounds: Interval | None
    until: int
    against: str | None
    speedup: Interval | None

    @property
    def text(self) -> str:
        """The rounds, or `>T` if no seed reached the target in T rounds."""
        return f">{self.until}" if self.rounds is None else f"{self.rounds.mean:.4g}"


def speeds(runs: Sequence[StoredRun], target: float, measure: Measure) -> list[Speed]:
    """The way of each experiment to a value of the primary metric, in order of appearance."""
    groups = {members.label: members for members in group(runs)}
    places = {place.label: place for place in places_of(runs)}
    baselines: dict[str, Group] = {}
    for label, members in groups.items():
        if members.method == BASELINE:
            baselines.setdefault(places[label].block, members)
    return [
        _speed(members, baselines.get(places[label].block), target, measure)
        for label, members in groups.items()
        if any(last(run) for run in members.runs)
    ]


def _speed(members: Group, baseline: Group | None, target: float, measure: Measure) -> Speed:
    ends = {run.seed: rounds_to(run, target, measure) for run in members.runs}
    beside = baseline if baseline and baseline.label != members.label else None
    others = {run.seed: run for run in beside.runs} if beside else {}
    ratios = [_ratio(run, ends[run.seed], others, target, measure) for run in members.runs]
    return Speed(
        experiment=members.label,
        seeds=len(members.runs),
        reached=sum(end is not None for end in ends.values()),
        rounds=interval(ends.values()),
        until=max(record.round for run in members.runs if (record := last(run))),
        against=beside.label if beside else None,
        speedup=interval(ratios),
    )


def _ratio(
    run: StoredRun, end: int | None, others: Mapping[int, StoredRun], target: float, measure: Measure
) -> float | None:
    """FedAvg's rounds with the same seed and data over the run's; None if one did not reach the target."""
    other = others.get(run.seed)
    if end is None or other is None or not had_same_data(run, other):
        return None
    theirs = rounds_to(other, target, measure)
    return None if theirs is None else theirs / end
