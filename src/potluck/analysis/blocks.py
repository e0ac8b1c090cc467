"""The blocks of a comparison: experiments that differ in nothing but the method, and so can be paired seed by seed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.analysis.names import Described, labels, rounds_in_words, with_settings
from potluck.analysis.settings import differing, settings
from potluck.core.ground.errors import ConfigError, nearest

_LONGEST_NAME = 96
_METHOD = "method."


@dataclass(frozen=True)
class BlockPlace:
    """Where a run's experiment stands in a comparison.

    Attributes:
        block: what distinguishes its block from the others, such as "partition=iid"; empty if there is only one.
        name: of the experiment among those of its block.
        label: of the experiment among all.
    """

    block: str
    name: str
    label: str


def places_of(runs: Sequence[Described]) -> list[BlockPlace]:
    """For each run the place of its experiment.

    Runs are in one block if everything but the method and its hyper-parameters is the same: the federation, that is
    data, partition, clients and models; the settings of the run; and how many rounds are finished.
    """
    trees = {run.experiment_id: _without_method(run) for run in runs}
    members: dict[tuple[object, ...], list[int]] = {}
    for index, run in enumerate(runs):
        members.setdefault((len(run.rounds), *trees[run.experiment_id].items()), []).append(index)
    firsts = [runs[indices[0]] for indices in members.values()]
    blocks = _block_names(firsts, [trees[run.experiment_id] for run in firsts])
    overall, found = labels(runs), dict[int, BlockPlace]()
    for block, indices in zip(blocks, members.values(), strict=True):
        for index, name in zip(indices, labels([runs[index] for index in indices]), strict=True):
            found[index] = BlockPlace(block, name, overall[index])
    return [found[index] for index in range(len(runs))]


def references(found: Sequence[BlockPlace], against: str | None = None) -> dict[str, BlockPlace]:
    """By block the experiment that the others in it are compared with; blocks without it are left out.

    Args:
        found: the places of all experiments.
        against: its name, or as much of it as says which one; by default the first experiment's, and where a block
            lacks that the block's first.

    Raises:
        ConfigError: no experiment is called that, or several of one block are.
    """
    by_block: dict[str, dict[str, BlockPlace]] = {}
    for place in found:
        by_block.setdefault(place.block, {}).setdefault(place.name, place)
    if against is None:
        first = found[0].name
        return {block: inside.get(first, next(iter(inside.values()))) for block, inside in by_block.items()}
    meant = {block: _meant(against, list(inside.values())) for block, inside in by_block.items()}
    chosen = {block: place for block, place in meant.items() if place is not None}
    if not chosen:
        known = dict.fromkeys(place.name for place in found)
        names = "; ".join(nearest(against, known))
        raise ConfigError(f"no experiment {against!r} to compare with; expected one of these: {names}")
    return chosen


def _meant(against: str, inside: Sequence[BlockPlace]) -> BlockPlace | None:
    """The experiment of a block that is called this, or has all these words, such as its method, in its name."""
    for place in inside:
        if against in (place.name, place.label):
            return place
    words = set(against.split(", "))
    fitting = [place for place in inside if words <= {*place.name.split(", "), *place.label.split(", ")}]
    if len(fitting) > 1:
        names = "; ".join(place.name for place in fitting)
        raise ConfigError(f"{against!r} is several experiments; compare with one of these: {names}")
    return fitting[0] if fitting else None


def check_reference(runs: Sequence[Described], against: str | None) -> None:
    """Check that among these runs, finished or only planned, there is an experiment to compare with.

    Raises:
        ConfigError: as `references`.
    """
    if against is not None:
        references(places_of(runs), against)


def _without_method(run: Described) -> dict[str, str]:
    return {key: value for key, value in settings(run).items() if not key.startswith(_METHOD)}


def _block_names(firsts: Sequence[Described], trees: Sequence[dict[str, str]]) -> list[str]:
    """A name for each block, from the settings in which they differ, and the finished rounds if they do."""
    if len(trees) == 1:
        return [""]
    names = [with_settings("", differing(trees), tree, trees, _LONGEST_NAME) for tree in trees]
    alike = Counter(names)
    long = [
        ", ".join(filter(None, [name, rounds_in_words(len(run.rounds)) if alike[name] > 1 else ""]))
        for name, run in zip(names, firsts, strict=True)
    ]
    seen = Counter[str]()
    for place, name in enumerate(long):
        seen[name] += 1
        long[place] = name if seen[name] == 1 and name else f"{name or 'block'} {seen[name]}"
    return long
