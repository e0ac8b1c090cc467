"""BatchNorm's running statistics: leaving them unchanged, and re-estimating them.

In evaluation mode a layer normalises by the statistics that it has learnt in training, or that were sent. Where there
are neither, it would normalise by those of a new layer, mean 0 and variance 1, which fit no data: there they are
measured on the client's own training data, whether the net is frozen and read (`Sharing.ready`) or evaluated.
"""

from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager

import torch
from torch import nn

from potluck.core.ground.inputs import Inputs, count_of
from potluck.core.nets.modes import held_layers, mode

# The shared base of all BatchNorm layers has no public name in torch.
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (*BATCH_NORMS, *_INSTANCE_NORMS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def batch_norms(net: nn.Module) -> dict[str, BatchNorm]:
    """The BatchNorm layers of `net` by name, but for those that have been left out of it, see `splitting.pruned`."""
    layers = {name: module for name, module in net.named_modules() if isinstance(module, BATCH_NORMS)}
    return {name: layer for name, layer in layers.items() if "running_mean" in layer._buffers}


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


def unlearnt(net: nn.Module) -> list[BatchNorm]:
    """The BatchNorm layers whose running statistics are those of a new layer, unless they are held in evaluation mode.

    The count of batches alone does not tell: weights that were saved by other software may lack it.
    """
    return [layer for layer in _tracking(net) if _is_new(layer)]


def forget_statistics(net: nn.Module) -> None:
    """Set the running statistics to those of new layers, except in layers held in evaluation mode."""
    for layer in _tracking(net):
        layer.reset_running_stats()


def measure_statistics(net: nn.Module, batches: Iterable[Inputs], only: Collection[nn.Module] | None = None) -> int:
    """Set the running statistics to plain means over `batches` of batch mean and unbiased batch variance.

    HeteroFL's static BatchNorm: statistics are measured once for fixed weights instead of tracked while they
    change. Batches of one example are skipped, since they have no variance. Layers held in evaluation mode keep their
    statistics.

    Args:
        net: of which other layers are in training mode.
        batches: of inputs (batch, ...).
        only: the BatchNorm layers to measure; all others normalise by the statistics that they have, and keep them.
            None for all.

    Returns:
        The number of batches measured; with none, the statistics are those of a new layer.
    """
    tracking = _tracking(net)
    layers = [layer for layer in tracking if only is None or layer in only]
    if only is not None and not layers:
        return 0
    momenta = [layer.momentum for layer in layers]
    measured = 0
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # torch's name for a cumulative mean
        with mode(net, training=True), torch.no_grad():
            for layer in tracking:
                layer.training = layer in layers
            for inputs in batches:
                if count_of(inputs) > 1:
                    net(inputs)
                    measured += 1
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    return measured


def _tracking(net: nn.Module) -> list[BatchNorm]:
    """The BatchNorm layers that are not held in evaluation mode."""
    held = set(held_layers(net))
    return [layer for layer in batch_norms(net).values() if layer not in held]


def _is_new(layer: BatchNorm) -> bool:
    mean, variance = layer.running_mean, layer.running_var
    if mean is None or variance is None or layer.num_batches_tracked:
        return False
    return not bool(mean.any()) and bool((variance == 1).all())
