"""Groups of runs: those of one experiment, which differ only in seed, under a distinguishing label."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from potluck.analysis.names import labels
from potluck.analysis.read import StoredRun

_NAMED_METHODS = 4
_FEW = 4


@dataclass(frozen=True)
class Group:
    """The runs of one experiment, by seed, with equally many finished rounds.

    Attributes:
        label: the method, and whatever else distinguishes the experiment from the others shown with it.
        runs: one for each seed.
    """

    label: str
    runs: tuple[StoredRun, ...]

    @property
    def method(self) -> str:
        """The method's name."""
        return self.runs[0].method

    @property
    def dataset(self) -> str:
        """The data set's name."""
        return self.runs[0].dataset

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, in order."""
        return tuple(run.seed for run in self.runs)

    @property
    def rounds(self) -> int:
        """How many rounds every run of the group has finished."""
        return len(self.runs[0].rounds)


def group(runs: Sequence[StoredRun]) -> list[Group]:
    """The runs by experiment, in order of appearance.

    Runs of different length are never grouped, so that an interrupted one does not distort a mean. Of runs with the
    same seed the last one counts, since a repetition is no further evidence.
    """
    members: dict[str, dict[int, StoredRun]] = {}
    for run, label in zip(runs, labels(runs), strict=True):
        members.setdefault(label, {})[run.seed] = run
    return [Group(label, tuple(run for _, run in sorted(seeds.items()))) for label, seeds in members.items()]


def heading(groups: Sequence[Group]) -> str:
    """Which methods on which data, in a few words."""
    methods = list(dict.fromkeys(members.method for members in groups))
    named = enumerated(methods) if len(methods) <= _NAMED_METHODS else f"{len(methods)} methods"
    return f"{named} on {enumerated(list(dict.fromkeys(members.dataset for members in groups)))}"


def enumerated(words: Sequence[object]) -> str:
    """One, two and three."""
    *before, final = [str(word) for word in words]
    return f"{', '.join(before)} and {final}" if before else final


def values_with_owners(values: Mapping[str, str]) -> list[tuple[str, str]]:
    """Each value of a setting with the experiments that have it; last and without their names one that most have.

    Args:
        values: by label of the experiment.
    """
    owners: dict[str, list[str]] = {}
    for label, value in values.items():
        owners.setdefault(value, []).append(label)
    usual = [value for value, labels in owners.items() if len(labels) > max(_FEW, len(values) / 2)]
    listed = [(value, ", ".join(labels)) for value, labels in owners.items() if value not in usual]
    return [*listed, *((value, f"the other {len(owners[value])}") for value in usual)]
