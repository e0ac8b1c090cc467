"""ResNet-14, 20, 32, 56 and 110 for small images: three stages of basic blocks, 16, 32 and 64 channels wide.

He, Zhang, Ren, Sun. CVPR 2016. https://arxiv.org/abs/1512.03385, section 4.2: 6n + 2 layers, n blocks a stage.
The 14-layer net (n = 2) is `resnet14_cifar`, since `resnet14` is the four-stage net of the FedIN experiments.
A deeper net adds blocks at the end of each stage and has all the parameters of a shallower one.

Where a stage halves the image and doubles the channels, `shortcut="A"` subsamples and fills up with zeros, as the
paper does on small images; "B" is a 1x1 convolution with a norm. The zeros come behind the carried channels: the
paper does not say where, placing them on both sides gives the same nets with their channels renamed, and behind
them a leading slice of the net stays a net.

Options:
    width: channels of the first stage; the others have 2 and 4 times as many.
    shortcut: what leads past a block that halves the image: "A", subsampling and zeros, or "B", a convolution.
"""

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.scale import FULL, Scale
from potluck.models import image_size
from potluck.models.contract import Blocks, StagedNet, of_depth
from potluck.models.resnet import BasicBlock, with_fan_out_variance


def _variant(name: str, layers: int) -> Callable[..., StagedNet]:
    """The function that builds the ResNet of this name and of so many layers."""
    blocks = (layers - 2) // 6

    def build(
        num_classes: int,
        input_shape: tuple[int, ...],
        *,
        scale: Scale = FULL,
        width: int = 16,
        shortcut: str = "A",
    ) -> StagedNet:
        return _cifar_resnet(blocks, num_classes, input_shape, scale, width, shortcut)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = (
        f"ResNet-{layers} for small images: {blocks} blocks in each of three stages of `width`, 2 and 4 times `width`"
        ' channels; the `shortcut` "A" subsamples and fills up with zeros, "B" is a convolution.'
    )
    return build


_LAYERS = {"resnet14_cifar": 14, "resnet20": 20, "resnet32": 32, "resnet56": 56, "resnet110": 110}
VARIANTS = {name: _variant(name, layers) for name, layers in _LAYERS.items()}


class SubsampleAndPad(nn.Module):
    """The shortcut without parameters: every second row and column, and channels of zeros behind the carried ones.

    Maps (batch, inputs, height, width) to (batch, inputs + added, height / 2, width / 2), sizes rounded up.
    """

    def __init__(self, added: int) -> None:
        super().__init__()
        self.added = added

    def forward(self, x: Tensor) -> Tensor:
        """The carried channels, then zeros."""
        return F.pad(x[..., ::2, ::2], (0, 0, 0, 0, 0, self.added))


def _cifar_resnet(
    blocks: int,
    num_classes: int,
    input_shape: tuple[int, ...],
    scale: Scale,
    width: int,
    shortcut: str,
) -> StagedNet:
    if shortcut not in ("A", "B"):
        raise ConfigError(f"shortcut {shortcut!r}; expected 'A' (subsample and pad) or 'B' (convolution and norm)")
    channels, _ = image_size(input_shape)
    inputs = scale.of(width)
    stages: dict[str, nn.Module] = {"stem": _stem(channels, inputs)}
    for index, stride in enumerate((1, 2, 2)):
        outputs = scale.of(width * 2**index)
        carry = SubsampleAndPad(outputs - inputs) if stride == 2 and shortcut == "A" else None
        further = [BasicBlock(outputs, outputs) for _ in range(blocks - 1)]
        stages[f"layer{index + 1}"] = Blocks(BasicBlock(inputs, outputs, stride, carry), *further)
        inputs = outputs
    net = with_fan_out_variance(StagedNet(stages, nn.Linear(inputs, num_classes)))
    return of_depth(net, scale.depth, num_classes, input_shape)


def _stem(channels: int, width: int) -> nn.Sequential:
    conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(width), relu=nn.ReLU()))
