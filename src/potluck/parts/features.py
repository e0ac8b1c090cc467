"""Pairs of features that clients exchange: the input s_in and the output s_out of their intermediate layers."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from potluck.core.fit import Observed
from potluck.models.contract import split


def observed(net: nn.Module, inputs: Tensor) -> Observed:
    """The pair of each example, of the network as it is."""
    parts = split(net)
    s_in = parts.extractor(inputs)
    return {"s_in": s_in, "s_out": parts.intermediate(s_in)}


def signature(shapes: Iterable[torch.Size]) -> str:
    """The shapes of s_in and s_out, as text: only clients of one signature can use one another's features."""
    return " > ".join("x".join(map(str, shape)) for shape in shapes)


def drawn(pairs: Observed, most: int, rng: torch.Generator) -> Observed:
    """Up to `most` pairs, uniformly without replacement."""
    rows = torch.randperm(len(pairs["s_in"]), generator=rng)[:most]
    return {name: tensor[rows] for name, tensor in pairs.items()}


def with_pairs(store: dict[str, Observed], pairs: Observed | None, capacity: int) -> dict[str, Observed]:
    """The store, by signature, after a client's pairs came in and the oldest beyond `capacity` went.

    One pair alone has no batch statistics and is not stored.
    """
    if not pairs or len(pairs["s_in"]) < 2:
        return store
    name = signature(pairs[key].shape[1:] for key in ("s_in", "s_out"))
    old = store.get(name, {key: tensor[:0] for key, tensor in pairs.items()})
    return {**store, name: {k: torch.cat([old[k], pairs[k]])[-capacity:] for k in pairs}}
