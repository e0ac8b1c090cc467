"""Pre-activation ResNets: those that HeteroFL slices, and the ResNet-20 that FeDepth trains block by block.

He, Zhang, Ren, Sun. ECCV 2016. https://arxiv.org/abs/1603.05027.

`preresnet18` and `preresnet152` have the form of Diao, Ding, Tarokh. ICLR 2021. https://arxiv.org/abs/2010.01264: a 3x3
stem without a norm, projections without a norm that read the activated input, and one norm after the last block. Their
released code cannot slice the bottlenecks of `preresnet152`, with which later papers compare.

`preresnet20` is the net of FeDepth (Zhang et al. 2023. https://arxiv.org/abs/2303.04887), each block a stage of its
own. Its paper counts the memory of the textbook's net and its released code trains another, so there are two.

Options:
    width: channels of the first stage, of which the others have a multiple.
    widths: channels of the blocks, three blocks of each width.
    variant: "textbook", or "fedepth" for the net of that method's released code.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.scale import FULL, Scale
from potluck.models import image_size
from potluck.models.cifar_resnet import SubsampleAndPad
from potluck.models.contract import Blocks, StagedNet, of_depth
from potluck.models.resnet import STRIDES


def preresnet18(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    scale: Scale = FULL,
    width: int = 64,
) -> StagedNet:
    """Pre-activation ResNet-18 with stages of `width`, 2, 4 and 8 times `width` channels.

    The last norm is a stage of its own, "norm": it has parameters, so it cannot be part of the pooling, and
    the output of "layer4" stays a plain sum like that of every other layer.
    """
    return _preresnet((2, 2, 2, 2), PreActivationBlock, num_classes, input_shape, scale, width)


def preresnet152(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    scale: Scale = FULL,
    width: int = 64,
) -> StagedNet:
    """Pre-activation ResNet-152: 3, 8, 36 and 3 bottlenecks with stages of 4, 8, 16 and 32 times `width` channels."""
    return _preresnet((3, 8, 36, 3), PreActivationBottleneck, num_classes, input_shape, scale, width)


def preresnet20(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    scale: Scale = FULL,
    widths: Sequence[int] = (16, 32, 64),
    variant: str = "textbook",
) -> StagedNet:
    """Pre-activation ResNet-20: block1 to block9, three in each of the `widths`, every block a stage.

    The variant "textbook" has no norm after the stem and carries the raw input past each block, subsampled and
    filled up with zeros where the widths change. The variant "fedepth" is that of FeDepth's released code: a norm
    after the stem, 1x1 convolutions where the widths change, and every shortcut reads the activated input.

    FeDepth rounds widths down: its nets of a sixth, a third and half the width have widths (2, 5, 10), (5, 10, 21)
    and (8, 16, 32). A `scale` rounds up as in every family.
    """
    if variant not in ("textbook", "fedepth"):
        raise ConfigError(f"variant {variant!r}; expected 'textbook' or 'fedepth'")
    if len(widths) != 3 or list(widths) != sorted(widths):
        raise ConfigError(f"widths {tuple(widths)}; expected three, none smaller than the one before it")
    channels, _ = image_size(input_shape)
    textbook = variant == "textbook"
    inputs = scale.of(widths[0])
    stem = OrderedDict[str, nn.Module](conv=_conv(channels, inputs))
    if not textbook:
        stem["norm"] = nn.BatchNorm2d(inputs)
    stages: dict[str, nn.Module] = {"stem": nn.Sequential(stem)}
    for index in range(9):
        outputs, stride = scale.of(widths[index // 3]), 2 if index in (3, 6) else 1
        pad = SubsampleAndPad(outputs - inputs) if textbook and stride == 2 else None
        stages[f"block{index + 1}"] = PreActivationBlock(inputs, outputs, stride, shortcut=pad, raw=textbook)
        inputs = outputs
    stages["norm"] = last_norm(inputs)
    net = StagedNet(stages, nn.Linear(inputs, num_classes))
    return of_depth(net, scale.depth, num_classes, input_shape)


VARIANTS: dict[str, Callable[..., StagedNet]] = {
    "preresnet18": preresnet18,
    "preresnet20": preresnet20,
    "preresnet152": preresnet152,
}


def _preresnet(
    blocks: Sequence[int],
    kind: "type[PreActivationBlock | PreActivationBottleneck]",
    num_classes: int,
    input_shape: tuple[int, ...],
    scale: Scale,
    width: int,
) -> StagedNet:
    channels, _ = image_size(input_shape)
    inputs = scale.of(width)
    stages: dict[str, nn.Module] = {"stem": nn.Sequential(OrderedDict(conv=_conv(channels, inputs)))}
    for index, (count, stride) in enumerate(zip(blocks, STRIDES, strict=True)):
        inner = scale.of(width * 2**index)
        outputs = inner * kind.expansion
        first = kind(inputs, inner, stride, project=stride > 1 or kind.expansion > 1)
        stages[f"layer{index + 1}"] = Blocks(first, *(kind(outputs, inner) for _ in range(count - 1)))
        inputs = outputs
    stages["norm"] = last_norm(inputs)
    net = StagedNet(stages, nn.Linear(inputs, num_classes))
    return of_depth(net, scale.depth, num_classes, input_shape)


class PreActivationBlock(nn.Module):
    """Norm and ReLU before each convolution.

    Maps (batch, inputs, height, width) to (batch, outputs, height / stride, width / stride).

    Args:
        inputs: channels that come in.
        outputs: channels that go out.
        stride: of the first convolution.
        project: whether the shortcut is a 1x1 convolution, which reads the activated input; None for where there
            is a stride. Said by the caller and never taken from the widths, which a narrow net can round to
            the same number, while the names of parameters must not depend on the width.
        shortcut: a module without parameters in place of the 1x1 convolution.
        raw: whether a shortcut without parameters reads the block's input, or else the activated input.
    """

    expansion = 1

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int = 1,
        *,
        project: bool | None = None,
        shortcut: nn.Module | None = None,
        raw: bool = True,
    ) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = _conv(inputs, outputs, stride=stride)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv(outputs, outputs)
        projects = shortcut is None and (stride > 1 if project is None else project)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if projects else shortcut
        self.raw = raw and not projects

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both branches."""
        active = self.norm1(x).relu()
        carried = x if self.raw else active
        if self.shortcut is not None:
            carried = self.shortcut(carried)
        return carried + self.conv2(self.norm2(self.conv1(active)).relu())


class PreActivationBottleneck(nn.Module):
    """Three convolutions, the outer two of one position each, with norm and ReLU before each.

    Maps (batch, inputs, height, width) to (batch, 4 * inner, height / stride, width / stride).

    Args:
        inputs: channels that come in.
        inner: channels between the convolutions.
        stride: of the middle convolution.
        project: whether the shortcut is a 1x1 convolution, which reads the activated input; else it carries the input.
    """

    expansion = 4

    def __init__(self, inputs: int, inner: int, stride: int = 1, *, project: bool = False) -> None:
        super().__init__()
        outputs = self.expansion * inner
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv2 = _conv(inner, inner, stride=stride)
        self.norm3 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if project else None

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both branches."""
        active = self.norm1(x).relu()
        carried = x if self.shortcut is None else self.shortcut(active)
        h = self.conv2(self.norm2(self.conv1(active)).relu())
        return carried + self.conv3(self.norm3(h).relu())


def last_norm(width: int) -> nn.Sequential:
    """The stage that activates the last sum before the pooling."""
    return nn.Sequential(OrderedDict(norm=nn.BatchNorm2d(width), relu=nn.ReLU()))


def _conv(inputs: int, outputs: int, *, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
