"""Corrupted replies, each with one error, made from a correct one."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from potluck.core.schema import Kind, Optional, Plain, Schema

Corrupted = tuple[dict[str, Any], str]


def corruptions(reply: Mapping[str, Any], declared: Schema) -> Iterator[Corrupted]:
    """Each corrupted reply, and a description of its error.

    Args:
        reply: a correct one.
        declared: the schema, which tells which entries may be absent.
    """
    yield from _of_names(dict(reply), declared)
    for name, value in reply.items():
        inner = declared.entries[name]
        if isinstance(value, Mapping) and isinstance(inner, Schema):
            wrong = corruptions(value, inner)
        elif isinstance(value, Mapping):
            wrong = ((bad, what) for bad, what in _of_leaves(value))
        else:
            wrong = _of_value(value, inner)
        for bad, what in wrong:
            yield {**reply, name: bad}, f"in {name} {what}"


def _of_names(entries: dict[str, Any], declared: Schema) -> Iterator[Corrupted]:
    """Extra, missing or renamed entries."""
    yield {**entries, "stowaway": torch.zeros(1)}, "an entry that is not declared"
    for name, value in entries.items():
        rest = {other: kept for other, kept in entries.items() if other != name}
        yield {**rest, f"{name}x": value}, f"the name {name}x in place of {name}"
        if not declared.may_lack(name):
            yield rest, f"no {name}"


def _of_leaves(entries: Mapping[str, Any]) -> Iterator[Corrupted]:
    yield {**entries, "stowaway": torch.zeros(1)}, "an entry that is not declared"
    for name, value in entries.items():
        for bad, what in _of_value(value, None):
            yield {**entries, name: bad}, f"in {name} {what}"


def _of_value(value: Any, declared: Kind | None) -> Iterator[tuple[Any, str]]:
    """Values of another type, shape or size."""
    yield {"inner": value}, "named entries in place of a value"
    yield "many", "text"
    yield [value], "a list"
    if isinstance(value, Tensor):
        yield from _of_tensor(value)
    else:
        yield torch.tensor(value), "a tensor in place of a number"
        declared = declared.kind if isinstance(declared, Optional) else declared
        bounds = declared if isinstance(declared, Plain) else None
        counts = bounds is None or bounds.kind is int or isinstance(value, int)  # a count that is declared as another
        whole = [value + 0.5] if counts else []
        below = [-1] if bounds is None or bounds.least > -1 else []
        for bad in (*below, 10**18, 10**400, float("nan"), float("inf"), *whole, True):
            yield bad, f"the number {str(bad)[:20]}"


def _of_tensor(tensor: Tensor) -> Iterator[tuple[Any, str]]:
    yield 1.0, "a number in place of a tensor"
    yield tensor[None], "one dimension more"
    yield tensor.reshape(-1)[:0], "nothing"
    if tensor.dim():
        yield torch.cat([tensor, *[tensor[:1]] * 10_000]), "ten thousand rows more"
    yield tensor.to(torch.int32), "another type"
    yield tensor.to(torch.float16), "a smaller floating type"
    for number in (float("nan"), float("inf"), -float("inf"), 1e30) if tensor.is_floating_point() else (-1, 2**60):
        if tensor.dtype not in (torch.bool, torch.uint8):  # of which every value is one that may be sent
            bad = tensor.clone()
            bad.view(-1)[-1] = number
            yield bad, f"the number {number}"
