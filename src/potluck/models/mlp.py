"""Multi-layer perceptrons: `mlp2` to `mlp6` without, `mlp1_norm` to `mlp3_norm` with batch norm.

The number counts hidden layers. They take inputs of any shape. A deeper net only appends layers of the same width,
so those of one kind agree on the outputs of the stem and of the last stage.

Those with batch norm are the toys of FedORION: each hidden layer is linear, then ReLU, then the norm. For two
features and three classes the paper does not say how many units they have; Potluck's experiments take
`mlp2_norm(width=16)`, `mlp1_norm(width=32)` and `mlp3_norm(width=8)` for clients, `mlp1_norm(width=16)` for the
server. `mlp1_norm` has nothing between its stem and its head, so methods that split networks in three refuse it.

Options:
    width: units of every hidden layer.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

from torch import nn

from potluck.core.nets.scale import FULL, Scale
from potluck.models.contract import StagedNet, of_depth


def mlp2(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 64) -> StagedNet:
    """Two hidden layers of `width` units: stem and hidden1."""
    return _mlp(2, num_classes, input_shape, scale, width)


def mlp3(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 64) -> StagedNet:
    """Three hidden layers of `width` units: stem, hidden1 and hidden2."""
    return _mlp(3, num_classes, input_shape, scale, width)


def mlp4(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 64) -> StagedNet:
    """Four hidden layers of `width` units: stem and hidden1 to hidden3."""
    return _mlp(4, num_classes, input_shape, scale, width)


def mlp5(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 64) -> StagedNet:
    """Five hidden layers of `width` units: stem and hidden1 to hidden4."""
    return _mlp(5, num_classes, input_shape, scale, width)


def mlp6(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 64) -> StagedNet:
    """Six hidden layers of `width` units: stem and hidden1 to hidden5."""
    return _mlp(6, num_classes, input_shape, scale, width)


def mlp1_norm(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 32) -> StagedNet:
    """One hidden layer of `width` units and a batch norm: stem."""
    return _mlp(1, num_classes, input_shape, scale, width, norm=True)


def mlp2_norm(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 16) -> StagedNet:
    """Two hidden layers of `width` units, each with a batch norm: stem and hidden1."""
    return _mlp(2, num_classes, input_shape, scale, width, norm=True)


def mlp3_norm(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 8) -> StagedNet:
    """Three hidden layers of `width` units, each with a batch norm: stem, hidden1 and hidden2."""
    return _mlp(3, num_classes, input_shape, scale, width, norm=True)


VARIANTS: dict[str, Callable[..., StagedNet]] = {
    "mlp2": mlp2,
    "mlp3": mlp3,
    "mlp4": mlp4,
    "mlp5": mlp5,
    "mlp6": mlp6,
    "mlp1_norm": mlp1_norm,
    "mlp2_norm": mlp2_norm,
    "mlp3_norm": mlp3_norm,
}


def _mlp(
    depth: int, num_classes: int, input_shape: tuple[int, ...], scale: Scale, width: int, *, norm: bool = False
) -> StagedNet:
    width = scale.of(width)
    first = _layer(math.prod(input_shape), width, norm=norm)
    stages: dict[str, nn.Module] = {"stem": nn.Sequential(OrderedDict(flatten=nn.Flatten(), **first))}
    for number in range(1, depth):
        stages[f"hidden{number}"] = nn.Sequential(_layer(width, width, norm=norm))
    net = StagedNet(stages, nn.Linear(width, num_classes))
    return of_depth(net, scale.depth, num_classes, input_shape)


def _layer(inputs: int, outputs: int, *, norm: bool) -> OrderedDict[str, nn.Module]:
    parts: OrderedDict[str, nn.Module] = OrderedDict(linear=nn.Linear(inputs, outputs), relu=nn.ReLU())
    if norm:
        parts["norm"] = nn.BatchNorm1d(outputs)
    return parts
