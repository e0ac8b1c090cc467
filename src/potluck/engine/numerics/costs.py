"""Estimates of a network's cost, for dividing jobs of unequal length; results never depend on them."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from potluck.core.nets.modes import mode


def forward_flops(net: nn.Module, input_shape: Sequence[int]) -> int:
    """Floating-point operations of a forward pass of one example, counted by torch; at least 1.

    For a net that does not run on zeros of this shape, the number of its parameters.
    """
    counter = FlopCounterMode(display=False)
    try:
        with mode(net, training=False), torch.no_grad(), counter:
            net(torch.zeros(1, *input_shape))
    except Exception:
        return sum(parameter.numel() for parameter in net.parameters()) + 1
    return counter.get_total_flops() + 1
