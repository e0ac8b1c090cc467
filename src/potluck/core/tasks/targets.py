"""What tasks check in targets, and the losses and positions that several of them share."""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""The target of a position that counts neither for the loss nor for a metric; torch's own default."""


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over examples and labels, from logits."""
    return F.binary_cross_entropy_with_logits(outputs, targets.reshape(outputs.shape).to(outputs.dtype))


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the positions of a batch that count; 0 if none does."""
    targets = targets.flatten()
    total = F.cross_entropy(outputs.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


def that_count(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (m, width) and targets (m,) of the positions whose target is not ignored."""
    counts = targets != IGNORED
    return outputs[counts], targets[counts]


def kind_fault(targets: Tensor, dtypes: tuple[torch.dtype, ...], axes: tuple[int, ...]) -> str | None:
    """What is wrong with the type or the number of axes of targets; None if nothing is."""
    if targets.dtype in dtypes and targets.dim() in axes:
        return None
    return f"are {str(targets.dtype).removeprefix('torch.')} of shape {tuple(targets.shape)}"


def range_fault(targets: Tensor, least: int, most: int) -> str | None:
    """What is wrong with whole numbers, at least one, that must lie from `least` to `most`; None if nothing is."""
    low, high = (int(end) for end in torch.aminmax(targets))
    return None if least <= low and high <= most else f"go from {low} to {high}"


def width_fault(width: int, needed: int) -> str | None:
    """What is wrong with networks of so many outputs where `needed` are; None if nothing is."""
    return None if width == needed else f"need networks with {needed} outputs; these have {width}"
