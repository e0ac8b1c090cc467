"""Sub-models: which coordinates of the global weights a client has, how they are cut out, and how they are averaged.

A sub-model says of each of its tensors where it lies in the global one: by an index set for every dimension, in the
order that the client's tensor has, or by a mask over single elements. Leading slices are made here; those of a net that
Potluck cut come from `lies_in`; those that roll or are drawn have to agree from layer to layer and come from
`potluck.parts.channels`; masks are tensors as they are.

Every covered coordinate becomes the weighted mean over exactly the clients that cover it, and the others keep their
value (HeteroFL, Algorithm 1). Replies are added up one at a time.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Size, Tensor

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.core.nets.slicing import Indices
from potluck.core.nets.weights import Weights
from potluck.core.roles import Arriving
from potluck.parts.means import Aggregate

SubmodelPlace = Indices | Tensor
"""Where a tensor lies in the global one: an index set for each dimension, or a boolean mask of the global one's shape.
Of a mask the client has the elements in a row, (elements,)."""

SubModel = Mapping[str, SubmodelPlace]
"""The place of each tensor of a sub-model, by name."""

RowMasks = Mapping[str, Tensor | None]
"""Which rows of a tensor count, bool, by the tensor's name: of the client's tensor, or of the global one if masked.
All do of tensors that are absent or None."""

PLAIN_MEAN = Aggregate()


def leading(shapes: Mapping[str, Size]) -> SubModel:
    """The leading slices that fit a narrower net of these shapes (HeteroFL, eq. 1)."""
    return {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}


def whole(weights: Mapping[str, Tensor]) -> SubModel:
    """The sub-model that has all of these weights."""
    return leading({name: tensor.shape for name, tensor in weights.items()})


def select(weights: Mapping[str, Tensor], submodel: SubModel) -> Weights:
    """What a sub-model has of these weights, in memory of its own; names that only one of both has are left out."""
    places = {name: place for name, place in submodel.items() if name in weights}
    return {name: weights[name][_at(place, weights[name].shape)].clone() for name, place in places.items()}


def select_each(weights: Mapping[str, Tensor], submodels: Mapping[ClientId, SubModel]) -> dict[ClientId, Weights]:
    """What each client's sub-model has of these weights; clients of one sub-model have the same tensors."""
    different = {id(submodel): submodel for submodel in submodels.values()}
    found = {key: select(weights, submodel) for key, submodel in different.items()}
    return {client: found[id(submodel)] for client, submodel in submodels.items()}


def put(values: Mapping[str, Tensor], submodel: SubModel, onto: Mapping[str, Tensor]) -> Weights:
    """A copy of `onto` that has a sub-model's values in their places."""
    whole = {name: tensor.clone() for name, tensor in onto.items()}
    for name, value in values.items():
        whole[name][_at(submodel[name], whole[name].shape)] = value
    return whole


def packed(mask: Tensor) -> Tensor:
    """A boolean mask of n elements with eight of them in a byte, uint8 (ceil(n / 8),)."""
    return torch.from_numpy(np.packbits(mask.numpy()))


def unpacked(bits: Tensor, shape: Size) -> Tensor:
    """The mask of this shape that was packed."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=shape.numel())).view(shape).bool()


class CoverageMean:
    """Coordinate by coordinate, the weighted mean over the clients that cover it, which are added one at a time.

    Under the plain mean it holds two tensors for each of the global ones that somebody covers, and none of the
    clients'. Clients that agree in a coordinate give its value bit for bit. Integers (counters) give their maximum.

    Args:
        keep: the global weights before the round, which coordinates keep that nobody covers.
        combine: how several clients' values of a coordinate become one. All rules but "mean" hold what was added.
    """

    def __init__(self, keep: Mapping[str, Tensor], combine: Aggregate = PLAIN_MEAN) -> None:
        self._keep = keep
        self._combine = combine
        self._running: dict[str, tuple[Tensor, Tensor]] = {}
        self._gathered: dict[str, list[tuple[Tensor, SubmodelPlace, float]]] = {}

    def add(
        self,
        values: Mapping[str, Tensor],
        submodel: SubModel,
        share: float = 1.0,
        rows: RowMasks | None = None,
    ) -> None:
        """Take in one client's tensors.

        Args:
            values: by name, each of the size of its place.
            submodel: where they lie.
            share: the client's weight; with 0 it covers nothing.
            rows: limits what the client covers of these tensors; what else it has of them may be anything.

        Raises:
            ValueError: a tensor is not one of the global weights, or not of the size of its place.
        """
        for name, value in values.items() if share else ():
            if name not in self._keep or name not in submodel:
                raise ValueError(f"{name} is none of the sub-model's weights")
            old, place = self._keep[name], submodel[name]
            if (counted := (rows or {}).get(name)) is not None:
                value, place = _of_rows(value, place, counted, old.shape)
            at = _at(place, old.shape)
            if self._combine.rule == "mean" or not old.is_floating_point():
                self._take_in(name, value, at, share)
            else:
                _check_fits(name, value, old[at])
                self._gathered.setdefault(name, []).append((value, place, share))

    def weights(self) -> Weights:
        """All weights after the round; tensors that nobody covers are those of `keep`."""
        means = {name: mean for name, (mean, _) in self._running.items()}
        return {**self._keep, **means, **{name: self._combined(name) for name in self._gathered}}

    def _take_in(self, name: str, value: Tensor, at: Indices | Tensor, share: float) -> None:
        if name not in self._running:
            old = self._keep[name]
            held = torch.zeros_like(old, dtype=torch.promote_types(old.dtype, torch.float32))
            self._running[name] = old.clone(), held
        running, held = self._running[name]
        mean = running[at]
        _check_fits(name, value, mean)
        weight = held[at].add_(share)
        if value.is_floating_point():
            mean.lerp_(value, (share / weight).to(value.dtype))  # 1 where it is the first: the old value is gone
        else:
            mean.copy_(torch.where(weight > share, torch.maximum(mean, value), value))
        if not _is_view(at):
            running[at], held[at] = mean, weight

    def _combined(self, name: str) -> Tensor:
        old = self._keep[name]
        nothing = {name: torch.full_like(old, torch.nan)}
        spread = [put({name: value}, {name: place}, nothing)[name] for value, place, _ in self._gathered[name]]
        found = self._combine.of_covered(torch.stack(spread), [share for *_, share in self._gathered[name]])
        return torch.where(found.isnan(), old, found)


def mean_where_covered(
    replies: Arriving,
    submodels: Mapping[ClientId, SubModel],
    keep: Mapping[str, Tensor],
    combine: Aggregate = PLAIN_MEAN,
    *,
    share: Callable[[Message], float] = lambda reply: 1.0,
    rows: Callable[[ClientId, Message], RowMasks] = lambda id, reply: {},
    values: Callable[[Message], Weights] = lambda reply: reply["weights"],
) -> Weights:
    """The weights after a round: `CoverageMean` of what clients replied.

    Args:
        replies: of an exchange, read to their end; under the plain mean one is in memory at a time.
        submodels: what each client was sent; clients that are not named here do not count.
        keep: the weights before the round.
        combine: how several clients' values become one.
        share: a client's weight in the mean.
        rows: which rows count of what a client sent.
        values: its tensors; by default the reply's entry "weights".
    """
    means = CoverageMean(keep, combine)
    for id, reply in combine.arriving(replies):
        if id in submodels:
            means.add(values(reply), submodels[id], share(reply), rows(id, reply))
        del reply  # before the next comes
    return means.weights()


def _at(place: SubmodelPlace, shape: Size) -> Indices | Tensor:
    """What indexes a tensor of this shape there: the product of the index sets."""
    if isinstance(place, Tensor) or _is_view(place):
        return place
    listed = [_positions(index, size) for index, size in zip(place, shape, strict=True)]
    return tuple(index.view(-1, *[1] * (len(listed) - 1 - dim)) for dim, index in enumerate(listed))


def _is_view(at: Indices | Tensor) -> bool:
    """Whether what lies there can be had without a copy."""
    return not isinstance(at, Tensor) and all(isinstance(index, slice) for index in at)


def _positions(index: slice | Tensor, size: int) -> Tensor:
    """The positions that an index takes of a dimension of this size, int64."""
    return torch.arange(*index.indices(size)) if isinstance(index, slice) else index


def _of_rows(value: Tensor, place: SubmodelPlace, rows: Tensor, shape: Size) -> tuple[Tensor, SubmodelPlace]:
    """Some rows alone of a client's tensor, and where they lie."""
    if isinstance(place, Tensor):
        counted = rows.view(-1, *[1] * (place.dim() - 1)).expand_as(place)
        return value[counted[place]], place & counted
    return value[rows], (_positions(place[0], shape[0])[rows], *place[1:])


def _check_fits(name: str, value: Tensor, room: Tensor) -> None:
    if value.shape != room.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, its place {tuple(room.shape)}")
