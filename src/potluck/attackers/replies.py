"""What liars send instead of their replies."""

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from potluck.core.message import Message

Change = Callable[[Tensor, Tensor], Tensor]
"""From a tensor of a reply, and what was sent in its place or zeros, to what is sent instead."""


def changed(reply: Message, sent: Message, change: Change) -> Message:
    """The reply with every float tensor changed."""
    return Message(**{name: _changed(reply[name], sent.get(name), change) for name in reply})


def sign_flip(strength: float) -> Change:
    """Away from where an honest client would have gone."""
    return lambda reply, sent: sent - strength * (reply - sent)


def scaled(strength: float) -> Change:
    """Further than an honest client would have gone."""
    return lambda reply, sent: sent + strength * (reply - sent)


def free_rider(reply: Tensor, sent: Tensor) -> Tensor:
    """What was sent."""
    return sent


def noise(strength: float, generator: torch.Generator) -> Change:
    """Noise as large as so many times what the client has changed."""

    def noisy(reply: Tensor, sent: Tensor) -> Tensor:
        size = (reply - sent).square().mean().sqrt() if reply.numel() else reply.new_zeros(())
        return reply + strength * size * torch.randn(reply.shape, generator=generator, dtype=reply.dtype)

    return noisy


def alie_z(clients: int, liars: int) -> float:
    """As far from the mean, in deviations, as hides among so many clients: Baruch et al., Algorithm 3, lines 2 and 3.

    Of n clients, m of which lie, s = floor(n / 2 + 1) - m honest ones must be further from the mean than the lie for a
    majority to support it; z is the normal quantile at (n - m - s) / (n - m).
    """
    honest = clients - liars
    supporters = min(max(clients // 2 + 1 - liars, 0), honest)
    share = (honest - supporters) / honest if honest else 0.5
    return NormalDist().inv_cdf(min(max(share, 1e-3), 1 - 1e-3))


def alie(replies: Sequence[Message], z: float) -> Message:
    """What all liars of one shape send: the mean of their own replies less z deviations."""
    return Message(**{name: _little(z, [reply[name] for reply in replies]) for name in replies[0]})


def _little(z: float, values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {name: _little(z, [value[name] for value in values]) for name in first}
    if not (isinstance(first, Tensor) and first.is_floating_point()):
        return first
    stack = torch.stack(list(values))
    return stack.mean(0) - z * stack.std(0, correction=0)


def layout_of(value: Any) -> Any:
    """What must be equal for values to be averaged: names and shapes of their tensors."""
    if isinstance(value, Mapping):
        return tuple((name, layout_of(child)) for name, child in value.items())
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _changed(value: Any, sent: Any, change: Change) -> Any:
    if isinstance(value, Mapping):
        of = sent if isinstance(sent, Mapping) else {}
        return {name: _changed(child, of.get(name), change) for name, child in value.items()}
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    like = isinstance(sent, Tensor) and sent.shape == value.shape and sent.dtype == value.dtype
    return change(value, sent if like else torch.zeros_like(value))
