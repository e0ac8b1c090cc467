"""The comparison of experiments: means with intervals over seeds, paired tests, and what it took to reach a target."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any, Literal, cast

from potluck.analysis.blocks import places_of, references
from potluck.analysis.groups import Group, group
from potluck.analysis.names import short_of
from potluck.analysis.read import StoredRun, chosen, last, seconds
from potluck.analysis.settings import differing, every_setting, settings
from potluck.analysis.tables import BYTES_PER_MEGABYTE, rounds_to
from potluck.records import MAIN_MEASURES, Measure, RoundRecord

At = Literal["last", "chosen"]
"""The last evaluated round of each run, or the one that is best on validation parts."""
CONFIDENCE = 0.95
_CHECKSUM, _DIGITS = "data_checksum", 12


@dataclass(frozen=True)
class Interval:
    """Mean of one number over `count` seeds, with the half width of its interval of 95 % confidence.

    The interval is Student's. It has no width for a single seed.
    """

    mean: float
    half: float | None
    count: int


@dataclass(frozen=True)
class Difference:
    """How far an experiment is from the reference, seed by seed.

    Attributes:
        by: mean of the differences within a seed, with its interval.
        p: of the paired t-test, two-sided, adjusted by Holm's method for the number of experiments that are tested;
            None for fewer than two seeds in common, and where all differences are equal.
    """

    by: Interval
    p: float | None


@dataclass(frozen=True)
class Reached:
    """What it took to reach a target.

    Attributes:
        count: the seeds that reached it, of `seeds`.
        rounds: until then, mean over the seeds that reached it; `megabytes` and `seconds` likewise.
    """

    count: int
    seeds: int
    rounds: Interval | None = None
    megabytes: Interval | None = None
    seconds: Interval | None = None


@dataclass(frozen=True)
class ComparedRow:
    """One experiment over its seeds, beside the others.

    Attributes:
        label: what distinguishes it from all others.
        block: what its block has in common, such as "partition=iid"; empty if all experiments are in one.
        name: what distinguishes it from the others of its block, which differ in nothing but the method.
        against: name of the experiment that its block is compared with; None if the block lacks it.
        settings: of its configuration, by dotted key, all but the seed.
        seeds: the seeds, in order.
        rounds: the number of rounds of each run.
        scores: by measure, the primary metric at the round that is compared.
        difference: from the reference of its block; None for the reference itself, and without a pair of runs.
        megabytes: sent for training in all rounds and both directions.
        seconds: of training in all rounds, evaluation apart, on the machine that ran them; None if not known.
        reached: None without a target.
    """

    label: str
    block: str
    name: str
    against: str | None
    settings: Mapping[str, str]
    seeds: tuple[int, ...]
    rounds: int
    scores: dict[Measure, Interval | None]
    difference: Difference | None
    megabytes: Interval
    seconds: Interval | None
    reached: Reached | None = None


def compare(
    runs: Sequence[StoredRun],
    measure: Measure = "personal",
    *,
    at: At = "last",
    against: str | None = None,
    target: float | None = None,
) -> list[ComparedRow]:
    """The experiments of these runs, in order of appearance.

    Pairs are runs of one seed that differ in nothing but the method and its hyper-parameters.

    Args:
        runs: of one task.
        measure: whose predictions, and on what, for differences and the target.
        at: which round of each run counts.
        against: name of the reference in its block; by default the first experiment's.
        target: a value of the primary metric to reach; an accuracy is a share between 0 and 1.

    Raises:
        ConfigError: no experiment is called `against`, or several of a block are.
    """
    groups = {members.label: members for members in group(runs)}
    found = {place.label: place for place in places_of(runs)}
    reference = references([found[label] for label in groups], against)
    rows: list[ComparedRow] = []
    for label, members in groups.items():
        place, other = found[label], reference.get(found[label].block)
        rows.append(
            ComparedRow(
                label=label,
                block=place.block,
                name=place.name,
                against=other.name if other else None,
                settings={key: value for key, value in every_setting(members.runs[0]).items() if key != "run.seed"},
                seeds=members.seeds,
                rounds=members.rounds,
                scores={of: interval(_scores(members, of, at).values()) for of in MAIN_MEASURES},
                difference=_difference(members, groups[other.label], measure, at)
                if other and other.label != label
                else None,
                megabytes=confidence_interval(sum(_sent(run)) for run in members.runs),
                seconds=interval([sum(spent.values()) or None for spent in map(seconds, members.runs)]),
                reached=None if target is None else _reached(members, target, measure),
            )
        )
    return _adjusted(rows)


def unequal(runs: Sequence[StoredRun]) -> dict[str, dict[str, str]]:
    """Settings that differ between the experiments, and that no name says: by key, the value of each.

    What is not the method's is the value of a block. Of the method's there are only those of local training that all
    have. Runs of one block whose data differ have other data under the same name, and are no pairs.
    """
    by_label = {place.label: place for place in places_of(runs)}
    firsts = {label: members.runs[0] for label, members in ((m.label, m) for m in group(runs))}
    trees = {label: {**settings(run), **_data(run)} for label, run in firsts.items()}
    named = {
        word.partition("=")[0] for place in by_label.values() for word in f"{place.block}, {place.name}".split(", ")
    }
    found: dict[str, dict[str, str]] = {}
    for key in differing(list(trees.values())):
        own = key.startswith("method.")
        if any(short_of(key) == word or short_of(key).endswith(f".{word}") for word in named):
            continue
        if own and not (key.startswith("method.training.") and all(key in tree for tree in trees.values())):
            continue
        values = [(by_label[label], tree.get(key, "–")) for label, tree in trees.items()]
        found[key] = _by_owner([(p.name if own else p.block or p.name, p.label, value) for p, value in values])
    return found


def _data(run: StoredRun) -> dict[str, str]:
    """What the run's data were, as far as its manifest says."""
    checksum = run.manifest.get(_CHECKSUM)
    return {_CHECKSUM: str(checksum)[:_DIGITS]} if checksum else {}


def _by_owner(values: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    """Values by a short name, or by the whole label where the same short name has several values."""
    several = {name for name, _, value in values if any(name == n and value != v for n, _, v in values)}
    return {label if name in several else name: value for name, label, value in values}


def interval(values: Iterable[float | None]) -> Interval | None:
    """Mean and interval of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return confidence_interval(known) if known else None


def confidence_interval(values: Iterable[float]) -> Interval:
    """Mean and interval of values, of which there is at least one."""
    from scipy.stats import t  # takes a quarter of a second

    known = list(values)
    if len(known) == 1:
        return Interval(known[0], None, 1)
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(known) - 1)) * stdev(known) / math.sqrt(len(known))
    return Interval(fmean(known), half, len(known))


def record_at(run: StoredRun, at: At) -> RoundRecord | None:
    """The record of the round that counts."""
    return last(run) if at == "last" else chosen(run)


def _scores(members: Group, measure: Measure, at: At) -> dict[int, float]:
    """The primary metric by seed, where it was measured."""
    found = {run.seed: (record_at(run, at), run.metric.name) for run in members.runs}
    values = {seed: record.value(measure, metric) for seed, (record, metric) in found.items() if record is not None}
    return {seed: value for seed, value in values.items() if value is not None}


def _difference(members: Group, reference: Group, measure: Measure, at: At) -> Difference | None:
    ours, theirs = _scores(members, measure, at), _scores(reference, measure, at)
    others = {run.seed: run for run in reference.runs}
    paired = [run.seed for run in members.runs if run.seed in others and had_same_data(run, others[run.seed])]
    gaps = [ours[seed] - theirs[seed] for seed in paired if seed in ours and seed in theirs]
    if not gaps:
        return None
    return Difference(confidence_interval(gaps), paired_p(gaps))


def had_same_data(one: StoredRun, other: StoredRun) -> bool:
    """Whether two runs had the same examples, divided in the same way, as far as their manifests say."""
    facts = [(one.manifest.get(name), other.manifest.get(name)) for name in (_CHECKSUM, "partition_fingerprint")]
    return all(ours is None or theirs is None or ours == theirs for ours, theirs in facts)


def paired_p(gaps: Sequence[float]) -> float | None:
    """Of the paired t-test: how often chance alone would make seeds differ by as much; None where it cannot tell."""
    from scipy.stats import ttest_1samp

    if len(set(gaps)) < 2:
        return None
    return float(cast(Any, ttest_1samp(gaps, 0.0)).pvalue)


def _adjusted(rows: Sequence[ComparedRow]) -> list[ComparedRow]:
    """Rows with p adjusted for how many are tested."""
    adjusted = holm([row.difference and row.difference.p for row in rows])
    return [
        replace(row, difference=replace(row.difference, p=p)) if row.difference else row
        for row, p in zip(rows, adjusted, strict=True)
    ]


def holm(found: Sequence[float | None]) -> list[float | None]:
    """Values of p adjusted by Holm's method: the smallest times their number, the next times one less, and so on.

    Args:
        found: None stays None, and counts as no test.
    """
    tested = sorted((p, place) for place, p in enumerate(found) if p is not None)
    raised = accumulate((min(1.0, (len(tested) - rank) * p) for rank, (p, _) in enumerate(tested)), max)
    adjusted = {place: p for (_, place), p in zip(tested, raised, strict=True)}
    return [adjusted.get(place) for place in range(len(found))]


def _sent(run: StoredRun) -> list[float]:
    """Megabytes of each round, both directions."""
    return [(record.bytes_down + record.bytes_up) / BYTES_PER_MEGABYTE for record in run.rounds]


def _reached(members: Group, target: float, measure: Measure) -> Reached:
    ends = [(run, rounds_to(run, target, measure)) for run in members.runs]
    when = [(run, end) for run, end in ends if end is not None]
    if not when:
        return Reached(0, len(members.runs))
    spent = [sum(s for number, s in seconds(run).items() if number <= end) or None for run, end in when]
    return Reached(
        count=len(when),
        seeds=len(members.runs),
        rounds=confidence_interval(end for _, end in when),
        megabytes=confidence_interval(sum(_sent(run)[:end]) for run, end in when),
        seconds=interval(spent),
    )
