"""What each client gains over training alone: who profits from a method, and who loses."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from potluck.analysis.blocks import BlockPlace, places_of, references
from potluck.analysis.compare import (
    At,
    Interval,
    confidence_interval,
    had_same_data,
    holm,
    interval,
    paired_p,
    record_at,
)
from potluck.analysis.groups import Group, group
from potluck.analysis.read import StoredRun, by_class
from potluck.records import ClientRecord, Measure

ALONE = "local"
"""The method in which nobody learns from anybody."""
SURE = 0.05


@dataclass(frozen=True)
class ClientGain:
    """One client with one experiment, beside itself alone, over the seeds that both have.

    Attributes:
        client: its number.
        name: what it is called, the same in all seeds; else its number.
        architecture: its model.
        alone: the metric of its model trained alone, mean over seeds; `value` of its model with the method.
        gain: how much better the latter is, seed by seed: positive is better, also of a metric of errors.
        p: of the paired t-test, two-sided, adjusted by Holm's method for the experiment's clients; None with fewer than
            two seeds.
    """

    client: int
    name: str
    architecture: str
    alone: float
    value: float
    gain: Interval
    p: float | None

    @property
    def sure(self) -> bool:
        """Whether the test tells the gain from chance."""
        return self.p is not None and self.p < SURE


@dataclass(frozen=True)
class Gain:
    """An experiment beside training alone.

    Attributes:
        experiment: its label.
        against: label of the experiment that stands for training alone.
        over_seeds: the mean gain over clients, with its interval over seeds.
        over_clients: the same mean of the clients' mean gains, with its interval over clients.
        p: of the paired t-test over seeds, adjusted by Holm's method for the number of experiments.
        clients: one by one.
        by_architecture: the mean gain over the clients of each architecture, with its interval over seeds.
        by_class: by number of the class, the gain in the share of its examples that are classified right, over all own
            test parts together after the last round, with its interval over seeds; empty where that was not counted.
        pairs: seed by seed a run of the experiment, and the one alone that it is beside.
    """

    experiment: str
    against: str
    over_seeds: Interval
    over_clients: Interval
    p: float | None
    clients: tuple[ClientGain, ...]
    by_architecture: Mapping[str, Interval]
    by_class: Mapping[int, Interval]
    pairs: tuple[tuple[StoredRun, StoredRun], ...]

    @property
    def profiting(self) -> list[ClientGain]:
        """The clients that are better off, those that gain most first."""
        return sorted((one for one in self.clients if one.gain.mean > 0), key=lambda one: -one.gain.mean)

    @property
    def losing(self) -> list[ClientGain]:
        """The clients that are worse off, those that lose most first."""
        return sorted((one for one in self.clients if one.gain.mean < 0), key=lambda one: one.gain.mean)


def gains(
    runs: Sequence[StoredRun], measure: Measure = "personal", *, at: At = "last", alone: str | None = None
) -> list[Gain]:
    """The gain of each experiment for which there are runs of training alone, in order of appearance.

    Pairs are a client's models in two runs of one seed that differ in nothing but the method, on the same data.

    Args:
        runs: of one task.
        measure: on what the clients' models are scored; "personal", "common" or "validation".
        at: which round of each run counts.
        alone: name of the experiment that stands for training alone; by default the one of the method `local`.

    Raises:
        ConfigError: no experiment is called `alone`, or several of a block are; or several are of `local`.
        CheckpointError: a run's counts by class are damaged.
    """
    groups = {members.label: members for members in group(runs)}
    places = {place.label: place for place in places_of(runs)}
    reference = _alone([places[label] for label in groups], groups, alone)
    found: list[Gain] = []
    for label, members in groups.items():
        other = reference.get(places[label].block)
        if other and other.label != label and (gain := _gain(members, groups[other.label], measure, at)):
            found.append(gain)
    return [replace(gain, p=p) for gain, p in zip(found, holm([gain.p for gain in found]), strict=True)]


def _alone(places: Sequence[BlockPlace], groups: Mapping[str, Group], name: str | None) -> dict[str, BlockPlace]:
    """By block the experiment that stands for training alone."""
    if name is not None:
        return references(places, name)
    if not any(members.method == ALONE for members in groups.values()):
        return {}
    return references(places, ALONE)


def _gain(members: Group, reference: Group, measure: Measure, at: At) -> Gain | None:
    """What one experiment is beside another; None without a pair of runs."""
    others = {run.seed: run for run in reference.runs}
    same = [run for run in members.runs if run.seed in others and had_same_data(run, others[run.seed])]
    pairs = [(run, others[run.seed]) for run in same]
    paired = [_paired(_values(run, measure, at), _values(alone, measure, at)) for run, alone in pairs]
    by_seed = [found for found in paired if found]
    if not by_seed:
        return None
    sign = 1 if members.runs[0].metric.higher_is_better else -1
    names = client_names(same)
    clients = [_client([found[id] for found in by_seed if id in found], sign, names) for id in _everybody(by_seed)]
    clients = [replace(one, p=p) for one, p in zip(clients, holm([one.p for one in clients]), strict=True)]
    means = [fmean(_differences(found.values(), sign)) for found in by_seed]
    kinds = dict.fromkeys(one.architecture for one in clients)
    return Gain(
        members.label,
        reference.label,
        confidence_interval(means),
        confidence_interval(one.gain.mean for one in clients),
        paired_p(means),
        tuple(clients),
        {kind: over for kind in kinds if (over := _of_architecture(by_seed, kind, sign))},
        _of_classes(pairs) if at == "last" else {},
        tuple(pairs),
    )


_Value = tuple[ClientRecord, float]
_Pair = tuple[ClientRecord, float, float]


def client_names(runs: Sequence[StoredRun]) -> tuple[str, ...]:
    """What clients are called in all these runs, in the order of their numbers; none if that differs."""
    names = {run.client_names for run in runs}
    return names.pop() if len(names) == 1 else ()


def _client(pairs: Sequence[_Pair], sign: int, names: Sequence[str]) -> ClientGain:
    """One client over its seeds."""
    differences, line = _differences(pairs, sign), pairs[0][0]
    alone, value = fmean(alone for *_, alone in pairs), fmean(value for _, value, _ in pairs)
    return ClientGain(
        client=line.client,
        name=names[line.client] if names else f"client {line.client}",
        architecture=line.architecture,
        alone=alone,
        value=value,
        gain=confidence_interval(differences),
        p=paired_p(differences),
    )


def _differences(pairs: Iterable[_Pair], sign: int) -> list[float]:
    return [sign * (value - alone) for _, value, alone in pairs]


def _of_architecture(by_seed: Sequence[Mapping[int, _Pair]], name: str, sign: int) -> Interval | None:
    of_seeds = [[pair for pair in found.values() if pair[0].architecture == name] for found in by_seed]
    return interval(fmean(_differences(pairs, sign)) for pairs in of_seeds if pairs)


def _of_classes(pairs: Sequence[tuple[StoredRun, StoredRun]]) -> dict[int, Interval]:
    """By class the gain over pairs of a run and one alone."""
    found: dict[int, list[float]] = {}
    for ours, alone in ((_recalls(run), _recalls(other)) for run, other in pairs):
        for number in ours.keys() & alone.keys():
            found.setdefault(number, []).append(ours[number] - alone[number])
    return {number: confidence_interval(differences) for number, differences in sorted(found.items())}


def _recalls(run: StoredRun) -> dict[int, float]:
    """By class the share of its examples that are classified right."""
    counted = by_class(run)
    if counted is None:
        return {}
    hits, _, actual = counted.counts
    return {number: hit / count for number, (hit, count) in enumerate(zip(hits, actual, strict=True)) if count}


def _everybody(by_seed: Sequence[Mapping[int, _Pair]]) -> list[int]:
    return sorted({client for found in by_seed for client in found})


def _paired(ours: Mapping[int, _Value], alone: Mapping[int, _Value]) -> dict[int, _Pair]:
    """By client that both have: its record, and the metric with the method and alone."""
    return {client: (line, value, alone[client][1]) for client, (line, value) in ours.items() if client in alone}


def _values(run: StoredRun, measure: Measure, at: At) -> dict[int, _Value]:
    """By client its record and the primary metric, where it was measured."""
    record = record_at(run, at)
    lines = [line for line in run.clients if record and line.round == record.round]
    found = [(line, line.value(measure, run.metric.name)) for line in lines]
    return {line.client: (line, value) for line, value in found if value is not None}
