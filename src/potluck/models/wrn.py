"""Wide ResNets: pre-activation blocks in three groups of 16k, 32k and 64k channels.

Zagoruyko, Komodakis. BMVC 2016. https://arxiv.org/abs/1605.07146. `wrn16_2` has 16 layers, two in each of six blocks
and four others, and k = 2. A deeper net of the same k adds blocks at the end of each group and has all the
parameters of a shallower one. The dropout between convolutions, with and without which the paper reports, is left out.

Options:
    width: channels of the stem, of which the groups have a multiple.
"""

from collections import OrderedDict
from collections.abc import Callable

from torch import nn

from potluck.core.nets.scale import FULL, Scale
from potluck.models import image_size
from potluck.models.contract import Blocks, StagedNet, of_depth
from potluck.models.preresnet import PreActivationBlock, last_norm
from potluck.models.resnet import with_fan_out_variance


def wrn16_1(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 16) -> StagedNet:
    """WRN-16-1: two blocks a group, after a stem of `width` channels."""
    return _wide_resnet(16, 1, num_classes, input_shape, scale, width)


def wrn16_2(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 16) -> StagedNet:
    """WRN-16-2: two blocks a group of twice the width, after a stem of `width` channels."""
    return _wide_resnet(16, 2, num_classes, input_shape, scale, width)


def wrn40_1(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 16) -> StagedNet:
    """WRN-40-1: six blocks a group, after a stem of `width` channels."""
    return _wide_resnet(40, 1, num_classes, input_shape, scale, width)


def wrn40_2(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 16) -> StagedNet:
    """WRN-40-2: six blocks a group of twice the width, after a stem of `width` channels."""
    return _wide_resnet(40, 2, num_classes, input_shape, scale, width)


def wrn40_4(num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, width: int = 16) -> StagedNet:
    """WRN-40-4: six blocks a group of four times the width, after a stem of `width` channels."""
    return _wide_resnet(40, 4, num_classes, input_shape, scale, width)


VARIANTS: dict[str, Callable[..., StagedNet]] = {
    "wrn16_1": wrn16_1,
    "wrn16_2": wrn16_2,
    "wrn40_1": wrn40_1,
    "wrn40_2": wrn40_2,
    "wrn40_4": wrn40_4,
}


def _wide_resnet(
    depth: int,
    widening: int,
    num_classes: int,
    input_shape: tuple[int, ...],
    scale: Scale,
    width: int,
) -> StagedNet:
    channels, _ = image_size(input_shape)
    inputs = scale.of(width)
    stem = nn.Conv2d(channels, inputs, 3, padding=1, bias=False)
    stages: dict[str, nn.Module] = {"stem": nn.Sequential(OrderedDict(conv=stem))}
    for index, stride in enumerate((1, 2, 2)):
        outputs = scale.of(width * widening * 2**index)
        # The first group keeps the image's size, and changes the channels unless k is 1.
        first = PreActivationBlock(inputs, outputs, stride, project=index > 0 or widening > 1)
        further = [PreActivationBlock(outputs, outputs) for _ in range((depth - 4) // 6 - 1)]
        stages[f"layer{index + 1}"] = Blocks(first, *further)
        inputs = outputs
    stages["norm"] = last_norm(inputs)
    net = with_fan_out_variance(StagedNet(stages, nn.Linear(inputs, num_classes)))
    return of_depth(net, scale.depth, num_classes, input_shape)
