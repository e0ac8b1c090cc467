"""What a server needs of clients' tensors where sums over clients are all that it needs, as a method declares it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from potluck.core.message import Message
from potluck.core.nets.slicing import Indices
from potluck.core.schema import ClassCounts, Kind, Labels, OwnLogits, Path, Plain, Probabilities, Schema, Tensors, UpTo

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


def tensor_at(reply: Message, path: Path) -> Tensor:
    """The tensor of a reply to which these names lead."""
    found: Any = reply
    for name in path:
        found = found[name]
    return found


def with_tensors(reply: Message, tensors: Mapping[Path, Tensor]) -> Message:
    """The reply with other tensors where these names lead; what it was made of stays as it is."""
    entries: dict[str, Any] = dict(reply)
    copied = set[Path]()
    for path, tensor in tensors.items():
        inner = entries
        for depth, name in enumerate(path[:-1], 1):
            if path[:depth] not in copied:
                inner[name] = dict(inner[name])
                copied.add(path[:depth])
            inner = inner[name]
        inner[path[-1]] = tensor
    return Message(**entries)
