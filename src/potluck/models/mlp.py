"""Multi-layer perceptrons without batch norm, `mlp2` to `mlp6` by the number of hidden layers.

They take inputs of any shape. A deeper net only appends layers of the same width, so all of them agree on the
outputs of the stem and of the last stage.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

from torch import nn

from potluck.models import scaled
from potluck.models.contract import StagedNet


def mlp2(num_classes: int, input_shape: tuple[int, ...], *, rate: float = 1.0, width: int = 64) -> StagedNet:
    """Two hidden layers of `width` units: stem and hidden1."""
    return _mlp(2, num_classes, input_shape, rate, width)


def mlp3(num_classes: int, input_shape: tuple[int, ...], *, rate: float = 1.0, width: int = 64) -> StagedNet:
    """Three hidden layers of `width` units: stem, hidden1 and hidden2."""
    return _mlp(3, num_classes, input_shape, rate, width)


def mlp4(num_classes: int, input_shape: tuple[int, ...], *, rate: float = 1.0, width: int = 64) -> StagedNet:
    """Four hidden layers of `width` units: stem and hidden1 to hidden3."""
    return _mlp(4, num_classes, input_shape, rate, width)


def mlp5(num_classes: int, input_shape: tuple[int, ...], *, rate: float = 1.0, width: int = 64) -> StagedNet:
    """Five hidden layers of `width` units: stem and hidden1 to hidden4."""
    return _mlp(5, num_classes, input_shape, rate, width)


def mlp6(num_classes: int, input_shape: tuple[int, ...], *, rate: float = 1.0, width: int = 64) -> StagedNet:
    """Six hidden layers of `width` units: stem and hidden1 to hidden5."""
    return _mlp(6, num_classes, input_shape, rate, width)


VARIANTS: dict[str, Callable[..., StagedNet]] = {
    "mlp2": mlp2,
    "mlp3": mlp3,
    "mlp4": mlp4,
    "mlp5": mlp5,
    "mlp6": mlp6,
}


def _mlp(depth: int, num_classes: int, input_shape: tuple[int, ...], rate: float, width: int) -> StagedNet:
    width = scaled(width, rate)
    first = nn.Linear(math.prod(input_shape), width)
    stages: dict[str, nn.Module] = {
        "stem": nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=first, relu=nn.ReLU()))
    }
    for number in range(1, depth):
        stages[f"hidden{number}"] = nn.Sequential(OrderedDict(linear=nn.Linear(width, width), relu=nn.ReLU()))
    return StagedNet(stages, nn.Linear(width, num_classes))
