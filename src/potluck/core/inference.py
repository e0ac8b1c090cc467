"""Predictions without training: evaluation mode, no gradients, batch by batch."""

import torch
from torch import Tensor, nn

from potluck.core.examples import Examples
from potluck.core.modes import mode


def predict(net: nn.Module, examples: Examples, batch_size: int = 100) -> Tensor:
    """Logits (n, classes) of all examples in order; the net's mode is put back, its buffers are untouched.

    A batch of 100 small images keeps a layer's activations in a core's cache: with 250, a PreResNet-20 takes 1.8 times
    as long and a ResNet-18 of width 16 1.2 times (one thread of an AMD EPYC).
    """
    with mode(net, training=False), torch.no_grad():
        return torch.cat([net(inputs) for inputs, _ in examples.batches(batch_size)])
