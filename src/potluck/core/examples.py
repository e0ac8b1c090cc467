"""Labelled examples: rows of one shared tensor, prepared batch by batch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from potluck.core.rng import Key

Batch = tuple[Tensor, Tensor]


class Preprocess(Protocol):
    """Turns stored inputs (batch, ...) into what a model reads; with a generator it augments for training."""

    def __call__(self, inputs: Tensor, rng: torch.Generator | None) -> Tensor:
        """Prepared inputs (batch, ...)."""
        ...


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs (n, ...) and targets (n, ...), seen through a selection of rows.

    Many clients share one tensor of images: each holds the same `inputs` and its own `rows`, so a hundred
    clients cost one data set. Inputs may be stored as uint8; `preprocess` makes them floats.
    """

    inputs: Tensor
    targets: Tensor
    preprocess: Preprocess | None = None
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(f"{len(self.inputs)} inputs but {len(self.targets)} targets: give one target an input")

    def __len__(self) -> int:
        return len(self.targets) if self.rows is None else len(self.rows)

    def take(self, positions: Tensor) -> "Examples":
        """The examples at `positions` (int64, counted among these examples), sharing storage."""
        return replace(self, rows=positions if self.rows is None else self.rows[positions])

    def batch(self, positions: Tensor, augment: Key | None = None) -> Batch:
        """Prepared inputs and targets at `positions`; augmented by draws from `augment` if it is given."""
        at = positions if self.rows is None else self.rows[positions]
        inputs = self.inputs[at]
        if self.preprocess is not None:
            inputs = self.preprocess(inputs, None if augment is None else augment.generator())
        return inputs, self.targets[at]

    def labelled(self, targets: Tensor) -> "Examples":
        """The same inputs, never augmented, with other targets (n, ...) such as a teacher's logits."""
        inputs = self.inputs if self.rows is None else self.inputs[self.rows]
        return Examples(inputs, targets, None if self.preprocess is None else _Unaugmented(self.preprocess))

    def batches(self, size: int, shuffle: torch.Generator | None = None) -> Iterator[Batch]:
        """All examples without augmentation, `size` at a time, in stored order or shuffled.

        A last batch of one example joins the one before it: a single example has no batch statistics.
        """
        order = torch.arange(len(self)) if shuffle is None else torch.randperm(len(self), generator=shuffle)
        batches = list(order.split(size))
        if len(batches) > 1 and len(batches[-1]) == 1 < size:
            batches[-2:] = [torch.cat(batches[-2:])]
        return (self.batch(positions) for positions in batches)

    @property
    def labels(self) -> Tensor:
        """The targets of these rows, in order."""
        return self.targets if self.rows is None else self.targets[self.rows]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one prepared input."""
        sample = self.inputs[:1]
        return tuple((sample if self.preprocess is None else self.preprocess(sample, None)).shape[1:])


@dataclass(frozen=True)
class _Unaugmented:
    """A preprocessing that ignores the generator: the targets were made for the inputs as they are."""

    preprocess: Preprocess

    def __call__(self, inputs: Tensor, rng: torch.Generator | None) -> Tensor:
        return self.preprocess(inputs, None)
