"""A data set in memory, and its description before it is loaded."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import DataError
from potluck.core.ground.inputs import Inputs, InputShape, by_name, count_of
from potluck.core.requests.examples import Examples, Preprocess
from potluck.core.tasks.named import CLASSIFICATION
from potluck.core.tasks.task import Task

MOST_CLASSES = 1_000_000
"""More are assumed to be a mistake: numbers that are not labels."""


@dataclass(frozen=True)
class Description:
    """What a model needs to know of a data set.

    Attributes:
        name: the name in runs and records.
        input_shape: of one prepared input, or of each of the named ones with its type.
        num_classes: the width of an output; in a classification, labels lie in 0 .. num_classes - 1.
        classes: their names in order; None if classes have only numbers.
        task: what targets mean.

    Raises:
        DataError: the classes are too many, or are not `num_classes` different names.
    """

    name: str
    input_shape: InputShape
    num_classes: int
    classes: tuple[str, ...] | None = None
    task: Task = CLASSIFICATION

    def __post_init__(self) -> None:
        _check_classes(self.name, self.num_classes, self.classes)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; their numbers as text if they have no names."""
        return tuple(map(str, range(self.num_classes))) if self.classes is None else self.classes


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples of one task.

    Attributes:
        name: the name in runs and records.
        train_inputs: uint8 images (n, channels, height, width), float features (n, ...), or int64 tokens (n, t); or
            several such tensors by name.
        train_targets: target of each training input as the task has it; in a classification its class, int64 (n,).
        test_inputs: as `train_inputs`, with inputs of the same shape and, if named, the same names.
        test_targets: as `train_targets`.
        num_classes: the width of an output; in a classification, targets lie in 0 .. num_classes - 1.
        preprocess: prepares a batch for a model; with a generator it also augments, without one it only normalises.
            None returns inputs as stored.
        classes: names of the classes in order; None if they have only numbers.
        task: the meaning of targets, and the metrics.
        owners: whose each example is, as a number of 0 or more: of the training part int64 (n,), and of the test part;
            None if nobody knows. A partition by owner divides by it.
        owner_names: their names by number, such as those of hospitals; None if they have only numbers.
        groups: which training examples belong together, such as those of one patient, a number of 0 or more for each,
            int64 (n,): none of a group is for training where others are for validation. None if each is by itself.

    Raises:
        DataError: the tensors do not fit together, a target does not suit the task, or an input is not finite.
    """

    name: str
    train_inputs: Inputs
    train_targets: Tensor
    test_inputs: Inputs
    test_targets: Tensor
    num_classes: int
    preprocess: Preprocess | None = None
    classes: tuple[str, ...] | None = None
    task: Task = CLASSIFICATION
    owners: tuple[Tensor, Tensor] | None = None
    groups: Tensor | None = None
    owner_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_classes(self.name, self.num_classes, self.classes)
        for part, inputs, targets in (
            ("training", self.train_inputs, self.train_targets),
            ("test", self.test_inputs, self.test_targets),
        ):
            _check_part(f"{self.name}: {part} part", inputs, targets, self.num_classes, self.task)
        _check_alike(self.name, by_name(self.train_inputs), by_name(self.test_inputs))
        if self.owners is not None:
            _check_numbers(f"{self.name}: training part: owners", self.owners[0], len(self.train_targets))
            _check_numbers(f"{self.name}: test part: owners", self.owners[1], len(self.test_targets))
        if self.groups is not None:
            _check_numbers(f"{self.name}: training part: groups", self.groups, len(self.train_targets))

    @property
    def train(self) -> Examples:
        """All training examples."""
        return Examples(self.train_inputs, self.train_targets, self.preprocess)

    @property
    def test(self) -> Examples:
        """All test examples."""
        return Examples(self.test_inputs, self.test_targets, self.preprocess)

    @property
    def input_shape(self) -> InputShape:
        """Shape of one prepared input, or of each of the named ones with its type."""
        return self.test.input_shape

    @property
    def description(self) -> Description:
        """This data set's description."""
        return Description(self.name, self.input_shape, self.num_classes, self.classes, self.task)

    @property
    def checksum(self) -> str:
        """Hex digest of names and tensors: equal if and only if the stored data are."""
        train, test = by_name(self.train_inputs), by_name(self.test_inputs)
        beside = (*(self.owners or ()), *(() if self.groups is None else (self.groups,)))
        found = arrays_digest(*train.values(), self.train_targets, *test.values(), self.test_targets, *beside)
        return digest(" ".join((found, *train)).encode()) if isinstance(self.train_inputs, Mapping) else found


class Source(Protocol):
    """The source of a data set: a module of `potluck.data.datasets`, a folder, an archive, a plug-in."""

    def describe(self) -> Description:
        """The description, if possible without reading the data."""
        ...

    def load(self, augmentation: str) -> Dataset:
        """The data set; `augmentation` is "standard" or "none"."""
        ...


def arrays_digest(*tensors: Tensor) -> str:
    """BLAKE2b hex digest of types, shapes and values, in order."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(tensor.cpu().contiguous().numpy().data)
    return total.hexdigest()


def _check_classes(where: str, number: int, names: tuple[str, ...] | None) -> None:
    """Check that the number of classes is plausible, and that there are as many different names, if any."""
    if not isinstance(number, int) or not 1 <= number <= MOST_CLASSES:
        raise DataError(f"{where}: {number!r} classes; expected 1 to {MOST_CLASSES:,}: number the classes from 0")
    if names is None:
        return
    if len(names) != number:
        raise DataError(f"{where}: {len(names)} names of classes for {number} classes; give one name each")
    if len(set(names)) != number:
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{where}: two classes are called {twice!r}; give each its own name")


def _check_part(where: str, inputs: Inputs, targets: Tensor, num_classes: int, task: Task) -> None:
    """Check that there are inputs and that each has a target of the task."""
    if isinstance(inputs, Mapping) and not inputs:
        raise DataError(f"{where}: found inputs without a name; expected at least one tensor by name")
    named = {f" {name!r}" * bool(name): tensor for name, tensor in by_name(inputs).items()}
    count = count_of(inputs) if all(tensor.dim() for tensor in named.values()) else 0
    for name, tensor in named.items():
        if tensor.dim() < 2:
            found = tuple(tensor.shape)
            raise DataError(f"{where}: inputs{name} of shape {found}; expected one row an example, (n, ...)")
        if len(tensor) != count:
            raise DataError(f"{where}: {len(tensor)} inputs{name} and {count} of another name; give as many of each")
    if count == 0:
        raise DataError(f"{where}: no examples; give at least one")
    if task.has_classes:
        _check_labels(where, targets, count, num_classes)
    elif targets.dim() == 0 or len(targets) != count:
        raise DataError(f"{where}: {count} inputs and targets of shape {tuple(targets.shape)}; give one an input")
    else:
        task.check_targets(targets, num_classes, f"{where}: its targets")
    for name, tensor in named.items():
        if tensor.is_floating_point():
            _check_finite(f"{where}{name and f': inputs{name}'}", tensor)


def _check_alike(where: str, train: Mapping[str, Tensor], test: Mapping[str, Tensor]) -> None:
    """Check that the inputs of both parts have the same names, shapes and types."""
    if train.keys() != test.keys():
        names = [", ".join(map(repr, part)) for part in (train, test)]
        raise DataError(f"{where}: training inputs are called {names[0]} but test inputs {names[1]}; call them alike")
    for name, found in train.items():
        other, of = test[name], f" {name!r}" * bool(name)
        shapes = tuple(found.shape[1:]), tuple(other.shape[1:])
        if shapes[0] != shapes[1]:
            raise DataError(
                f"{where}: training inputs{of} have shape {shapes[0]} but test inputs {shapes[1]}; "
                "bring all to one shape"
            )
        if found.dtype != other.dtype:
            raise DataError(
                f"{where}: training inputs{of} are {found.dtype} but test inputs {other.dtype}; store both in one type"
            )


def _check_numbers(where: str, found: Tensor, count: int) -> None:
    """Check that each example has a number, such as its owner's."""
    if found.dtype != torch.int64 or found.shape != (count,) or int(found.min()) < 0:
        raise DataError(
            f"{where} of shape {tuple(found.shape)}, {found.dtype}; expected {count} whole numbers of 0 or more, int64"
        )


def _check_labels(where: str, targets: Tensor, count: int, num_classes: int) -> None:
    """Check that there are `count` targets and that each is a class."""
    if targets.dim() == 1 and len(targets) != count:
        raise DataError(f"{where}: {count} inputs but {len(targets)} labels; give each input one label")
    if targets.dtype != torch.int64 or targets.dim() != 1:
        other = "; other tasks than classification are named: federation.task" if targets.dim() != 1 else ""
        raise DataError(
            f"{where}: expected {count} int64 targets, one an input, "
            f"found {targets.dtype} of shape {tuple(targets.shape)}{other}"
        )
    lowest, highest = int(targets.min()), int(targets.max())
    if lowest < 0 or highest >= num_classes:
        wrong = lowest if lowest < 0 else highest
        raise DataError(f"{where}: label {wrong}; expected labels from 0 to {num_classes - 1}")


def _check_finite(where: str, inputs: Tensor) -> None:
    """Check that all inputs are finite."""
    # Extremes first, which need no second tensor as large as the inputs.
    if inputs.numel() == 0 or bool(torch.stack(inputs.aminmax()).isfinite().all()):
        return
    broken = (~inputs.flatten(1).isfinite().all(1)).nonzero().flatten()
    raise DataError(
        f"{where}: {len(broken)} of {len(inputs)} inputs hold NaN or infinity, the first in row {int(broken[0])}; "
        "leave them out or fill them in"
    )
