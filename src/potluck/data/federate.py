"""From a data set to clients' parts: classes matched by name, validation splits, matching test parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from potluck.core.ground.errors import DataError, nearest
from potluck.core.ground.fields import require
from potluck.core.ground.rng import Key
from potluck.data.dataset import Dataset, Description, arrays_digest

_SHOWN = 12


@dataclass(frozen=True)
class MatchedClasses:
    """The classes of a federation, whichever clients hold examples of them.

    Classes are matched by name. The classes of a data set without names are numbered as in the common data set. If the
    task has no classes, each position of an output means the same everywhere.

    Attributes:
        common: the data set whose test part is everyone's.
        classes: names of the federation's classes, in the order of their numbers; none if the task has no classes.
    """

    common: Description
    classes: tuple[str, ...]

    @property
    def width(self) -> int:
        """Of an output."""
        return len(self.classes) if self.common.task.has_classes else self.common.num_classes

    @classmethod
    def matching(cls, common: Description, own: Mapping[str, Description] | None = None) -> "MatchedClasses":
        """The classes of the common data set and of clients' own ones together.

        If clients have no further classes, the order is that of the common data set; otherwise all are sorted.

        Args:
            common: the data set whose test part is everyone's.
            own: clients' data sets, by a description of the client for messages.

        Raises:
            DataError: one data set names its classes and another numbers them, or two spell a name differently.
        """
        if not common.task.has_classes:
            return cls(common, ())
        holders = dict.fromkeys(common.class_names, common.name)
        for who, description in (own or {}).items():
            for name in _names(description, common, who):
                holders.setdefault(name, who)
        _check_spelling(holders)
        if len(holders) == common.num_classes:
            return cls(common, common.class_names)
        return cls(common, tuple(sorted(holders, key=int if all(map(_is_number, holders)) else None)))

    def relabelled(self, dataset: Dataset, who: str) -> Dataset:
        """A data set with the federation's numbers for its classes; `who` names it in a message.

        Raises:
            DataError: it has a class that the federation lacks or spells otherwise, or targets that do not fit its
                outputs.
        """
        if not self.common.task.has_classes:
            return replace(dataset, num_classes=self.common.num_classes)
        names, number = _names(dataset.description, self.common, who), {name: i for i, name in enumerate(self.classes)}
        strange = [name for name in names if name not in number]
        if strange:
            _check_spelling({**dict.fromkeys(self.classes, self.common.name), **dict.fromkeys(strange, who)})
            raise DataError(self.lacks(strange[0], who))
        numbers = torch.tensor([number[name] for name in names])
        return replace(
            dataset,
            train_targets=numbers[dataset.train_targets],
            test_targets=numbers[dataset.test_targets],
            num_classes=len(self.classes),
            classes=None if self.common.classes is None else self.classes,
        )

    def lacks(self, name: str, who: str) -> str:
        """What to say of a class that the federation lacks; `who` has it."""
        return (
            f"{who}: class {name!r} is none of the {len(self.classes)} of {self.common.name};"
            f" nearest: {', '.join(nearest(name, self.classes))}; call classes alike everywhere, or have"
            f" {self.common.name} name it too"
        )


def _names(description: Description, common: Description, who: str) -> tuple[str, ...]:
    """The names of a data set's classes, in the order of its own numbers."""
    known = common.class_names
    if description.classes is not None:
        if common.classes is None and not all(map(_is_number, description.classes)):
            raise DataError(
                f"{who} names its classes, {_shown(description.classes)}, and {common.name} numbers them;"
                " name them there too (an .npz file has an array `classes`), or call these by number"
            )
        return description.classes
    if description.num_classes <= len(known):
        return known[: description.num_classes]
    if common.classes is not None:
        raise DataError(
            f"{who} numbers its classes up to {description.num_classes - 1}, and {common.name} has {len(known)},"
            f" {_shown(known)}; name them (an .npz file has an array `classes`)"
        )
    return description.class_names


def _check_spelling(holders: Mapping[str, str]) -> None:
    """Check that no names differ only in case, spaces around them, or leading zeros: they mean one class."""
    seen: dict[str, str] = {}
    for name, who in holders.items():
        meant = str(int(name)) if _is_number(name) else " ".join(name.casefold().split())
        other = seen.setdefault(meant, name)
        if other != name:
            raise DataError(f"{who} calls a class {name!r}, and {holders[other]} {other!r}; spell it alike")


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")


def split_validation(indices: Tensor, targets: Tensor, fraction: float, key: Key) -> tuple[Tensor, Tensor]:
    """Split one client's examples into training and validation, each class as near to `fraction` as can be.

    Validation gets `fraction` of the examples, rounded, but never all of them: at least one stays in
    training. A client with few examples (two at a fraction of 0.2, say) therefore has no validation examples.

    Args:
        indices: the client's examples, int64 (n,).
        targets: class of every example of the data set, int64.
        fraction: share of the examples that go to validation, at least 0 and below 1.
        key: the key of the draw.

    Returns:
        Training and validation indices, both in the order of `indices`.
    """
    require(0 <= fraction < 1, "fraction", "at least 0 and below 1", fraction)
    rng = np.random.default_rng(key.seed)
    labels = targets[indices].numpy()
    classes, counts = np.unique(labels, return_counts=True)
    chosen = np.zeros(len(labels), dtype=bool)
    for label, quota in zip(classes, _quotas(counts, fraction, rng), strict=True):
        chosen[rng.permutation(np.flatnonzero(labels == label))[:quota]] = True
    validation = torch.from_numpy(chosen)
    return indices[~validation], indices[validation]


def with_validation(
    indices: Tensor, targets: Tensor, fraction: float, key: Key, groups: Tensor | None, settled: dict[int, bool]
) -> tuple[Tensor, Tensor]:
    """Split one client's examples into training and validation, all of a group alike, as `split_validation` does.

    With groups the share is one of groups, each of which counts for the class of its first example.

    Args:
        indices: the client's examples, int64 (n,).
        targets: class of every example of the data set, int64.
        fraction: share of the examples, or of their groups, that go to validation.
        key: the key of the draw.
        groups: number of the group of every example of the data set, int64; None if each is by itself.
        settled: groups that earlier clients have examples of, and whether those are for validation; the client's own
            are added.

    Raises:
        DataError: earlier clients' groups leave nothing to train on.
    """
    if groups is None or not fraction:
        return split_validation(indices, targets, fraction, key)
    own = groups[indices].numpy()
    numbers, first = np.unique(own, return_index=True)
    free = torch.from_numpy(first[[number not in settled for number in numbers.tolist()]])
    chosen = set(groups[split_validation(indices[free], targets, fraction, key)[1]].tolist())
    settled |= {number: number in chosen for number in own[free.numpy()].tolist()}
    validation = torch.tensor([settled[number] for number in own.tolist()], dtype=torch.bool)
    if len(own) and bool(validation.all()):
        raise DataError(
            f"all {len(numbers)} groups of a client have examples at others, where they are for validation, so that"
            " nothing is left to train on; divide whole groups among clients: federation.partition='natural'"
        )
    return indices[~validation], indices[validation]


def matching_test_parts(
    train_targets: Tensor, train_parts: list[Tensor], test_targets: Tensor, key: Key
) -> list[Tensor]:
    """Divide the test set so that each client is tested on the mixture of classes that it trains on.

    The test examples of a class are shared in proportion to the training examples of that class that each
    client holds. The parts are disjoint and cover all test examples of classes that some client holds; a client
    with very few training examples may get an empty part.

    Args:
        train_targets: class of every training example, int64.
        train_parts: each client's training indices.
        test_targets: class of every test example, int64.
        key: the key of the draw.

    Returns:
        Sorted test indices of each client, int64.
    """
    rng = np.random.default_rng(key.seed)
    num_classes = int(max(train_targets.max(), test_targets.max())) + 1
    held = label_counts(train_targets, train_parts, num_classes).numpy().cumsum(axis=0)
    owner = np.full(len(test_targets), -1)
    for label in np.flatnonzero(held[-1]):
        members = rng.permutation(np.flatnonzero(test_targets.numpy() == label))
        # A client's share ends where its cumulative share of the class does, rounded down; in exact integers.
        ends = held[:, label] * len(members) // held[-1, label]
        owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    return [torch.from_numpy(np.flatnonzero(owner == client)) for client in range(len(train_parts))]


def label_counts(targets: Tensor, parts: list[Tensor], num_classes: int) -> Tensor:
    """The number of examples of each class at each client, int64 (clients, classes)."""
    return torch.stack([torch.bincount(targets[part], minlength=num_classes) for part in parts])


def fingerprint(parts: list[Tensor]) -> str:
    """Hex digest of a partition, for the manifest: equal if the same clients have the same examples."""
    return arrays_digest(*parts)


def _quotas(counts: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """The number of validation examples of each class: shares rounded down, the rest to the largest remainders."""
    total = max(min(round(fraction * counts.sum()), counts.sum() - 1), 0)
    quotas = np.floor(fraction * counts).astype(np.int64)
    remainders = fraction * counts - quotas
    order = rng.permutation(len(counts))  # equal remainders must not always favour the first classes
    order = order[np.argsort(-remainders[order], kind="stable")]
    quotas[order[: max(total - quotas.sum(), 0)]] += 1
    return quotas
