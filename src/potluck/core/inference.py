"""Predictions without training: evaluation mode, no gradients, batch by batch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from potluck.core.examples import Examples
from potluck.core.modes import mode


def predict(
    net: nn.Module, examples: Examples, batch_size: int = 100, placed: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Logits (n, classes) of all examples in order; the net's mode is put back, its buffers are untouched.

    `placed` brings a batch to where the net is, if that is elsewhere.

    A batch of 100 small images keeps a layer's activations in a core's cache: with 250, a PreResNet-20 takes 1.8 times
    as long and a ResNet-18 of width 16 1.2 times (one thread of an AMD EPYC).
    """
    with mode(net, training=False), torch.no_grad():
        batches = (inputs for inputs, _ in examples.batches(batch_size))
        return torch.cat([net(inputs if placed is None else placed(inputs)) for inputs in batches])
