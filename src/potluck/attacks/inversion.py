"""Inversion of features: the inputs that a network sees as it saw the ones that a client has sent features of.

After FedIN's revision, section 4.3, https://openreview.net/forum?id=Nh3pX3AnPt: the server, which has the weights of
the extractor, looks for x with the least MSE between its features and those that it received. The paper states neither
optimiser nor steps. Here they begin as N(0, 1) in the space of prepared inputs and are moved by Adam with a rate of
0.1; there is no prior on what images look like, and the network is in evaluation mode.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.nets.modes import mode

STEPS, RATE = 2000, 0.1


def invert(
    net: nn.Module,
    features: Callable[[Tensor], Tensor],
    received: Tensor,
    shape: tuple[int, ...],
    *,
    steps: int = STEPS,
    clip: float | None = None,
    seed: int = 0,
) -> Tensor:
    """Inputs (n, *shape) whose features are those that were received (n, ...).

    Args:
        net: the network that `features` computes with.
        features: of inputs.
        received: what a client has sent.
        shape: of one input.
        steps: of the optimiser.
        clip: the length to which the client has shortened an example's features; None if it has not.
        seed: of the start.
    """
    found = torch.randn(len(received), *shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    optimizer, target = torch.optim.Adam([found], lr=RATE), received.flatten(1)
    with mode(net, training=False):
        for _ in range(steps):
            seen = bounded(features(found), clip)
            (found.grad,) = torch.autograd.grad(F.mse_loss(seen, target) * len(target), found)
            optimizer.step()
    return found.detach()


def bounded(features: Tensor, clip: float | None) -> Tensor:
    """Each example's features as a row, no longer than `clip`; None bounds nothing."""
    rows = features.flatten(1)
    return rows if clip is None else rows * (clip / rows.norm(dim=1, keepdim=True).clamp(min=clip))


def to_images(inputs: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Prepared inputs as images in [0, 1]: `low` and `high` (channels, 1, 1) are black and white; beyond is cut off."""
    return ((inputs - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
