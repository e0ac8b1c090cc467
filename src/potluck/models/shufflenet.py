"""ShuffleNetV2 for small images: units that transform half of the channels and shuffle both halves.

Ma, Zhang, Zheng, Sun. ECCV 2018. https://arxiv.org/abs/1807.11164, table 5, in the form used on CIFAR: a stem that
keeps the image's size and no pooling after it.

Options:
    size: 0.5, 1, 1.5 or 2, of which the numbers of channels follow from the paper's table.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.scale import FULL, Scale
from potluck.models import image_size
from potluck.models.contract import Blocks, StagedNet, of_depth

STEM = 24
UNITS = (3, 7, 3)
# Table 5: the channels of the three stages and of the last convolution, by size.
WIDTHS = {
    0.5: (48, 96, 192, 1024),
    1.0: (116, 232, 464, 1024),
    1.5: (176, 352, 704, 1024),
    2.0: (244, 488, 976, 2048),
}


def shufflenetv2(
    num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, size: float = 1.0
) -> StagedNet:
    """ShuffleNetV2 of `size` 0.5, 1, 1.5 or 2.

    It cannot be narrower by a `scale`: its units tell the halves of their input apart by position, so the leading
    slice of a unit would read other channels than the unit does, and widths are a matter of `size`.
    """
    if scale.width != 1:
        raise ConfigError(
            f"width {scale.width:g}; expected 1: a slice of ShuffleNetV2 is no ShuffleNetV2; choose a size"
        )
    if size not in WIDTHS:
        raise ConfigError(f"size {size}; expected one of {', '.join(map(str, WIDTHS))}")
    channels, _ = image_size(input_shape)
    *widths, last = WIDTHS[size]
    stages: dict[str, nn.Module] = {"stem": _conv_norm(channels, STEM, 3, relu=True)}
    inputs = STEM
    for number, (width, count) in enumerate(zip(widths, UNITS, strict=True), start=1):
        stages[f"layer{number}"] = Blocks(DownUnit(inputs, width), *(Unit(width) for _ in range(count)))
        inputs = width
    stages["last"] = _conv_norm(inputs, last, 1, relu=True)
    net = StagedNet(stages, nn.Linear(last, num_classes))
    return of_depth(net, scale.depth, num_classes, input_shape)


VARIANTS: dict[str, Callable[..., StagedNet]] = {"shufflenetv2": shufflenetv2}


class Unit(nn.Module):
    """Keeps the first half of the channels, transforms the second, shuffles (figure 3c); shapes stay."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = _branch(width // 2, width // 2, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Kept and transformed channels in turn."""
        kept, transformed = x.chunk(2, dim=1)
        return shuffled(kept, self.branch(transformed))


class DownUnit(nn.Module):
    """Both branches read all channels and halve the image (figure 3d).

    Maps (batch, inputs, height, width) to (batch, outputs, height / 2, width / 2), sizes rounded up.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shortcut = nn.Sequential(
            _conv_norm(inputs, inputs, 3, stride=2, groups=inputs),
            _conv_norm(inputs, outputs // 2, 1, relu=True),
        )
        self.branch = _branch(inputs, outputs // 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """The channels of both branches in turn."""
        return shuffled(self.shortcut(x), self.branch(x))


def shuffled(first: Tensor, second: Tensor) -> Tensor:
    """Two maps (batch, half, height, width) as one (batch, 2 half, height, width), their channels in turn."""
    return torch.stack([first, second], dim=2).flatten(1, 2)


def _branch(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        _conv_norm(inputs, outputs, 1, relu=True),
        _conv_norm(outputs, outputs, 3, stride=stride, groups=outputs),
        _conv_norm(outputs, outputs, 1, relu=True),
    )


def _conv_norm(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1, relu: bool = False
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    parts: OrderedDict[str, nn.Module] = OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs))
    if relu:
        parts["relu"] = nn.ReLU()
    return nn.Sequential(parts)
