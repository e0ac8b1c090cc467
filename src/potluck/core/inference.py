"""Predictions without training: evaluation mode, no gradients, batch by batch."""

import torch
from torch import Tensor, nn

from potluck.core.examples import Examples
from potluck.core.modes import mode


def predict(net: nn.Module, examples: Examples, batch_size: int = 250) -> Tensor:
    """Logits (n, classes) of all examples in order; the net's mode is put back, its buffers are untouched."""
    with mode(net, training=False), torch.no_grad():
        return torch.cat([net(inputs) for inputs, _ in examples.batches(batch_size)])
