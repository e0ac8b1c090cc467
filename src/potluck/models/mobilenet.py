"""MobileNetV2 for small images: bottlenecks that widen, filter each channel by itself, and narrow again.

Sandler, Howard, Zhu, Zhmoginov, Chen. CVPR 2018. https://arxiv.org/abs/1801.04381, table 2, in the form used on
CIFAR: the stem and the second group of bottlenecks keep the image's size, which shrinks eightfold in all; ReLU in
place of ReLU6; the first bottleneck has its 1x1 convolution although it widens nothing; and bottlenecks that keep
the size and change the channels have a shortcut too, a 1x1 convolution with a norm.
"""

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn

from potluck.core.nets.scale import FULL, Scale
from potluck.models import image_size
from potluck.models.contract import Blocks, StagedNet, of_depth

STEM, LAST = 32, 1280
# Table 2: how much a bottleneck widens, its channels, how many there are, the stride of the first.
GROUPS = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenetv2(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL) -> StagedNet:
    """MobileNetV2 for small images; the width of `scale` is the paper's multiplier, up to rounding."""
    channels, _ = image_size(input_shape)
    stages: dict[str, nn.Module] = {"stem": _conv_norm(channels, scale.of(STEM), 3, relu=True)}
    inputs = STEM
    for number, (widening, outputs, count, stride) in enumerate(GROUPS, start=1):
        first = Bottleneck(inputs, outputs, widening, stride, scale)
        further = [Bottleneck(outputs, outputs, widening, 1, scale) for _ in range(count - 1)]
        stages[f"layer{number}"] = Blocks(first, *further)
        inputs = outputs
    stages["last"] = _conv_norm(scale.of(inputs), scale.of(LAST), 1, relu=True)
    net = StagedNet(stages, nn.Linear(scale.of(LAST), num_classes))
    return of_depth(net, scale.depth, num_classes, input_shape)


VARIANTS: dict[str, Callable[..., StagedNet]] = {"mobilenetv2": mobilenetv2}


class Bottleneck(nn.Module):
    """A 1x1 convolution that widens, a 3x3 one channel by channel, a 1x1 one that narrows and is not rectified.

    Maps (batch, inputs, height, width) to (batch, outputs, height / stride, width / stride), with a shortcut unless
    there is a stride. Widths are those of the full net, of which `scale` leaves a share.
    """

    def __init__(self, inputs: int, outputs: int, widening: int, stride: int, scale: Scale) -> None:
        super().__init__()
        narrow, wide, out = (scale.of(width) for width in (inputs, widening * inputs, outputs))
        self.expand = _conv_norm(narrow, wide, 1, relu=True)
        self.filter = _conv_norm(wide, wide, 3, stride=stride, groups=wide, relu=True)
        self.project = _conv_norm(wide, out, 1)
        self.carries = stride == 1
        # By the full widths: a narrow net can round two of them to the same number.
        self.shortcut = _conv_norm(narrow, out, 1) if self.carries and inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The narrowed features, beside the shortcut if there is one."""
        h = self.project(self.filter(self.expand(x)))
        return h + self.shortcut(x) if self.carries else h


def _conv_norm(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1, relu: bool = False
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    parts: OrderedDict[str, nn.Module] = OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs))
    if relu:
        parts["relu"] = nn.ReLU()
    return nn.Sequential(parts)
