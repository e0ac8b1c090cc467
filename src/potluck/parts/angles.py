"""Outputs that are cosines of angles to the corners of a simplex, one for each class: FedKTL."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def cosines(outputs: Tensor) -> Tensor:
    """The cosines of theta between outputs (batch, classes) and the simplex's directions, (batch, classes).

    The directions are the rows of sqrt(K / (K - 1)) (1 - 1/K).
    """
    directions = F.normalize(outputs)
    classes = outputs.shape[1]
    return math.sqrt(classes / (classes - 1)) * (directions - directions.mean(1, keepdim=True))


def farther(cosine: Tensor, targets: Tensor, margin: float) -> Tensor:
    """The cosines (batch, classes), of the example's own class that of an angle larger by `margin` in radians."""
    sine = (1 - cosine.square()).clamp(min=1e-7).sqrt()
    own = F.one_hot(targets, cosine.shape[1]).bool()
    return torch.where(own, cosine * math.cos(margin) - sine * math.sin(margin), cosine)


class ByAngle(nn.Module):
    """A net whose outputs are s cos theta."""

    def __init__(self, net: nn.Module, scale: float) -> None:
        super().__init__()
        self.net, self.scale = net, scale
        self.training = net.training  # else layers of a net in evaluation mode would seem to be held in it

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs (batch, ...) to outputs (batch, classes)."""
        return self.scale * cosines(self.net(inputs))
