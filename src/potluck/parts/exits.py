"""Exits that a method adds to nets: classifiers behind stages or blocks, alike on both sides.

They are the method's own modules, beside the model that a client evaluates: what is trained of them is sent, averaged
and kept by the method, and they never predict unless it says so (`Method.predicts_with_exits`). `with_exits` makes a
net of a model's layers and these.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from torch import Size, Tensor, nn
from torch.nn import functional as F

from potluck.core.federation import Member
from potluck.core.ground.inputs import InputShape
from potluck.core.nets.batchnorm import batch_norms, norms_of
from potluck.core.nets.classes import axes_of_classes
from potluck.core.nets.slicing import Indices, lies_in
from potluck.core.roles import Client, Server
from potluck.models.contract import Exit, GlobalPool
from potluck.models.stages import stages_of

ExitBuilder = Callable[[nn.Module, Size, int], nn.Module]
"""Makes of a net, the shape of one example's features at an exit, and the number of outputs, that exit."""

Kept = Mapping[str, slice | Tensor]
"""By place, which channels of the full net's features there a narrower net has; where none are named, the leading."""


def small_exit(net: nn.Module, features: Size, outputs: int, *, track: bool = True) -> Exit:
    """A norm, a mean over positions and a linear layer, see `Stages.small_exit`."""
    return stages_of(net).small_exit(features, outputs, track=track)


def new_exits(
    party: Server | Client, net: nn.Module, behind: Mapping[str, Size], build: ExitBuilder = small_exit
) -> nn.ModuleDict:
    """By place, an exit of a net, with initial weights drawn from the run's seed and the place's name.

    So an exit is the same in every net that has one there, of whatever depth, and whichever others that has. On a
    client with classes of its own it has outputs for these; what it begins with there is to be replaced.

    Args:
        party: who makes them; all make the same.
        net: that they are for.
        behind: the places, see `potluck.models.stages`, and the shape of one example's features at each.
        build: makes one.
    """
    found = nn.ModuleDict()
    own = party.classes if isinstance(party, Client) else None
    for place, features in behind.items():
        made = partial(build, net, features, party.num_classes if own is None else len(own.numbers))
        name = f"exit {place}"
        found[place] = party.module(name, made) if isinstance(party, Server) else party.module(name, made, keep=False)
    return found


def blocks_within(net: nn.Module, share: float) -> int:
    """How many of a net's blocks make up at most this share of them; at least one."""
    return max(1, math.floor(share * len(stages_of(net).blocks) + 1e-9))  # 0.29 * 100 is 28.999999999999996


def leading_share(
    party: Server | Client,
    net: nn.Module,
    input_shape: InputShape,
    share: float,
    exits_behind: Sequence[float],
    build: ExitBuilder = small_exit,
) -> nn.Module:
    """The leading share of a net's blocks, with the exits that stand behind them.

    Its layers are those of the net. It ends in an exit, unless it has all blocks: then in the net's own head, behind
    which there is no other exit.

    Args:
        party: who makes it; all make the same exits.
        net: the full net.
        input_shape: of one example.
        share: of the blocks, see `blocks_within`.
        exits_behind: shares of the blocks behind which nets have exits; those beyond `share` are left out.
        build: makes an exit.
    """
    whole, depth = stages_of(net), blocks_within(net, share)
    known, shapes = whole.blocks, whole.shapes(input_shape)
    reached = {blocks_within(net, each) for each in (*exits_behind, share)}
    behind = [known[number - 1] for number in sorted(reached) if number <= depth and number < len(known)]
    exits = new_exits(party, net, {place: shapes[place] for place in behind}, build)
    return whole.leading(depth, dict(exits.items()))


@dataclass(frozen=True)
class RowsOfExits:
    """A question for `server.about`: by name, the axis along which the tensors of exits have the classes.

    Attributes:
        server: whose net it is.
        net_of: makes its exits, or the net with them.
    """

    server: Server = field(compare=False)
    net_of: Callable[[Server, nn.Module], nn.Module] = field(compare=False)

    def __call__(self, net: nn.Module, input_shape: InputShape) -> dict[str, int]:
        """The axes."""
        classes = self.server.num_classes
        wider = self.net_of(replace(self.server, num_classes=classes + 1), net)
        return axes_of_classes(self.net_of(self.server, net), wider, classes)


def with_rows_of_exits(member: Member, server: Server, net_of: Callable[[Server, nn.Module], nn.Module]) -> Member:
    """A client of which it is known, too, where exits have its own classes.

    Args:
        member: the client.
        server: has its architecture with all classes.
        net_of: makes of that the exits, or the net with them, by whose names they are sent.
    """
    if (head := member.head) is None:
        return member
    axes = {**head.axes, **server.about(member.base, RowsOfExits(server, net_of))}
    return replace(member, head=replace(head, axes=axes))


@dataclass(frozen=True)
class LeadingNames:
    """The names of the tensors that `leading_share` has, among those of the net with all its exits.

    Attributes:
        layers: of the net's own; None for all that it has.
        places: behind which it has exits.
    """

    layers: frozenset[str] | None
    places: frozenset[str]

    def __contains__(self, name: str) -> bool:
        if self.layers is None:
            return True
        start, _, rest = name.partition(".")
        return rest.partition(".")[0] in self.places if start == "exits" else name in self.layers


def leading_names(net: nn.Module, share: float) -> LeadingNames:
    """Which tensors the leading share of a net's blocks has."""
    whole, depth = stages_of(net), blocks_within(net, share)
    known, names = whole.blocks, whole.names()
    if depth == len(known):
        return LeadingNames(None, frozenset(names))
    kept = list(names)[: list(names).index(known[depth - 1]) + 1]
    return LeadingNames(frozenset[str]().union(*(names[place] for place in kept)), frozenset(kept))


def slices_with_exits(part: nn.Module, narrow: nn.Module, kept: Kept) -> dict[str, Indices]:
    """Where the parameters of a part of a narrower net, with exits, lie in the full net with the same exits.

    Those of exits are leading slices, but for what reads the features at the place.
    """
    layers, modules = lies_in(narrow), dict(part.named_modules())
    found = {
        name: layers[name] if name in layers else tuple(slice(0, size) for size in tensor.shape)
        for name, tensor in part.named_parameters()
    }
    for place, channels in kept.items():
        if f"exits.{place}" in modules:
            found |= _reading(f"exits.{place}", modules[f"exits.{place}"], channels, found)
    return found


def _reading(
    path: str, exit: nn.Module, channels: slice | Tensor, places: Mapping[str, Indices]
) -> Iterator[tuple[str, Indices]]:
    """The places of the tensors of an exit that read these channels: of norms, and the first layer behind them."""
    norms = norms_of(exit)
    for name, layer in exit.named_modules():
        own = [f"{path}.{name}.{key}" for key, _ in layer.named_parameters(recurse=False)]
        if layer in norms:
            yield from ((tensor, (channels,)) for tensor in own)
        elif own:
            weight = f"{path}.{name}.weight"
            yield weight, (places[weight][0], channels, *places[weight][2:])
            return


def convolutional_exit(net: nn.Module, features: Size, outputs: int) -> Exit:
    """Three convolutions of one width and a linear layer behind a feature map; behind other features `small_exit`.

    A BatchNorm, if the net has any, and ReLU follow each convolution (ScaleFL, as in the authors' ResNet).
    """
    if not stages_of(net).has_maps(features):
        return small_exit(net, features, outputs)
    channels, normed = features[0], bool(batch_norms(net))
    rows = [_layer(normed, nn.Conv2d(channels, channels, 3, padding=1, bias=not normed)) for _ in range(3)]
    return Exit(nn.Sequential(*(module for row in rows for module in row), GlobalPool()), nn.Linear(channels, outputs))


def bottleneck_exit(shapes: Sequence[Size], net: nn.Module, features: Size, outputs: int) -> Exit:
    """A gate and a row of separable convolutions behind a feature map; behind other features `small_exit`.

    Each of the row has a stride of 2, until the map is as small and as wide as the net's last (DepthFL, as in the
    authors' ResNet).

    Args:
        shapes: of one example's features at all places of the whole net, in order.
        net: that the exit is for.
        features: shape of one example's here.
        outputs: how many numbers it puts out.
    """
    has_maps = stages_of(net).has_maps
    if not has_maps(features):
        return small_exit(net, features, outputs)
    normed, widths, side = bool(batch_norms(net)), [features[0]], features[-1]
    for shape in shapes:
        if has_maps(shape) and shape[-1] < side:
            widths, side = [*widths, shape[0]], shape[-1]
    rows = [_separable(*pair, normed) for pair in pairwise(widths)]
    return Exit(nn.Sequential(AttentionGate(features[0], normed), *rows, GlobalPool()), nn.Linear(widths[-1], outputs))


class AttentionGate(nn.Module):
    """Multiplies a feature map by a map between 0 and 1 that it makes of it at half its size."""

    def __init__(self, channels: int, normed: bool) -> None:
        super().__init__()
        norm = [nn.BatchNorm2d(channels)] if normed else []
        self.map = nn.Sequential(_separable(channels, channels, normed), *norm, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """A map (batch, channels, height, width) to one of the same shape."""
        gate = F.interpolate(self.map(x), x.shape[-2:], mode="bilinear", align_corners=False)
        return x * gate.sigmoid()


def _separable(inputs: int, outputs: int, normed: bool) -> nn.Sequential:
    """Two separable convolutions, the first of which halves the map and keeps the channels."""

    def one(width: int, stride: int) -> list[nn.Module]:
        each = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=not normed)
        return _layer(normed, each, nn.Conv2d(inputs, width, 1, bias=not normed))

    return nn.Sequential(*one(inputs, 2), *one(outputs, 1))


def _layer(normed: bool, *convolutions: nn.Conv2d) -> list[nn.Module]:
    """Convolutions in a row, a BatchNorm if there are to be any, and ReLU."""
    norm = [nn.BatchNorm2d(convolutions[-1].out_channels)] if normed else []
    return [*convolutions, *norm, nn.ReLU()]
