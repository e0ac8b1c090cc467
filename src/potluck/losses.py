"""Losses that several methods share, each with its reduction, temperature and gradient path explicit."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def squared_distance(net: nn.Module, anchor: Mapping[str, Tensor]) -> Tensor:
    """Squared Euclidean distance between the net's parameters and `anchor`, buffers left out; a scalar.

    FedProx and FedIN (eq. 3 of the revision) add (mu / 2) times this to the local loss.
    """
    gaps = [(parameter - anchor[name]).square().sum() for name, parameter in net.named_parameters()]
    return torch.stack(gaps).sum()


def masked_cross_entropy(logits: Tensor, targets: Tensor, present: Tensor) -> Tensor:
    """Cross-entropy in which the logits of absent classes are set to 0 (HeteroFL, section 4.2).

    Zero, not minus infinity: an absent class still counts in the normaliser but receives no gradient.

    Args:
        logits: (batch, classes).
        targets: int64 (batch,).
        present: bool (classes,), the classes this client holds.
    """
    return F.cross_entropy(logits.masked_fill(~present, 0.0), targets)
