"""A classification data set in memory, and what is known of one before it is loaded."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from potluck.core.errors import DataError
from potluck.core.examples import Examples, Preprocess


@dataclass(frozen=True)
class Description:
    """What a model needs to know of a data set: the shape of one prepared input and the number of classes."""

    name: str
    input_shape: tuple[int, ...]
    num_classes: int


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples of one classification task.

    Attributes:
        name: how runs and records call it.
        train_inputs: uint8 images (n, channels, height, width), or float features (n, ...).
        train_targets: class of each training input, int64 (n,).
        test_inputs: as `train_inputs`, with inputs of the same shape.
        test_targets: as `train_targets`.
        num_classes: targets lie in 0 .. num_classes - 1.
        preprocess: prepares a batch for a model; given a generator it augments too, without one it only
            normalises. None leaves inputs as they are stored.

    Raises:
        DataError: the tensors do not fit together, or a target is no class.
    """

    name: str
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    num_classes: int
    preprocess: Preprocess | None = None

    def __post_init__(self) -> None:
        for part, inputs, targets in (
            ("training", self.train_inputs, self.train_targets),
            ("test", self.test_inputs, self.test_targets),
        ):
            _check_part(f"{self.name}: {part} part", inputs, targets, self.num_classes)
        train_shape, test_shape = tuple(self.train_inputs.shape[1:]), tuple(self.test_inputs.shape[1:])
        if train_shape != test_shape:
            raise DataError(
                f"{self.name}: training inputs have shape {train_shape} but test inputs {test_shape}; "
                "bring all to one shape"
            )

    @property
    def train(self) -> Examples:
        """All training examples."""
        return Examples(self.train_inputs, self.train_targets, self.preprocess)

    @property
    def test(self) -> Examples:
        """All test examples."""
        return Examples(self.test_inputs, self.test_targets, self.preprocess)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one prepared input."""
        return self.test.input_shape

    @property
    def description(self) -> Description:
        """What a model needs to know of this data set."""
        return Description(self.name, self.input_shape, self.num_classes)

    @property
    def checksum(self) -> str:
        """Hex digest of the four tensors: equal if and only if the stored data are."""
        return digest(self.train_inputs, self.train_targets, self.test_inputs, self.test_targets)


class Source(Protocol):
    """Where a data set comes from: a module of `potluck.data.datasets`, a folder, an archive, a plug-in."""

    def describe(self) -> Description:
        """What is known without reading the data, as far as that can be."""
        ...

    def load(self, augmentation: str) -> Dataset:
        """The data set; `augmentation` is "paper" or "none"."""
        ...


def digest(*tensors: Tensor) -> str:
    """BLAKE2b hex digest of types, shapes and values, in order."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(tensor.cpu().contiguous().numpy().data)
    return total.hexdigest()


def _check_part(where: str, inputs: Tensor, targets: Tensor, num_classes: int) -> None:
    """Raise DataError unless there are inputs and each has one target that is a class."""
    if len(inputs) == 0:
        raise DataError(f"{where}: no examples; give at least one")
    if targets.dtype != torch.int64 or targets.dim() != 1 or len(targets) != len(inputs):
        raise DataError(
            f"{where}: expected {len(inputs)} int64 targets, one an input, "
            f"found {targets.dtype} of shape {tuple(targets.shape)}"
        )
    lowest, highest = int(targets.min()), int(targets.max())
    if lowest < 0 or highest >= num_classes:
        wrong = lowest if lowest < 0 else highest
        raise DataError(f"{where}: label {wrong}; expected labels from 0 to {num_classes - 1}")
