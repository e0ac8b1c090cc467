"""Predictions without training: evaluation mode, no gradients, batch by batch."""

import torch
from torch import Tensor, nn

from potluck.core.examples import Examples


def predict(net: nn.Module, examples: Examples, batch_size: int = 250) -> Tensor:
    """Logits (n, classes) of all examples in order; the net's mode is put back, its buffers are untouched."""
    training = net.training
    net.eval()
    with torch.no_grad():
        logits = [net(inputs) for inputs, _ in examples.batches(batch_size)]
    net.train(training)
    return torch.cat(logits)
