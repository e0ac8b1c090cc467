"""What every model family offers, so that no method has to know a family's attribute names.

A staged network is an ordered row of named stages, a pooling and a head:
`forward(x) = head(pool(stages(x)))`. FedIN, FeDepth, LG-FedAvg and their kin cut networks through this
contract alone. Bring your own model by giving its parts to `StagedNet`; a method that only moves weights
takes any `nn.Module` as it is.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Size, Tensor, nn

from potluck.core.modes import mode
from potluck.core.needs import Need, split_problem
from potluck.core.requests import NetPart


class GlobalPool(nn.Module):
    """Mean over all positions of a feature map: (batch, channels, ...) to (batch, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        """Flat inputs (batch, channels) pass unchanged."""
        return x if x.dim() == 2 else x.flatten(2).mean(2)


class StagedNet(nn.Module):
    """A network cut into named stages and a head.

    Attributes:
        stages: named blocks, applied in order.
        pool: stage output to (batch, num_features); holds no parameters.
        head: the last layer, (batch, num_features) to (batch, classes).
        num_features: width of the representation that the head reads.
        extractor_stages: how many leading stages are the extractor when the net is split in three.
    """

    def __init__(
        self,
        stages: Mapping[str, nn.Module],
        head: nn.Linear,
        pool: nn.Module | None = None,
        extractor_stages: int = 1,
    ) -> None:
        super().__init__()
        self.stages = nn.Sequential()
        for name, stage in stages.items():
            self.stages.add_module(name, stage)
        self.pool = GlobalPool() if pool is None else pool
        self.head = head
        self.num_features = head.in_features
        self.extractor_stages = extractor_stages

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (batch, ...) to logits (batch, classes)."""
        return self.head(self.pool(self.stages(x)))

    def part_outputs(self, x: Tensor) -> dict[NetPart, Tensor]:
        """Of inputs (batch, ...) what the extractor gives, the features (batch, num_features), and the logits."""
        extracted = self.stages[: self.extractor_stages](x)
        found = self.pool(self.stages[self.extractor_stages :](extracted))
        return {"extracted": extracted, "features": found, "outputs": self.head(found)}

    def split_problem(self) -> str | None:
        """Why the net cannot be split into extractor, intermediate layers and classifier; None if it can."""
        if 0 < self.extractor_stages < len(self.stages):
            return None
        return (
            f"{type(self).__name__} has {len(self.stages)} stages, its extractor {self.extractor_stages};"
            " there must be at least one stage before the cut and one after it"
        )


def features(net: StagedNet, x: Tensor, upto: int) -> Tensor:
    """The output of the first `upto` stages on inputs (batch, ...)."""
    return net.stages[:upto](x)


def resume(net: StagedNet, h: Tensor, start: int) -> Tensor:
    """Logits (batch, classes) from the output `h` of the first `start` stages."""
    return net.head(net.pool(net.stages[start:](h)))


class Split(NamedTuple):
    """A staged network as three functions whose composition is the network (FedIN, eq. 7)."""

    extractor: Callable[[Tensor], Tensor]
    intermediate: Callable[[Tensor], Tensor]
    classifier: Callable[[Tensor], Tensor]


def split(net: nn.Module) -> Split:
    """Extractor, intermediate layers (pooling included) and classifier of a staged network.

    Raises:
        TypeError: `net` is no StagedNet, or has no stage between extractor and classifier.
    """
    whole = staged(net)
    cut = whole.extractor_stages
    return Split(
        extractor=whole.stages[:cut],
        intermediate=nn.Sequential(whole.stages[cut:], whole.pool),
        classifier=whole.head,
    )


def intermediate_names(net: nn.Module) -> frozenset[str]:
    """Names of the parameters that lie between extractor and classifier."""
    whole = staged(net)
    inner = whole.stages[whole.extractor_stages :]
    ours = {id(parameter) for parameter in inner.parameters()}
    return frozenset(name for name, parameter in whole.named_parameters() if id(parameter) in ours)


def feature_shapes(net: nn.Module, input_shape: tuple[int, ...]) -> tuple[Size, Size]:
    """Shapes of one example's features before and after the intermediate layers; nets that embed read tokens."""
    parts = split(net)
    with mode(net, training=False), torch.no_grad():
        tokens = any(isinstance(module, nn.Embedding) for module in net.modules())
        s_in = parts.extractor(torch.zeros(1, *input_shape, dtype=torch.int64 if tokens else None))
        return s_in.shape[1:], parts.intermediate(s_in).shape[1:]


def classifier_names(net: nn.Module) -> frozenset[str]:
    """Names of the classifier's parameters, whose first dimension counts classes."""
    return frozenset(f"head.{name}" for name, _ in staged(net).head.named_parameters())


def staged(net: nn.Module) -> StagedNet:
    """The net as a staged one that can be split.

    Raises:
        TypeError: `net` is no StagedNet, or has no stage between extractor and classifier.
    """
    if (problem := split_problem(net)) is not None:
        raise TypeError(f"{problem}; {Need.SPLIT_MODEL.advice}")
    assert isinstance(net, StagedNet)
    return net
