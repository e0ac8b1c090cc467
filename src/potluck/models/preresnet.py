"""The pre-activation ResNet-18 that HeteroFL slices.

He, Zhang, Ren, Sun. ECCV 2016. https://arxiv.org/abs/1603.05027, in the form of Diao, Ding, Tarokh. ICLR
2021. https://arxiv.org/abs/2010.01264: a 3x3 stem without a norm, projections without a norm that read the
activated input, and one norm after the last block.
"""

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn

from potluck.models import image_size, scaled
from potluck.models.contract import StagedNet

BLOCKS = 2
STRIDES = (1, 2, 2, 2)


def preresnet18(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    rate: float = 1.0,
    width: int = 64,
) -> StagedNet:
    """Pre-activation ResNet-18 with stages of `width`, 2, 4 and 8 times `width` channels.

    The last norm is a stage of its own, "norm": it has parameters, so it cannot be part of the pooling, and
    the output of "layer4" stays a plain sum like that of every other layer.
    """
    channels, _ = image_size(input_shape)
    inputs = scaled(width, rate)
    stem = nn.Conv2d(channels, inputs, 3, padding=1, bias=False)
    stages: dict[str, nn.Module] = {"stem": nn.Sequential(OrderedDict(conv=stem))}
    for index, stride in enumerate(STRIDES):
        outputs = scaled(width * 2**index, rate)
        further = [PreActivationBlock(outputs, outputs) for _ in range(BLOCKS - 1)]
        stages[f"layer{index + 1}"] = nn.Sequential(PreActivationBlock(inputs, outputs, stride), *further)
        inputs = outputs
    stages["norm"] = nn.Sequential(OrderedDict(norm=nn.BatchNorm2d(inputs), relu=nn.ReLU()))
    return StagedNet(stages, nn.Linear(inputs, num_classes))


VARIANTS: dict[str, Callable[..., StagedNet]] = {"preresnet18": preresnet18}


class PreActivationBlock(nn.Module):
    """Norm and ReLU before each convolution.

    Maps (batch, inputs, height, width) to (batch, outputs, height / stride, width / stride).
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        # By the stride and not by the widths, which a low rate can round to the same number.
        self.shortcut = None if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both branches; a projection reads the activated input, an identity the raw one."""
        active = self.norm1(x).relu()
        carried = x if self.shortcut is None else self.shortcut(active)
        h = self.norm2(self.conv1(active)).relu()
        return carried + self.conv2(h)
