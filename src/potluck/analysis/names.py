"""Names of runs, as a person would tell them apart: the method, the settings that differ, then the seed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from potluck.analysis.settings import Configured, differing, settings
from potluck.records import experiment_hash

_LONGEST_NAME = 48
_LONGEST_VALUE = 28


class Described(Configured, Protocol):
    """A stored run, or one that is only planned, with what its name is made of; see `StoredRun`."""

    @property
    def method(self) -> str:
        """The method's name."""
        ...

    @property
    def dataset(self) -> str:
        """The data set's name."""
        ...

    @property
    def seed(self) -> int:
        """The seed."""
        ...

    @property
    def experiment_id(self) -> str:
        """Equal for runs of one experiment."""
        ...

    @property
    def rounds(self) -> Sequence[object]:
        """The finished rounds."""
        ...


@dataclass(frozen=True)
class Planned:
    """A run that is only planned.

    Attributes:
        config: the tables of its configuration.
    """

    config: dict[str, Any]

    @property
    def method(self) -> str:
        """The method's name."""
        return method_in(self.config)

    @property
    def dataset(self) -> str:
        """The data set's name."""
        return dataset_in(self.config)

    @property
    def seed(self) -> int:
        """The seed."""
        return self.config["run"]["seed"]

    @property
    def experiment_id(self) -> str:
        """Equal for runs of one experiment."""
        return experiment_hash(self.config)

    @property
    def rounds(self) -> Sequence[object]:
        """The rounds that it will have."""
        return range(self.config["run"]["rounds"])


def method_in(config: Mapping[str, Any]) -> str:
    """The name of a configuration's method; of a file its name alone."""
    return Path(config["method"]["name"]).stem


def dataset_in(config: Mapping[str, Any]) -> str:
    """The name of a configuration's data set; of your own data, that of the file or folder."""
    return Path(config["federation"]["dataset"]).stem


def labels(runs: Sequence[Described]) -> list[str]:
    """For each run the name of its experiment: runs have the same one if they belong to the same group.

    That is the method; the data set if there are several; the settings that differ between experiments of that method
    on that data set; and the number of rounds, where runs of one experiment have several lengths. Where the settings
    would make a long name, only as many are in it as are needed to tell the experiments apart.
    """
    experiments = {run.experiment_id: run for run in reversed(runs)}
    first = list({run.experiment_id: experiments[run.experiment_id] for run in runs}.values())
    trees = {run.experiment_id: settings(run) for run in first}
    names = {run.experiment_id: _name(run, first, trees) for run in first}
    ambiguous = Counter(names.values())
    lengths = {
        run.experiment_id: {len(other.rounds) for other in runs if other.experiment_id == run.experiment_id}
        for run in first
    }

    def label(run: Described) -> str:
        name, id = names[run.experiment_id], run.experiment_id
        parts = [name if ambiguous[name] == 1 else f"{name} {id}"]
        return ", ".join([*parts, *([rounds_in_words(len(run.rounds))] if len(lengths[id]) > 1 else [])])

    return [label(run) for run in runs]


def run_names(runs: Sequence[Described]) -> list[str]:
    """For each run a name that no other of these has: its experiment's, its seed, and a number if it is a repetition.

    The seed is left out if it is the same for all.
    """
    seeds = {run.seed for run in runs}
    names = [
        label if len(seeds) == 1 else f"{label}, seed {run.seed}" for run, label in zip(runs, labels(runs), strict=True)
    ]
    repeated, seen = Counter(names), Counter[str]()
    for place, name in enumerate(names):
        if repeated[name] > 1:
            seen[name] += 1
            names[place] = f"{name}, run {seen[name]}"
    return names


def rounds_in_words(count: int) -> str:
    """How many rounds there are."""
    return "1 round" if count == 1 else f"{count} rounds"


def _name(run: Described, experiments: Sequence[Described], trees: dict[str, dict[str, str]]) -> str:
    """The name of one experiment among others, whose settings `trees` holds by their id."""
    place = f" on {run.dataset}" if len({other.dataset for other in experiments}) > 1 else ""
    kin = [other for other in experiments if (other.method, other.dataset) == (run.method, run.dataset)]
    alike, values = [trees[other.experiment_id] for other in kin], trees[run.experiment_id]
    keys = [key for key in differing(alike) if key not in ("federation.dataset", "run.rounds")]
    return with_settings(f"{run.method}{place}", keys, values, alike)


def with_settings(
    name: str,
    keys: Sequence[str],
    values: Mapping[str, str],
    alike: Sequence[dict[str, str]],
    longest: int = _LONGEST_NAME,
) -> str:
    """A name with the values of these keys; where that is too long, of as many as tell it from those that are alike."""

    def written(keys: Sequence[str]) -> str:
        short = _short(keys)
        values_in_words = (f"{short[key]}={_cut(values[key])}" for key in keys if key in values)
        return ", ".join([*([name] if name else []), *values_in_words])

    full = written(keys)
    return full if len(full) <= longest else written(_sufficient(keys, alike))


def _sufficient(keys: Sequence[str], trees: Sequence[dict[str, str]]) -> list[str]:
    """Keys that already tell the trees apart, each chosen for telling most of them."""
    found: list[str] = []

    def kinds(chosen: Sequence[str]) -> int:
        return len({tuple(_cut(tree.get(key, "")) for key in chosen) for tree in trees})

    while kinds(found) < len(trees):
        best = max((key for key in keys if key not in found), key=lambda key: kinds([*found, key]), default=None)
        if best is None or kinds([*found, best]) == kinds(found):
            break
        found.append(best)
    return [key for key in keys if key in found]


def short_of(key: str) -> str:
    """A key without the last word where that says nothing: "federation.partition" for `federation.partition.name`."""
    return key.removesuffix(".name").removesuffix(".rule")


def _short(keys: Sequence[str]) -> dict[str, str]:
    """The last words of each key, as many as tell it from the others."""
    words = {key: short_of(key).split(".") for key in keys}
    found: dict[str, str] = {}
    for key, own in words.items():
        ends = (".".join(own[-count:]) for count in range(1, len(own)))
        others = [f".{'.'.join(other)}" for name, other in words.items() if name != key]
        found[key] = next((end for end in ends if not any(o.endswith(f".{end}") for o in others)), ".".join(own))
    return found


def _cut(value: str) -> str:
    """A value short enough for a name, its end cut off if need be."""
    return value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 1]}…"
