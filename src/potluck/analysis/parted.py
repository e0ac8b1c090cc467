"""What parts of the examples gain over training alone, as models predict them: groups, and each client's classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from potluck.analysis.compare import Interval, confidence_interval, holm, paired_p
from potluck.analysis.gains import SURE, Gain
from potluck.analysis.inside import Inside


@dataclass(frozen=True)
class GroupGain:
    """A group of test examples with one experiment, beside itself with training alone.

    Attributes:
        experiment: the experiment's label.
        group: its name, such as "sex = f".
        examples: how many, all clients together, mean over seeds.
        alone: the share that models trained alone classify right; `value` with the experiment. Means over seeds.
        gain: the difference, with its interval over seeds.
        p: of the paired t-test over seeds, adjusted by Holm's method for the experiment's groups.
    """

    experiment: str
    group: str
    examples: float
    alone: float
    value: float
    gain: Interval
    p: float | None

    @property
    def sure(self) -> bool:
        """Whether the test tells the gain from chance."""
        return self.p is not None and self.p < SURE


@dataclass(frozen=True)
class ClassGain:
    """A client's examples of one class with one experiment, beside themselves with training alone.

    Attributes:
        experiment: the experiment's label.
        client: the client's number, with its `name`.
        label: the class.
        examples: how many, mean over seeds.
        gain: in the share that is classified right, with its interval over seeds.
    """

    experiment: str
    client: int
    name: str
    label: int
    examples: float
    gain: Interval


def group_gains(gains: Sequence[Gain], inside: Mapping[Path, Inside]) -> list[GroupGain]:
    """What each group gains in each experiment.

    Args:
        gains: of the experiments.
        inside: by folder of the run, what its models show.
    """
    return [row for gain in gains for row in _of_groups(gain, _pairs(gain, inside))]


def class_gains(gains: Sequence[Gain], inside: Mapping[Path, Inside]) -> list[ClassGain]:
    """What each client gains in each of its classes in each experiment; arguments as of `group_gains`."""
    return [row for gain in gains for row in _of_classes(gain, _pairs(gain, inside))]


_Pairs = list[tuple[Inside, Inside]]


def _pairs(gain: Gain, inside: Mapping[Path, Inside]) -> _Pairs:
    """What the models of the experiment's runs show, and those alone beside them, seed by seed."""
    folders = [(ours.folder, alone.folder) for ours, alone in gain.pairs]
    return [(inside[ours], inside[alone]) for ours, alone in folders if ours in inside and alone in inside]


def _of_groups(gain: Gain, pairs: _Pairs) -> list[GroupGain]:
    found: dict[str, list[tuple[int, float, float]]] = {}
    for ours, alone in pairs:
        others = {one.whose: one.values for one in alone.calibration if one.kind == "group"}
        for one in ours.calibration:
            if one.kind == "group" and one.whose in others:
                accuracies = one.values.accuracy, others[one.whose].accuracy
                found.setdefault(one.whose, []).append((one.values.examples, *accuracies))
    rows = [
        GroupGain(
            experiment=gain.experiment,
            group=group,
            examples=fmean(count for count, *_ in rows),
            alone=fmean(alone for *_, alone in rows),
            value=fmean(value for _, value, _ in rows),
            gain=confidence_interval(value - alone for _, value, alone in rows),
            p=paired_p([value - alone for _, value, alone in rows]),
        )
        for group, rows in found.items()
    ]
    return [replace(row, p=p) for row, p in zip(rows, holm([row.p for row in rows]), strict=True)]


def _of_classes(gain: Gain, pairs: _Pairs) -> list[ClassGain]:
    found: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for ours, alone in pairs:
        others = {(row.client, row.label): row.right / row.examples for row in alone.counted}
        for row in ours.counted:
            place = row.client, row.label
            if place in others:
                found.setdefault(place, []).append((row.examples, row.right / row.examples - others[place]))
    names = {one.client: one.name for one in gain.clients}
    return [
        ClassGain(
            experiment=gain.experiment,
            client=client,
            name=names.get(client, f"client {client}"),
            label=label,
            examples=fmean(count for count, _ in rows),
            gain=confidence_interval(difference for _, difference in rows),
        )
        for (client, label), rows in sorted(found.items())
    ]
