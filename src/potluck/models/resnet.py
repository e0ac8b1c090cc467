"""ResNet-10, 14, 18, 22, 26 and 34: residual networks of four stages of basic blocks.

He, Zhang, Ren, Sun. CVPR 2016. https://arxiv.org/abs/1512.03385. The depths other than 18 and 34 are those of
the FedIN experiments: a deeper net adds blocks at the end of a stage, so all of them agree on the shape of every
stage's output, and each has all the parameters of the shallower ones under the same names and shapes. The
three-stage ResNets for small images are in `cifar_resnet`.

Options:
    width: channels of the first stage; the others have 2, 4 and 8 times as many.
    stem: "imagenet" shrinks the image fourfold, "cifar" keeps its size.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.scale import FULL, Scale
from potluck.models import image_size
from potluck.models.contract import Blocks, StagedNet, of_depth

STRIDES = (1, 2, 2, 2)


def _variant(name: str, blocks: tuple[int, int, int, int]) -> Callable[..., StagedNet]:
    """The function that builds the ResNet of this name, with so many blocks in each of its four stages."""

    def build(
        num_classes: int,
        input_shape: tuple[int, ...],
        *,
        scale: Scale = FULL,
        width: int = 64,
        stem: str = "imagenet",
    ) -> StagedNet:
        return _resnet(blocks, num_classes, input_shape, scale, width, stem)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = (
        f"ResNet-{name.removeprefix('resnet')}, blocks {blocks}, first stage `width` channels wide; the `stem`"
        ' "imagenet" shrinks the image fourfold, "cifar" keeps its size.'
    )
    return build


_BLOCKS = {
    "resnet10": (1, 1, 1, 1),
    "resnet14": (1, 1, 2, 2),
    "resnet18": (2, 2, 2, 2),
    "resnet22": (2, 2, 3, 3),
    "resnet26": (3, 3, 3, 3),
    "resnet34": (3, 4, 6, 3),
}
VARIANTS = {name: _variant(name, blocks) for name, blocks in _BLOCKS.items()}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a projection where there is a stride if none is given.

    Maps (batch, inputs, height, width) to (batch, outputs, height / stride, width / stride).
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        # By the stride and not by the widths: a narrow net can round two widths to the same number, and
        # the parameter names must not depend on the width. Without a stride inputs and outputs are always equal.
        if shortcut is None:
            shortcut = nn.Identity() if stride == 1 else _projection(inputs, outputs, stride)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """The rectified sum of both branches, in place where gradients allow it, which saves 4 % of a step."""
        h = self.norm1(self.conv1(x)).relu_()
        h = self.norm2(self.conv2(h))
        return h.add_(self.shortcut(x)).relu_()


def with_fan_out_variance(net: StagedNet) -> StagedNet:
    """The net with new normal convolutions, of variance 2 over the positions and channels they write to."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


def _resnet(
    blocks: Sequence[int],
    num_classes: int,
    input_shape: tuple[int, ...],
    scale: Scale,
    width: int,
    stem: str,
) -> StagedNet:
    channels, _ = image_size(input_shape)
    inputs = scale.of(width)
    stages: dict[str, nn.Module] = {"stem": _stem(stem, channels, inputs)}
    for index, (count, stride) in enumerate(zip(blocks, STRIDES, strict=True)):
        outputs = scale.of(width * 2**index)
        further = [BasicBlock(outputs, outputs) for _ in range(count - 1)]
        stages[f"layer{index + 1}"] = Blocks(BasicBlock(inputs, outputs, stride), *further)
        inputs = outputs
    net = with_fan_out_variance(StagedNet(stages, nn.Linear(inputs, num_classes)))
    return of_depth(net, scale.depth, num_classes, input_shape)


def _stem(kind: str, channels: int, width: int) -> nn.Sequential:
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if kind == "imagenet":
        parts["conv"] = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
    elif kind == "cifar":
        parts["conv"] = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    else:
        raise ConfigError(f"stem {kind!r}; expected 'imagenet' or 'cifar'")
    parts["norm"] = nn.BatchNorm2d(width)
    parts["relu"] = nn.ReLU(inplace=True)
    if kind == "imagenet":
        parts["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(parts)


def _projection(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs)))
