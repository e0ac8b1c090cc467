"""Estimates of a network's cost, for dividing jobs of unequal length; results never depend on them."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from potluck.core.ground.inputs import InputShape
from potluck.core.nets.entrance import blank_inputs
from potluck.core.nets.modes import mode


def forward_flops(net: nn.Module, input_shape: InputShape) -> int:
    """Floating-point operations of a forward pass of one example, counted by torch; at least 1.

    For a net that does not run on zeros of this shape, the number of its parameters.
    """
    counter = FlopCounterMode(display=False)
    try:
        with mode(net, training=False), torch.no_grad(), counter:
            net(blank_inputs(net, input_shape, 1))
    except Exception:
        return sum(parameter.numel() for parameter in net.parameters()) + 1
    return counter.get_total_flops() + 1
