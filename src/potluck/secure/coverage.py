"""Who covers which coordinates of tensors that are to be summed, and the blocks of those that the same clients cover.

A client's tensor is a **piece** of the whole one: of each dimension the positions that it has, as spans in its own
order. So layers, leading and rolling slices, and rows of classes are all pieces. A **block** holds the coordinates, of
all tensors, that the same clients cover; within a block everybody has the same to mask.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from potluck.core.federation import ClientId
from potluck.core.ground.errors import ConfigError
from potluck.core.nets.slicing import Indices
from potluck.core.summed import Weighing
from potluck.secure.fixed import Units

Spans = tuple[tuple[int, int], ...]
"""Positions of one dimension: from the first number of each pair up to before the second."""

TensorPiece = tuple[Spans, ...]
"""The spans of each dimension."""

Positions = NDArray[np.int64]

MOST_COORDINATES = 2**28
"""The most numbers that may be summed in a round."""


@dataclass(frozen=True)
class Summand:
    """A tensor that is to be summed over the clients that cover it.

    Attributes:
        shape: of the whole tensor.
        weighing: what a client's numbers count: "one" for once, "client" for as often as the client weighs, such as its
            number of examples, "row" for as often as it says of each row, such as its examples of a class. The sums of
            such weights are learnt, too.
    """

    shape: tuple[int, ...]
    weighing: Weighing = "one"


@dataclass(frozen=True)
class CoordinateBlock:
    """Coordinates that the same clients cover.

    Attributes:
        clients: these, ascending.
        positions: of the coordinates among all, ascending, int64 (n,).
        weighed: whether some count as often as the client weighs, which is then the first word that is summed.
    """

    clients: tuple[ClientId, ...]
    positions: Positions
    weighed: bool

    @cached_property
    def members(self) -> frozenset[ClientId]:
        """The same clients."""
        return frozenset(self.clients)

    @property
    def words(self) -> int:
        """How many words a client sends of it."""
        return self.weighed + len(self.positions)


@dataclass(frozen=True, eq=False)
class Coverage:
    """Tensors that are to be summed, and the pieces of them that clients have.

    All coordinates are numbered in a row: those of each tensor, by name in ascending order, as they lie in memory, and
    behind each that is weighed by row the weights of its rows.

    Attributes:
        summands: the tensors by name.
        pieces: of each kind of client, the piece of each tensor that it covers.
        kinds: by client, which of these it is.

    Raises:
        ConfigError: a piece does not lie in its tensor, has a position twice, or has parts of rows that are weighed.
    """

    summands: Mapping[str, Summand]
    pieces: Sequence[Mapping[str, TensorPiece]]
    kinds: Mapping[ClientId, int]

    def __post_init__(self) -> None:
        for name, summand in self.summands.items():
            _check_summand(name, summand)
        if self.size > MOST_COORDINATES:
            raise ConfigError(f"secure sums: found {self.size:,} coordinates; expected at most {MOST_COORDINATES:,}")
        for pieces in self.pieces:
            for name, piece in pieces.items():
                if name not in self.summands:
                    raise ConfigError(
                        f"secure sums: found a piece of {name!r}; expected one of the tensors to be summed"
                    )
                _check_piece(name, piece, self.summands[name])
        if not all(0 <= kind < len(self.pieces) for kind in self.kinds.values()):
            raise ConfigError("secure sums: found a client of a kind without pieces")

    @cached_property
    def starts(self) -> Mapping[str, int]:
        """By name in ascending order, the number of each tensor's first coordinate."""
        found, at = dict[str, int](), 0
        for name in sorted(self.summands):
            found[name] = at
            at += _numbers(self.summands[name])
        return found

    @cached_property
    def size(self) -> int:
        """How many coordinates there are, weights of rows included."""
        return sum(_numbers(summand) for summand in self.summands.values())

    @cached_property
    def blocks(self) -> tuple[CoordinateBlock, ...]:
        """The blocks that somebody covers, in one order for all who have this coverage."""
        if not self.size:
            return ()
        label = self._labels
        first = np.unique(label, return_index=True)[1]
        covering = {kind: self._covers(kind)[first] for kind in self._used}
        order = np.argsort(label, kind="stable")
        ends = np.cumsum(np.bincount(label))[:-1]
        found: list[CoordinateBlock] = []
        for number, positions in enumerate(np.split(order, ends)):
            clients = tuple(client for client, kind in sorted(self.kinds.items()) if covering[kind][number])
            if clients:
                found.append(CoordinateBlock(clients, positions, bool(self.by_client[positions].any())))
        return tuple(found)

    def places(self, client: ClientId) -> dict[int, Positions]:
        """By block that a client covers, where the block's coordinates lie among the client's own.

        Those are numbered like all: its pieces by name, as they lie in its memory, and behind each the rows' weights.
        """
        own = self._positions(self.kinds[client])
        label = self._labels[own]
        by_label = {int(self._labels[block.positions[0]]): number for number, block in enumerate(self.blocks)}
        order = np.lexsort((own, label))
        cuts = np.flatnonzero(np.diff(label[order])) + 1
        return {by_label[int(label[part[0]])]: part for part in np.split(order, cuts) if len(part)}

    def tensor_of(self, name: str, numbers: Units) -> Tensor:
        """Of numbers of all coordinates, those of one tensor, in its shape."""
        shape, start = self.summands[name].shape, self.starts[name]
        return torch.from_numpy(numbers[start : start + math.prod(shape)].reshape(shape).copy())

    def rows_of(self, name: str, numbers: Units) -> Tensor:
        """The same for the weights of its rows, which are weighed by row: (rows, 1, ...), as many dimensions."""
        shape = self.summands[name].shape
        start = self.starts[name] + math.prod(shape)
        return torch.from_numpy(numbers[start : start + shape[0]].copy()).view(-1, *[1] * (len(shape) - 1))

    @cached_property
    def _used(self) -> list[int]:
        """The kinds that clients are of."""
        return sorted(set(self.kinds.values()))

    @cached_property
    def _labels(self) -> Positions:
        """For each coordinate, a number that it has in common with those which the same kinds of clients cover."""
        label = np.zeros(self.size, np.int64)
        for kind in self._used:
            label = np.unique(2 * label + self._covers(kind), return_inverse=True)[1].reshape(-1)
        return label

    @cached_property
    def by_client(self) -> NDArray[np.bool_]:
        """Which coordinates count as often as their client weighs."""
        parts = [np.full(_numbers(self.summands[n]), self.summands[n].weighing == "client") for n in self.starts]
        return np.concatenate([np.empty(0, np.bool_), *parts])

    def _covers(self, kind: int) -> NDArray[np.bool_]:
        covers = np.zeros(self.size, np.bool_)
        covers[self._positions(kind)] = True
        return covers

    def _positions(self, kind: int) -> Positions:
        """The coordinates that a kind of client covers, in its own order."""
        return np.concatenate([np.empty(0, np.int64), *self._parts(kind)])

    def _parts(self, kind: int) -> Iterator[Positions]:
        for name, piece in sorted(self.pieces[kind].items()):
            summand, start = self.summands[name], self.starts[name]
            yield start + _flat(piece, summand.shape)
            if summand.weighing == "row":
                yield start + math.prod(summand.shape) + _flat(piece[:1], summand.shape[:1])


def piece_at(place: Indices, shape: Sequence[int]) -> TensorPiece:
    """The piece that lies in a tensor of this shape where a sub-model's index sets say."""
    return tuple(_spans(index, size) for index, size in zip(place, shape, strict=True))


def whole_piece(shape: Sequence[int]) -> TensorPiece:
    """All of a tensor of this shape."""
    return tuple(((0, size),) if size else () for size in shape)


def rows_piece(rows: Sequence[int], shape: Sequence[int]) -> TensorPiece:
    """Some rows, in this order, of a tensor of this shape."""
    return (_spans(np.array(rows, np.int64), shape[0]), *whole_piece(shape[1:]))


def piece_shape(piece: TensorPiece) -> tuple[int, ...]:
    """The shape of a client's tensor."""
    return tuple(sum(stop - start for start, stop in spans) for spans in piece)


def weights_that_follow(covering: Collection[frozenset[ClientId]]) -> frozenset[ClientId]:
    """Whose weight follows from the sums of weights over each of these sets of clients.

    Of two blocks, one of which one client more covers, the sums of weights differ by its own.
    """
    clients = sorted(frozenset[ClientId]().union(*covering))
    if not clients:
        return frozenset()
    sums = np.array([[client in one for client in clients] for one in covering], np.float64)
    alone = (np.linalg.pinv(sums).T * sums).sum(0)  # 1 where the sums leave no freedom
    return frozenset(client for client, share in zip(clients, alone, strict=True) if share > 1 - 1e-9)


def _spans(index: slice | Tensor | Positions, size: int) -> Spans:
    """Positions of a dimension of this size as spans."""
    listed = np.arange(*index.indices(size)) if isinstance(index, slice) else np.asarray(index, np.int64)
    if not len(listed):
        return ()
    breaks = (np.flatnonzero(np.diff(listed) != 1) + 1).tolist()
    return tuple((int(listed[a]), int(listed[b - 1]) + 1) for a, b in pairwise([0, *breaks, len(listed)]))


def _flat(piece: TensorPiece, shape: Sequence[int]) -> Positions:
    """Where a piece's numbers, as they lie in a client's memory, lie in the whole tensor's."""
    found = np.zeros((), np.int64)
    for spans, size in zip(piece, shape, strict=True):
        listed = np.concatenate([np.empty(0, np.int64), *(np.arange(start, stop) for start, stop in spans)])
        found = found[..., None] * size + listed
    return found.reshape(-1)


def _numbers(summand: Summand) -> int:
    """How many coordinates a tensor has, with its rows' weights."""
    rows = summand.shape[0] if summand.weighing == "row" else 0
    return math.prod(summand.shape) + rows


def _check_summand(name: str, summand: Summand) -> None:
    weighings: tuple[Any, ...] = get_args(Weighing)
    if summand.weighing not in weighings or (summand.weighing == "row" and not summand.shape):
        raise ConfigError(f"secure sums: {name}: found the weighing {summand.weighing!r} of a tensor {summand.shape}")
    if min(summand.shape, default=0) < 0:
        raise ConfigError(f"secure sums: {name}: found the shape {summand.shape}; expected no negative size")


def _check_piece(name: str, piece: TensorPiece, summand: Summand) -> None:
    """Check that a piece lies in its tensor, and has no position twice."""
    if len(piece) != len(summand.shape):
        raise ConfigError(f"secure sums: {name}: found a piece of {len(piece)} dimensions of {len(summand.shape)}")
    for spans, size in zip(piece, summand.shape, strict=True):
        ordered = sorted(spans)
        inside = all(0 <= start < stop <= size for start, stop in ordered)
        if not inside or any(one[1] > other[0] for one, other in pairwise(ordered)):
            raise ConfigError(
                f"secure sums: {name}: found the positions {spans!r:.60}; expected each once, below {size}"
            )
    if summand.weighing == "row" and piece[1:] != whole_piece(summand.shape[1:]):
        raise ConfigError(f"secure sums: {name}: found parts of rows; expected whole ones where rows have weights")
