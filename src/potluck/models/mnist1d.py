"""The four models of MNIST-1D's paper: `mnist1d_logistic`, `mnist1d_mlp`, `mnist1d_gru`, `mnist1d_cnn`.

Greydanus and Kobak. ICML 2024. https://arxiv.org/abs/2011.14439; https://github.com/greydanus/mnist1d, `notebooks`.

They read an input of any shape as one sequence of numbers. Of 40 numbers and ten classes they have 410, 15,210, 5,134
and 5,210 weights, and 40, 100, 480 and 125 features, which are those of the last layer at all positions.

Trained as there, on all 4,000 examples by Adam with a learning rate of 0.01 in batches of 100 for 150 epochs, they
reach 32.2 and 32.9, 65.4 and 66.3, 89.0, 92.1 and 92.5 % of the test examples (in this order; two seeds each, one of
the GRU). The authors' notebook ends at 31.5, 65.1, 89.1 and 92.3 %; the paper's table has 32, 68, 91 and 94 %.

No two of them have a layer in common, so that nothing but the head can be shared by name. With `features` all have
that many: a linear layer before the head. From as many features as classes on, what a model can represent stays the
same, since two linear layers in a row compute what one does; the logistic regression, which then has two before its
head, stays one. Without `features`, the logistic regression and the GRU have one stage, so methods that split networks
in three refuse them.

Options:
    width: channels of a convolution, numbers in a state of the GRU, or units of a hidden layer.
    features: the number of features, made by a linear layer before the head; by default there is no such layer.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.scale import FULL, Scale
from potluck.models.contract import StagedNet, of_depth


def mnist1d_logistic(
    num_classes: int, input_shape: tuple[int, ...], *, scale: Scale = FULL, features: int | None = None
) -> StagedNet:
    """Logistic regression, whose features are its inputs; with `features`, a product of three matrices."""
    _only_whole(scale, "a logistic regression", "features")
    stem: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    found = math.prod(input_shape)
    if features is not None:
        stem["map"], found = nn.Linear(found, _count(features)), features
    return _net("logistic", {"stem": nn.Sequential(stem)}, found, num_classes, input_shape, scale, features)


def mnist1d_mlp(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    scale: Scale = FULL,
    width: int = 100,
    features: int | None = None,
) -> StagedNet:
    """Two hidden layers of `width` units, the second beside a shortcut."""
    units = scale.of(width)
    first = nn.Linear(math.prod(input_shape), units)
    stages: dict[str, nn.Module] = {
        "stem": nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=first, relu=nn.ReLU())),
        "hidden1": Shortcut(OrderedDict(linear=nn.Linear(units, units), relu=nn.ReLU())),
    }
    return _net("mlp", stages, units, num_classes, input_shape, scale, features)


def mnist1d_gru(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    scale: Scale = FULL,
    width: int = 6,
    features: int | None = None,
) -> StagedNet:
    """A bidirectional GRU with states of `width` numbers, all of which are features."""
    _only_whole(scale, "a GRU", "width")
    gru = BidirectionalGRU(scale.of(width))
    stem = nn.Sequential(OrderedDict(flatten=nn.Flatten(), gru=gru, states=nn.Flatten()))
    found = 2 * width * math.prod(input_shape)
    return _net("gru", {"stem": stem}, found, num_classes, input_shape, scale, features)


def mnist1d_cnn(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    scale: Scale = FULL,
    width: int = 25,
    features: int | None = None,
) -> StagedNet:
    """Three convolutions of `width` channels, each of which halves the length."""
    channels, length = scale.of(width), math.prod(input_shape)
    if length < 3:
        raise ConfigError(f"input of {length} numbers; expected at least 3 for this model")
    to_map = OrderedDict[str, nn.Module](flatten=nn.Flatten(), channel=nn.Unflatten(1, (1, length)))
    stages: dict[str, nn.Module] = {
        "stem": nn.Sequential(to_map | _convolution(1, channels, 5)),
        "block1": nn.Sequential(_convolution(channels, channels, 3)),
        "block2": nn.Sequential(_convolution(channels, channels, 3) | {"flatten": nn.Flatten()}),
    }
    positions = length
    for kernel in (5, 3, 3):
        positions = (positions + 2 - kernel) // 2 + 1
    return _net("cnn", stages, channels * positions, num_classes, input_shape, scale, features)


VARIANTS: dict[str, Callable[..., StagedNet]] = {
    "mnist1d_logistic": mnist1d_logistic,
    "mnist1d_mlp": mnist1d_mlp,
    "mnist1d_gru": mnist1d_gru,
    "mnist1d_cnn": mnist1d_cnn,
}


class Shortcut(nn.Sequential):
    """Layers whose output is added to their input."""

    def forward(self, input: Tensor) -> Tensor:
        """Features of the same shape."""
        return input + super().forward(input)


class BidirectionalGRU(nn.Module):
    """A GRU over a sequence of numbers, forwards and backwards: (batch, time) to states (batch, 2 width, time).

    It computes and begins as `nn.GRU(1, width, bidirectional=True)`, whose matrices are these, transposed and with a
    leading axis for the direction. Written out, since torch's GRU cannot be stacked over networks by vmap.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        # Of the reset gate, the update gate and the candidate, in this order.
        self.weight_ih = nn.Parameter(torch.empty(2, 1, 3 * width))
        self.weight_hh = nn.Parameter(torch.empty(2, width, 3 * width))
        self.bias_ih = nn.Parameter(torch.empty(2, 1, 3 * width))
        self.bias_hh = nn.Parameter(torch.empty(2, 1, 3 * width))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)

    def extra_repr(self) -> str:
        """The width, which tells two nets apart that are stacked."""
        return str(self.width)

    def forward(self, x: Tensor) -> Tensor:
        """Sequences (batch, time) to the states behind every number, those of both directions as channels."""
        gates = 2 * self.width
        both = torch.stack([x, x.flip(1)])
        read = both.permute(2, 0, 1).unsqueeze(3) * self.weight_ih + self.bias_ih  # (time, 2, batch, 3 width)
        read_gates = (read[..., :gates] + self.bias_hh[..., :gates]).unbind(0)
        read_candidates = read[..., gates:].unbind(0)
        to_gates, to_candidate = self.weight_hh[..., :gates], self.weight_hh[..., gates:]
        bias = self.bias_hh[..., gates:]
        state, states = x.new_zeros(2, x.shape[0], self.width), list[Tensor]()
        for read_gate, read_candidate in zip(read_gates, read_candidates, strict=True):
            reset, update = torch.baddbmm(read_gate, state, to_gates).sigmoid().chunk(2, 2)
            candidate = torch.addcmul(read_candidate, reset, torch.baddbmm(bias, state, to_candidate)).tanh()
            state = candidate.lerp(state, update)
            states.append(state)
        forwards, backwards = torch.stack(states, 3)
        return torch.cat([forwards, backwards.flip(2)], 1)


def _net(
    family: str,
    stages: dict[str, nn.Module],
    found: int,
    num_classes: int,
    input_shape: tuple[int, ...],
    scale: Scale,
    features: int | None,
) -> StagedNet:
    """The stages, a linear layer to `features` if they are given, and a head."""
    if features is not None:
        stages = {**stages, f"{family}_features": nn.Linear(found, _count(features))}
        found = features
    return of_depth(StagedNet(stages, nn.Linear(found, num_classes)), scale.depth, num_classes, input_shape)


def _count(features: int) -> int:
    if features < 1:
        raise ConfigError(f"features {features}; expected at least 1")
    return features


def _only_whole(scale: Scale, family: str, option: str) -> None:
    if scale.width != 1:
        found = f"width {scale.width:g}; expected 1"
        raise ConfigError(f"{found}: a slice of {family} is no such model; choose a `{option}`")


def _convolution(inputs: int, outputs: int, kernel: int) -> OrderedDict[str, nn.Module]:
    return OrderedDict(conv=nn.Conv1d(inputs, outputs, kernel, stride=2, padding=1), relu=nn.ReLU())
