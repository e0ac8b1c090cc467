"""A network of your own."""

import math

from potluck import fl
from torch import nn


def template_name(num_classes: int, input_shape: tuple[int, ...], *, width: int = 32) -> fl.StagedNet:
    """Two hidden layers for inputs of any shape.

    Args:
        num_classes: the width of an output.
        input_shape: of one example, (channels, height, width) or (features,).
        width: units of a hidden layer.
    """
    # Stages are trained and shared under their names: a deeper net with the same first ones shares them.
    stages = {
        "stem": nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), width), nn.ReLU()),
        "hidden1": nn.Sequential(nn.Linear(width, width), nn.ReLU()),
    }
    # Any nn.Module will do in place of a StagedNet, for methods that need not split it.
    return fl.StagedNet(stages, head=nn.Linear(width, num_classes))
