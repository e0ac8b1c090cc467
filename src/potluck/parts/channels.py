"""Which channels of a net's layers belong together, so that sub-models of its width may take any of them.

A layer reads what another has written. A sub-model that keeps some output channels of one layer has to keep the same
input channels of the next, in the same order, and the same channels of everything that is added to them, as in
residual nets. Leading slices agree by themselves where layers keep the order of their channels; windows that roll and
sets that are drawn must be the same wherever the channels occur.

`channels_of` works this out from the shapes of a net and of a narrower one of the same kind, and proves it on the net:
the net must compute the same after channels that belong together have changed places.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Size, Tensor, nn
from torch.func import functional_call

from potluck.core.errors import ConfigError
from potluck.parts.submodels import SubModel, select

Shapes = Mapping[str, Size]
Choice = Callable[[int, int], Tensor]
"""Of (width, kept) the channels that are kept, int64 numbers below `width`."""

Pair = tuple[int, int]
"""A width, and how much of it a narrower net keeps."""

_SAME = 1e-6


@dataclass(frozen=True)
class Block:
    """Channels that lie side by side and are chosen together, wherever they occur.

    Attributes:
        start: the first of them, counted among the channels of a dimension.
        width: how many there are.
        kept: how many of them a narrower net has.
    """

    start: int
    width: int
    kept: int


@dataclass(frozen=True)
class Axis:
    """A dimension of a tensor.

    Attributes:
        size: of the full net's tensor.
        blocks: of its channels that are chosen, in order; none if the whole dimension stays.
        repeat: positions of a channel side by side: more than one where a linear layer reads a flattened image.
    """

    size: int
    blocks: tuple[Block, ...] = ()
    repeat: int = 1


@dataclass(frozen=True)
class Channels:
    """The channels of all dimensions of a net's tensors that a narrower net has fewer of.

    Attributes:
        axes: by the tensor's name, its dimensions.
    """

    axes: Mapping[str, tuple[Axis, ...]]

    def rolling(self, offset: int) -> SubModel:
        """As many channels as the narrower net has from `offset` on, going around (FedRolex)."""
        return self.chosen(lambda width, kept: (offset + torch.arange(kept)) % width)

    def drawn(self, generator: torch.Generator) -> SubModel:
        """Channels drawn at random without replacement, all sets and orders equally likely (federated dropout)."""
        return self.chosen(lambda width, kept: torch.randperm(width, generator=generator)[:kept])

    def chosen(self, choice: Choice) -> SubModel:
        """The sub-model of the channels that `choice` makes, once for all that belong together."""
        blocks = dict.fromkeys(block for axes in self.axes.values() for axis in axes for block in axis.blocks)
        kept = {block: choice(block.width, block.kept) for block in blocks if block.kept < block.width}
        kept |= {block: torch.arange(block.width) for block in blocks if block not in kept}
        found: dict[Axis, slice | Tensor] = {}
        for axis in dict.fromkeys(axis for axes in self.axes.values() for axis in axes):
            channels = [block.start + kept[block] for block in axis.blocks]
            found[axis] = _repeated(torch.cat(channels), axis.repeat) if channels else slice(0, axis.size)
        return {name: tuple(found[axis] for axis in axes) for name, axes in self.axes.items()}


def channels_of(net: nn.Module, narrow: Shapes, input_shape: tuple[int, ...]) -> Channels:
    """The channels of a net of which there is a narrower one.

    Layers of one width keep the same channels. Where that is not enough, since shortcuts fill up with zeros, the
    channels beyond the next smaller width are a block of their own, and those before it are that width's.

    Args:
        net: the full one; it is changed.
        narrow: shapes of all the narrower net's parameters and buffers.
        input_shape: of one example.

    Raises:
        ConfigError: some layer reads channels in an order of its own.
    """
    full = {name: tensor.shape for name, tensor in net.state_dict().items()}
    if full == narrow:
        return Channels(_axes(full, narrow, nested=False))
    for nested in (False, True):
        channels = Channels(_axes(full, narrow, nested=nested))
        if _hold(channels, net, input_shape):
            return channels
    raise ConfigError(
        f"{type(net).__name__}: the channels of its layers cannot change places, since some layer tells them apart by"
        " position, as channel shuffles, attention heads and convolutions in groups do; choose another model"
    )


@dataclass(frozen=True)
class Narrowing:
    """A question for `server.about`: `channels_of` a net that is cut to these shapes.

    Attributes:
        shapes: of the narrower net's parameters and buffers, by name.
    """

    shapes: tuple[tuple[str, Size], ...]

    @classmethod
    def to(cls, narrow: nn.Module) -> "Narrowing":
        """The cut to this net's shapes."""
        return cls(tuple((name, tensor.shape) for name, tensor in narrow.state_dict().items()))

    def __call__(self, net: nn.Module, input_shape: tuple[int, ...]) -> Channels:
        """The net's channels."""
        return channels_of(net, dict(self.shapes), input_shape)


def _axes(full: Shapes, narrow: Shapes, *, nested: bool) -> dict[str, tuple[Axis, ...]]:
    """The dimensions of all tensors of the narrower net."""
    sizes = {name: list(zip(full[name], shape, strict=True)) for name, shape in narrow.items()}
    written = {pairs[0] for pairs in sizes.values() if pairs and pairs[0][0] > pairs[0][1]}
    found: dict[str, tuple[Axis, ...]] = {}
    last: list[Pair] = []  # the widths written so far
    for name, pairs in sizes.items():
        axes: list[Axis] = []
        for size, kept in pairs:
            width, repeat = _read((size, kept), written, last)
            blocks = _blocks(width, written if nested and width in written else set()) if kept < size else ()
            axes.append(Axis(size, blocks, repeat))
        found[name] = tuple(axes)
        last += pairs[:1]
    return found


def _read(dimension: Pair, written: set[Pair], last: Sequence[Pair]) -> tuple[Pair, int]:
    """Whose channels a dimension has, and positions of each: a dimension that no layer writes is a flattened image."""
    if dimension not in written:
        for width, kept in reversed(last):
            times = dimension[0] // width
            if kept < width and dimension == (times * width, times * kept):
                return (width, kept), times
    return dimension, 1


def _blocks(width: Pair, written: set[Pair]) -> tuple[Block, ...]:
    """One block, or one beyond each smaller width that is written."""
    ends = [(0, 0), *sorted(pair for pair in written if pair[0] < width[0]), width]
    return tuple(Block(start, end - start, until - since) for (start, since), (end, until) in pairwise(ends))


def _repeated(channels: Tensor, times: int) -> Tensor:
    """The positions of channels that have `times` each."""
    return (channels[:, None] * times + torch.arange(times)).flatten()


def _hold(channels: Channels, net: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether a net with weights drawn at random computes the same when channels that belong together change places."""
    draws = torch.Generator().manual_seed(0)
    state = {name: _shaken(name, tensor, draws) for name, tensor in net.state_dict().items()}
    moved = select(state, channels.chosen(lambda width, kept: torch.randperm(width, generator=draws)))
    tokens = any(isinstance(module, nn.Embedding) for module in net.modules())
    shape = (4, *input_shape)
    inputs = torch.zeros(shape, dtype=torch.int64) if tokens else torch.randn(shape, generator=draws).double()
    hooks = [m.register_forward_hook(_channel_by_channel) for m in net.modules() if isinstance(m, nn.GroupNorm)]
    with torch.no_grad():
        before, after = (functional_call(net.double().eval(), weights, inputs) for weights in (state, moved))
    for hook in hooks:
        hook.remove()
    return bool(torch.allclose(after, before, rtol=_SAME, atol=_SAME * float(before.abs().max())))


def _shaken(name: str, tensor: Tensor, draws: torch.Generator) -> Tensor:
    """A tensor that tells its channels apart, which new norms and biases do not."""
    if not tensor.is_floating_point() or (tensor.dim() > 1 and tensor.amin() < tensor.amax()):
        return tensor.double() if tensor.is_floating_point() else tensor
    shaken = tensor.double() + torch.randn(tensor.shape, generator=draws).double() / 10
    return shaken.abs() + 0.1 if name.endswith("running_var") else shaken


def _channel_by_channel(norm: nn.GroupNorm, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A norm by groups without its statistics, which are those of other channels in every slice of a net."""
    x, shape = inputs[0], (-1, *[1] * (inputs[0].dim() - 2))
    return x * norm.weight.view(shape) + norm.bias.view(shape) if norm.affine else x
