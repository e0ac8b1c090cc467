"""BatchNorm's running statistics: leaving them unchanged, and re-estimating them."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from potluck.core.modes import held_layers, mode

# The shared base of all BatchNorm layers has no public name in torch.
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORMS = (*BATCH_NORMS, nn.GroupNorm, nn.LayerNorm)


def batch_norms(net: nn.Module) -> dict[str, BatchNorm]:
    """The BatchNorm layers of `net` by name."""
    return {name: module for name, module in net.named_modules() if isinstance(module, BATCH_NORMS)}


def norms_of(net: nn.Module) -> list[nn.Module]:
    """The layers of `net` that normalise, of any kind: what they compute does not depend on their input's scale."""
    return [module for module in net.modules() if isinstance(module, _NORMS)]


def takes_batch_statistics(net: nn.Module) -> bool:
    """Whether a BatchNorm layer of `net` uses batch statistics in training, which takes at least two examples."""
    norms = batch_norms(net).values()
    return any(layer.training or not net.training or layer.running_mean is None for layer in norms)


@contextmanager
def keep_statistics(net: nn.Module) -> Generator[None]:
    """Inside the block, training-mode forwards normalise with batch statistics and leave the buffers alone."""
    layers = [layer for layer in batch_norms(net).values() if layer.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


def measure_statistics(net: nn.Module, batches: Iterable[Tensor]) -> int:
    """Set the running statistics to plain means over `batches` of batch mean and unbiased batch variance.

    HeteroFL's static BatchNorm: statistics are measured once for fixed weights instead of tracked while they
    change. Batches of one example are skipped, since they have no variance. Layers held in evaluation mode keep their
    statistics.

    Returns:
        The number of batches measured; with none, the statistics are those of a new layer.
    """
    held = set(held_layers(net))
    layers = [layer for layer in batch_norms(net).values() if layer not in held]
    momenta = [layer.momentum for layer in layers]
    measured = 0
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # torch's name for a cumulative mean
        with mode(net, training=True), torch.no_grad():
            for inputs in batches:
                if len(inputs) > 1:
                    net(inputs)
                    measured += 1
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    return measured
