"""Groups of runs: those of one experiment, which differ only in seed, under a distinguishing label."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.analysis.read import StoredRun
from potluck.analysis.settings import differing, settings

_LONGEST_LABEL = 40
_NAMED_METHODS = 4


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


def labels(runs: Sequence[StoredRun]) -> list[str]:
    """For each run the label of its experiment: runs have the same label if they belong to the same group."""
    experiments = {run.experiment_id: run for run in reversed(runs)}
    names = {experiment_id: _name(run, list(experiments.values())) for experiment_id, run in experiments.items()}
    ambiguous = Counter(names.values())
    names = {
        experiment_id: name if ambiguous[name] == 1 else f"{name} {experiment_id}"
        for experiment_id, name in names.items()
    }
    lengths = {
        run.experiment_id: {len(other.rounds) for other in runs if other.experiment_id == run.experiment_id}
        for run in runs
    }
    return [
        names[run.experiment_id]
        if len(lengths[run.experiment_id]) == 1
        else f"{names[run.experiment_id]}, {_rounds(len(run.rounds))}"
        for run in runs
    ]


def heading(groups: Sequence[Group]) -> str:
    """Which methods on which data, in a few words."""
    methods = list(dict.fromkeys(members.method for members in groups))
    named = enumerated(methods) if len(methods) <= _NAMED_METHODS else f"{len(methods)} methods"
    return f"{named} on {enumerated(list(dict.fromkeys(members.dataset for members in groups)))}"


def enumerated(words: Sequence[object]) -> str:
    """One, two and three."""
    *before, final = [str(word) for word in words]
    return f"{', '.join(before)} and {final}" if before else final


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def _name(run: StoredRun, experiments: Sequence[StoredRun]) -> str:
    """The method; the data set if there are several; settings that differ between the method's experiments on it."""
    place = f" on {run.dataset}" if len({other.dataset for other in experiments}) > 1 else ""
    alike = [settings(other) for other in experiments if (other.method, other.dataset) == (run.method, run.dataset)]
    values = settings(run)
    keys = [key for key in differing(alike) if key in values and key not in ("federation.dataset", "run.rounds")]
    label = ", ".join([f"{run.method}{place}", *(f"{key.rsplit('.', 1)[1]}={values[key]}" for key in keys)])
    return label if len(label) <= _LONGEST_LABEL else f"{run.method}{place} {run.experiment_id}"
