"""How a method says what of its clients' replies is summed: whole layers, slices of layers, rows of classes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Size, Tensor

from potluck.core.federation import Member
from potluck.core.message import Message
from potluck.core.schema import Path
from potluck.core.summed import Left, Summed, Weighing
from potluck.parts.classes import own_rows
from potluck.parts.submodels import RowMasks, SubModel, whole


def summed_layers(
    reply: Message,
    entry: str,
    member: Member,
    keep: Mapping[str, Tensor],
    weighing: Weighing = "one",
    *,
    group: str = "all",
    prefix: str = "",
) -> dict[Path, Summed]:
    """The layers in an entry of a reply, each whole, or its own classes' rows. Counters, whole numbers, are not summed.

    Args:
        reply: the client's.
        entry: tensors by name; may be absent.
        member: the client.
        keep: what stands for layers that are in no sum; those that it lacks are differences, for which zeros stand.
        weighing: what the client counts.
        group: of clients whose layers meet.
        prefix: what the names begin with in the client's network.
    """
    tensors: Mapping[str, Tensor] = reply.get(entry, {})
    places = own_rows(whole(tensors), member, lambda name: prefix + name)
    axes = {} if member.head is None else {n: member.head.axes.get(prefix + n) for n in tensors}
    shapes = {name: _with_all_classes(t.shape, axes.get(name), member) for name, t in tensors.items()}
    return summed_slices(reply, entry, places, shapes, keep, weighing, group=group)


def summed_slices(
    reply: Message,
    entry: str,
    places: SubModel,
    shapes: Mapping[str, Size],
    keep: Mapping[str, Tensor],
    weighing: Weighing = "one",
    *,
    group: str = "all",
    rows: RowMasks | None = None,
) -> dict[Path, Summed]:
    """The slices in an entry of a reply.

    Args:
        reply: the client's.
        entry: tensors by name.
        places: index sets that say where they lie in the whole layers; names that it lacks are of no use to the server.
        shapes: of the whole layers.
        keep: as of `summed_layers`.
        weighing: what the client counts.
        group: of clients whose slices meet.
        rows: which rows count, by name, bool; all of those that are absent.
    """
    found: dict[Path, Summed] = {}
    for name, tensor in reply.get(entry, {}).items():
        if not tensor.is_floating_point():
            continue
        place, at = places.get(name), None
        assert not isinstance(place, Tensor)
        if place is not None and (counted := (rows or {}).get(name)) is not None:
            at = (counted.nonzero()[:, 0], *(slice(0, size) for size in tensor.shape[1:]))
            place = (torch.arange(shapes[name][0])[place[0]][counted], *place[1:])
        still = keep.get(name, torch.zeros_like(tensor))
        found[entry, name] = Summed(f"{group}/{entry}/{name}", tuple(shapes[name]), place, still, weighing, at)
    return found


def summed_rows(
    entry: str,
    tensor: Tensor,
    labels: Tensor,
    classes: int,
    left: Callable[[Tensor, Tensor], Mapping[str, Any]],
    *,
    counts: Tensor | None = None,
    columns: Tensor | None = None,
) -> dict[Path, Summed]:
    """A reply's rows of classes, which meet those of the same classes.

    Args:
        entry: its name.
        tensor: (rows, width).
        labels: the class of each row, int64 (rows,).
        classes: how many there are.
        left: a function from the rows, and which of them were summed, bool (rows,), to what is left of entries.
        counts: how often each row counts, int64 (rows,); once if None.
        columns: which of the width the client knows, int64 numbers; all if None.
    """
    width = tensor.shape[1]
    known = slice(0, width) if columns is None else columns
    at = None if columns is None else (slice(0, len(tensor)), columns)
    one = Summed(
        name=entry,
        shape=(classes, width),
        place=(labels, known),
        keep=_rows_left(left, known),
        weighing="one" if counts is None else "row",
        at=at,
        rows=counts,
    )
    return {(entry,): one}


def _rows_left(left: Callable[[Tensor, Tensor], Mapping[str, Any]], known: slice | Tensor) -> Left:
    return lambda means, summed: left(means, summed[:, known].all(1))


def _with_all_classes(shape: Size, axis: int | None, member: Member) -> Size:
    if axis is None or member.head is None:
        return shape
    return Size((*shape[:axis], member.head.classes.width, *shape[axis + 1 :]))
