"""Predictions without training: evaluation mode, no gradients, batch by batch."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from potluck.core.nets.modes import mode
from potluck.core.requests.examples import Examples

_AT_ONCE = 2**20


def predict(net: nn.Module, examples: Examples, batch_size: int = 100) -> Tensor:
    """Logits (n, classes) of all examples in order; the net's mode is restored, its buffers are unchanged.

    A batch of 100 small images keeps a layer's activations in a core's cache: with 250, a PreResNet-20 takes 1.8 times
    as long and a ResNet-18 of width 16 1.2 times (one thread of an AMD EPYC).
    """
    (logits,) = forward(net, examples, lambda inputs: (net(inputs),), batch_size)
    return logits


def forward(
    net: nn.Module, examples: Examples, compute: Callable[[Any], tuple[Tensor, ...]], batch_size: int
) -> tuple[Tensor, ...]:
    """The results of `compute` on all examples in order, one tensor (n, ...) for each result.

    Args:
        net: put in evaluation mode while it runs.
        examples: not augmented.
        compute: maps inputs (batch, ...) to tensors (batch, ...); runs without gradients.
        batch_size: examples in one forward pass.
    """
    with mode(net, training=False), torch.no_grad():
        found = [compute(batch.inputs) for batch in examples.batches(batch_size)]
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def predictions(
    net: nn.Module, examples: Examples, placed: Callable[[Any], Any], batch_size: int = 100
) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs and targets of all examples in order, in chunks of about a million outputs.

    As in `predict`, but never all in memory together; the net is in evaluation mode until the last chunk is taken.

    Args:
        net: on any device.
        examples: to predict for.
        placed: moves tensors, also those by name, to the net's device.
        batch_size: examples in one forward pass.
    """
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    with mode(net, training=False), torch.no_grad():
        for batch in examples.batches(batch_size):
            outputs.append(net(placed(batch.inputs)))
            targets.append(placed(batch.targets))
            if sum(output.numel() for output in outputs) >= _AT_ONCE:
                yield torch.cat(outputs), torch.cat(targets)
                outputs, targets = [], []
        if outputs:
            yield torch.cat(outputs), torch.cat(targets)
