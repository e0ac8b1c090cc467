"""Labelled examples: rows of shared tensors, prepared batch by batch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from potluck.core.ground.errors import DataError
from potluck.core.ground.inputs import Inputs, InputShape, by_name, rows_of, shape_of
from potluck.core.ground.rng import Key


class Batch(NamedTuple):
    """Some examples, ready for a model.

    Attributes:
        inputs: prepared, a tensor (batch, ...) or a mapping of several by name; whatever the net is called with.
        targets: (batch, ...).
        columns: further values of each example, by name, (batch, ...); see `Examples.with_columns`.
    """

    inputs: Any
    targets: Tensor
    columns: Mapping[str, Tensor]


class Preprocess(Protocol):
    """Converts stored inputs (batch, ...) to model inputs; with a generator it augments for training."""

    def __call__(self, inputs: Any, rng: torch.Generator | None) -> Any:
        """Prepared inputs (batch, ...), of named ones by name."""
        ...


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs (n, ...) and targets (n, ...), seen through a selection of rows.

    Inputs are one tensor, or a mapping of tensors by name, such as tokens and their mask. Many clients share them: each
    holds the same `inputs` and its own `rows`, so a hundred clients cost one data set. Inputs may be stored as uint8;
    `preprocess` makes them floats. Columns hold further values, such as a teacher's logits or a weight, one row for
    each of these examples in their order.

    Raises:
        DataError: inputs or targets are no tensors, or there are no inputs.
        ValueError: inputs, targets and columns differ in length.
    """

    inputs: Inputs
    targets: Tensor
    preprocess: Preprocess | None = None
    rows: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    _column_rows: Tensor | None = None  # indices of these examples' rows in the columns, if not simply 0, 1, 2 ...
    _source: "Examples | None" = None  # the examples whose inputs these inputs were computed from

    def __post_init__(self) -> None:
        if isinstance(self.inputs, Mapping) and not self.inputs:
            raise DataError("inputs: found no names; expected at least one tensor by name")
        named = {f"inputs {name!r}" if name else "inputs": tensor for name, tensor in by_name(self.inputs).items()}
        for where, found in {**named, "targets": self.targets}.items():
            if not isinstance(found, Tensor):
                raise DataError(
                    f"{where}: found {type(found).__name__}; expected a tensor with a row an example: torch.as_tensor"
                    " makes one of an array or a list"
                )
            if len(found) != len(self.targets):
                raise ValueError(
                    f"{len(found)} {where} but {len(self.targets)} targets: give one target for each input"
                )
        for name, column in self.columns.items():
            if self._column_rows is None and len(column) != len(self):
                raise ValueError(
                    f"column {name!r}: found {len(column)} rows; expected {len(self)}, one for each example"
                )

    def __len__(self) -> int:
        return len(self.targets) if self.rows is None else len(self.rows)

    def take(self, positions: Tensor) -> "Examples":
        """The examples at `positions` (int64, counted among these examples), sharing storage."""
        return replace(self, rows=_chosen(self.rows, positions), _column_rows=_chosen(self._column_rows, positions))

    def batch(self, positions: Tensor, augment: Key | None = None) -> Batch:
        """The examples at `positions`, prepared; augmented by draws from `augment` if it is given."""
        at = _chosen(self.rows, positions)
        inputs = rows_of(self.inputs, at)
        if self.preprocess is not None:
            inputs = self.preprocess(inputs, None if augment is None else augment.generator())
        if not self.columns:
            return Batch(inputs, self.targets[at], {})
        beside = _chosen(self._column_rows, positions)
        return Batch(inputs, self.targets[at], {name: column[beside] for name, column in self.columns.items()})

    def with_columns(self, **columns: Tensor) -> "Examples":
        """The same examples with further columns (n, ...), which replace those of the same names.

        Values computed from the stored inputs, such as a teacher's logits, belong to `unaugmented` examples.

        Raises:
            ValueError: a column does not have one row for each example.
        """
        places = self._column_rows
        kept = {name: column if places is None else column[places] for name, column in self.columns.items()}
        return replace(self, columns={**kept, **columns}, _column_rows=None)

    def unaugmented(self) -> "Examples":
        """The same examples, never augmented."""
        if self.preprocess is None or isinstance(self.preprocess, _Unaugmented):
            return self
        return replace(self, preprocess=_Unaugmented(self.preprocess))

    def with_inputs(self, inputs: Inputs, preprocess: Preprocess | None = None) -> "Examples":
        """The same examples with other inputs (n, ...) that were computed from theirs, and without columns."""
        return Examples(inputs, self.labels, preprocess, _source=self._source or self)

    def same_rows(self, other: "Examples") -> bool:
        """Whether these are the same examples as `other`, whatever the columns and the augmentation."""
        return self.inputs is other.inputs and self.targets is other.targets and self.rows is other.rows

    def part_of(self, other: "Examples") -> bool:
        """Whether all of these are among the examples `other`, or were computed from some that are."""
        own = self._source or self
        if own.inputs is not other.inputs or own.targets is not other.targets:
            return False
        return other.rows is None or (own.rows is not None and bool(torch.isin(own.rows, other.rows).all()))

    def batches(self, size: int, shuffle: torch.Generator | None = None) -> Iterator[Batch]:
        """All examples without augmentation, `size` at a time, in stored order or shuffled.

        A last batch of one example joins the one before it: a single example has no batch statistics.
        """
        return (self.batch(positions) for positions in self._places(size, shuffle))

    def pieces(self, size: int, shuffle: torch.Generator) -> Iterator["Examples"]:
        """All examples, shuffled, as `batches` would have them together."""
        return (self.take(positions) for positions in self._places(size, shuffle))

    def batch_sizes(self, size: int) -> list[int]:
        """How many examples each of the `batches` has."""
        return [len(positions) for positions in self._places(size, None)]

    def _places(self, size: int, shuffle: torch.Generator | None) -> list[Tensor]:
        order = torch.arange(len(self)) if shuffle is None else torch.randperm(len(self), generator=shuffle)
        places = list(order.split(size))
        if len(places) > 1 and len(places[-1]) == 1 < size:
            places[-2:] = [torch.cat(places[-2:])]
        return places

    @property
    def labels(self) -> Tensor:
        """The targets of these rows, in order."""
        return self.targets if self.rows is None else self.targets[self.rows]

    @property
    def input_shape(self) -> InputShape:
        """Shape of one prepared input, or of each of the named ones with its type."""
        return shape_of(self._first)

    @property
    def has_real_inputs(self) -> bool:
        """Whether all prepared inputs are real numbers, and not whole ones such as tokens."""
        return all(tensor.is_floating_point() for tensor in by_name(self._first).values())

    @property
    def are_here(self) -> bool:
        """Whether there are numbers: a server knows of clients' examples only how many there are."""
        return len(self) > 0 and all(tensor.numel() > 0 for tensor in by_name(self.inputs).values())

    @property
    def _first(self) -> Inputs:
        """The first prepared input (1, ...), or none (0, ...)."""
        sample = rows_of(self.inputs, slice(1))
        return sample if self.preprocess is None else self.preprocess(sample, None)


def _chosen(rows: Tensor | None, positions: Tensor) -> Tensor:
    """The rows at these positions, counted among `rows` if there are any."""
    return positions if rows is None else rows[positions]


@dataclass(frozen=True)
class _Unaugmented:
    """A preprocessing that ignores the generator."""

    preprocess: Preprocess

    def __call__(self, inputs: Inputs, rng: torch.Generator | None) -> Inputs:
        return self.preprocess(inputs, None)
