"""Plain convolutional networks: HeteroFL's, and small nested ones for digits.

`heterofl_cnn`: Diao, Ding, Tarokh. ICLR 2021. https://arxiv.org/abs/2010.01264.

`cnn2` to `cnn6` count convolutions of one width. All of them agree on the outputs of the stem and of the last
stage, and a deeper net only appends stages, so they can share layers and exchange features. The convolutions of
`heterofl_cnn` have biases before BatchNorm, as in its authors' code, of which Adam learns rounding errors alone.

Options:
    width: channels of every convolution; of `heterofl_cnn` those of the first one.
"""

from collections import OrderedDict
from collections.abc import Callable

from torch import nn

from potluck.core.nets.scale import FULL, Scale
from potluck.models import image_size
from potluck.models.contract import StagedNet, of_depth

LARGE_IMAGE = 16


def heterofl_cnn(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    scale: Scale = FULL,
    width: int = 64,
) -> StagedNet:
    """HeteroFL's network: four convolutions of `width`, 2, 4 and 8 times `width` channels."""
    inputs, _ = image_size(input_shape, smallest=8)
    stages: dict[str, nn.Module] = {}
    for index, name in enumerate(("stem", "block1", "block2", "block3")):
        outputs = scale.of(width * 2**index)
        # The last block goes to the global pool at the size it has.
        stages[name] = _conv_norm(inputs, outputs, bias=True, halve=index < 3)
        inputs = outputs
    net = StagedNet(stages, nn.Linear(inputs, num_classes))
    return of_depth(net, scale.depth, num_classes, input_shape)


def cnn2(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 16) -> StagedNet:
    """Two convolutions of `width` channels: stem and block1."""
    return _nested(2, num_classes, input_shape, scale, width)


def cnn3(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 16) -> StagedNet:
    """Three convolutions of `width` channels: stem, block1 and block2."""
    return _nested(3, num_classes, input_shape, scale, width)


def cnn4(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 16) -> StagedNet:
    """Four convolutions of `width` channels: stem and block1 to block3."""
    return _nested(4, num_classes, input_shape, scale, width)


def cnn5(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 16) -> StagedNet:
    """Five convolutions of `width` channels: stem and block1 to block4."""
    return _nested(5, num_classes, input_shape, scale, width)


def cnn6(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 16) -> StagedNet:
    """Six convolutions of `width` channels: stem and block1 to block5."""
    return _nested(6, num_classes, input_shape, scale, width)


VARIANTS: dict[str, Callable[..., StagedNet]] = {
    "heterofl_cnn": heterofl_cnn,
    "cnn2": cnn2,
    "cnn3": cnn3,
    "cnn4": cnn4,
    "cnn5": cnn5,
    "cnn6": cnn6,
}


def _nested(depth: int, num_classes: int, input_shape: tuple[int, ...], scale: Scale, width: int) -> StagedNet:
    channels, side = image_size(input_shape, smallest=2)
    width = scale.of(width)
    stages: dict[str, nn.Module] = {"stem": _conv_norm(channels, width, halve=side > LARGE_IMAGE)}
    for number in range(1, depth):
        stages[f"block{number}"] = _conv_norm(width, width, halve=number == 1)
    net = StagedNet(stages, nn.Linear(width, num_classes))
    return of_depth(net, scale.depth, num_classes, input_shape)


def _conv_norm(inputs: int, outputs: int, *, halve: bool, bias: bool = False) -> nn.Sequential:
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["conv"] = nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)
    parts["norm"] = nn.BatchNorm2d(outputs)
    parts["relu"] = nn.ReLU()
    if halve:
        parts["pool"] = nn.MaxPool2d(2)
    return nn.Sequential(parts)
