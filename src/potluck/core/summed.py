"""What a server needs of clients' tensors where sums over clients are all that it needs, as a method declares it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from potluck.core.message import Message
from potluck.core.nets.slicing import Indices
from potluck.core.schema import (
    ClassCounts,
    Kind,
    Labels,
    Misfit,
    Optional,
    OwnLogits,
    Path,
    Plain,
    Probabilities,
    Schema,
    Tensors,
    UpTo,
)

Weighing = Literal["one", "client", "row"]
"""What a client's numbers count in a sum: once, as often as the client weighs, or as often as it says of each row."""

Left = Callable[[Tensor, Tensor], Mapping[str, Any]]
"""A function from a reply's tensor, means where there are sums and 0 elsewhere, and where there are (bool, of the same
shape), to the entries of the reply that say what is left."""


@dataclass(frozen=True, eq=False)
class Summed:
    """A tensor of a reply of which the server needs sums alone.

    Attributes:
        name: of the whole tensor that it belongs to; those of one name are summed with one another.
        shape: of the whole tensor.
        place: where the numbers lie there, for each dimension; None if the server has no use for them.
        keep: what stands in the reply for numbers that are in no sum: a tensor of its shape that changes nothing at the
            server, such as what was sent, or a function that leaves them out.
        weighing: what they count.
        at: which of the reply's tensor they are, for each dimension; None for all. The server has no use for the rest.
        rows: how often each row of them counts, int64 (rows,), if they are weighed by row.
    """

    name: str
    shape: tuple[int, ...]
    place: Indices | None
    keep: Tensor | Left
    weighing: Weighing = "one"
    at: Indices | None = None
    rows: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ToSum:
    """What is summed of a client's reply; the rest passes as it is.

    Attributes:
        tensors: by the names that lead to them.
        weight: what the client weighs where its numbers count by client, a whole number from 1.
    """

    tensors: Mapping[Path, Summed] = field(default_factory=dict[Path, Summed])
    weight: int = 1


@dataclass(frozen=True)
class Withheld:
    """A tensor that a client has kept back of its reply, since it adds it to a sum.

    Attributes:
        path: the names that lead to it.
        shape: its shape. In the reply stands one without numbers, of the same type.
    """

    path: Path
    shape: tuple[int, ...]


def kept_back(reply: Message, of: ToSum) -> tuple[Message, tuple[Withheld, ...]]:
    """The reply without the numbers of which sums are taken, and which tensors these are."""
    entries, found = dict(reply), list[Withheld]()
    for path in of.tensors:
        own = tensor_at(reply, path)
        put_at(entries, path, own.new_empty(0))
        found.append(Withheld(path, tuple(own.shape)))
    return Message(**entries), tuple(found)


def with_stand_ins(reply: Message, withheld: Sequence[Withheld], expected: Kind, most_bytes: int) -> Message:
    """The reply with tensors that fit in the place of those that were kept back, and tell nothing.

    Args:
        reply: as `kept_back` gave it.
        withheld: likewise; from a client, who may say anything.
        expected: the schema of the whole reply.
        most_bytes: the most that these tensors may take.

    Raises:
        Misfit: there are no such tensors, or they would take more.
    """
    entries, left = dict(reply), most_bytes
    for one in withheld:
        own = tensor_at(reply, one.path)
        left -= math.prod(one.shape) * own.element_size()
        if own.numel() or not own.is_floating_point() or left < 0:
            raise Misfit(f"what it keeps back at {'.'.join(one.path)!r:.80} is no tensor that its reply may hold")
        put_at(entries, one.path, _stand_in(_kind_at(expected, one.path), own.new_zeros(()).expand(one.shape)))
    return Message(**entries)


def tensor_at(reply: Message, path: Path) -> Tensor:
    """The reply's tensor to which these names lead.

    Raises:
        Misfit: there is none.
    """
    found: Any = reply
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    if not isinstance(found, Tensor):
        raise Misfit(f"{'.'.join(path)!r:.80} is no tensor of the reply")
    return found


def put_at(entries: dict[str, Any], path: Path, value: Tensor) -> None:
    """Put a value where these names lead, into dicts that are copied on the way."""
    *outer, last = path
    for name in outer:
        entries[name] = dict(entries[name])
        entries = entries[name]
    entries[last] = value


def with_tensors(reply: Message, tensors: Mapping[Path, Tensor]) -> Message:
    """The reply with other tensors where these names lead; what it was made of stays as it is."""
    entries = dict(reply)
    for path, tensor in tensors.items():
        put_at(entries, path, tensor)
    return Message(**entries)


def _kind_at(kind: Kind, path: Path) -> Kind:
    """The type of the entry to which these names lead, as far as it is declared."""
    for name in path:
        inner = kind.kind if isinstance(kind, Optional) else kind
        kind = inner.entries.get(name, inner) if isinstance(inner, Schema) else inner
    return kind.kind if isinstance(kind, Optional) else kind


def _stand_in(kind: Kind, zeros: Tensor) -> Tensor:
    """A tensor of this type where zeros are none."""
    if isinstance(kind, Probabilities) and zeros.dim() and zeros.shape[-1]:
        return (zeros[..., :1] + 1 / zeros.shape[-1]).expand(zeros.shape)
    if isinstance(kind, OwnLogits) and zeros.dim() == 2 and zeros.shape[1] == kind.own.width:
        return kind.own.only(zeros)
    return zeros


def blank(kind: Kind) -> Any:
    """A value of this type with zeros for numbers, as few rows as can be, the most where it is a count.

    It stands for the reply of a client that has given none, as far as its form follows from what was sent. What may be
    absent is.
    """
    if isinstance(kind, Schema):
        return {name: blank(entry) for name, entry in kind.entries.items() if not kind.may_lack(name)}
    if isinstance(kind, Tensors):
        return torch.zeros([0 if isinstance(size, UpTo) else size for size in kind.shape], dtype=kind.dtype)
    if isinstance(kind, ClassCounts):
        return torch.zeros(kind.classes, dtype=torch.int64)
    if isinstance(kind, Labels):
        return torch.zeros(0, dtype=torch.int64)
    if isinstance(kind, Probabilities | OwnLogits):
        width = kind.classes if isinstance(kind, Probabilities) else kind.own.width
        return torch.zeros(0 if isinstance(kind.rows, UpTo) else kind.rows, width)
    return kind.kind(kind.most) if isinstance(kind, Plain) else ""
