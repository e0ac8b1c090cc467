"""Narrower nets cut out of any net of common layers, and which channels a sub-model of its width may take.

A layer reads what another has written. A sub-model that keeps some output channels of one layer has to keep the same
input channels of the next, in the same order, and the same channels of everything that is added to them. Which belong
together is found by tracing (`potluck.core.nets.tracing`). Channels that occur in the same places everywhere are a
block, and of a block a narrower net keeps a share: of a plain layer the leading channels; of layers that are
concatenated the leading channels of each; of the groups of a convolution whole groups, and of `nn.MultiheadAttention`
whole heads; where a net divides channels into heads itself, the leading channels of every head. Inputs and outputs keep
their number.

It is proven on the net: the full net must compute the same after channels that belong together have changed places,
and the narrower one must run, put out as much as the full one, and tie its channels as the full one does.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Size, Tensor, nn
from torch.utils._pytree import tree_leaves

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import InputShape, each
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.calling import call_with
from potluck.core.nets.entrance import blank_inputs
from potluck.core.nets.tracing import FIXED, Trace, Unfollowed, trace
from potluck.core.nets.weights import tensors_of

Shapes = Mapping[str, Size]
Choice = Callable[[int, int], Tensor]
"""Of (width, kept) the channels that are kept, int64 numbers below `width`."""

Indices = tuple[slice | Tensor, ...]
"""For every dimension of a tensor, the positions that are taken, in order and each once: a slice, or int64 numbers."""

_SAME = 1e-6
_RECORD = "cut_by"  # the attribute of a narrower net that keeps how it was cut


class NoSlices(ConfigError):
    """A net of which there is no narrower or no shallower one; the text says which layer, and why."""


@dataclass(frozen=True)
class Block:
    """Channels that are chosen together, wherever they occur.

    Attributes:
        channels: their classes, in order.
        kept: how many of them a narrower net has.
        unit: how many side by side are kept or dropped as one, such as a head.
        multiple: the number that is kept is a multiple of this one.
        choice: blocks of the same number here choose the same units.
    """

    channels: tuple[int, ...]
    kept: int
    unit: int
    multiple: int
    choice: int


@dataclass(frozen=True)
class Channels:
    """The channels of all dimensions of a net's tensors, of which a narrower net has fewer.

    Attributes:
        sizes: shape of every tensor of the full net that the narrower one has too, by name.
        axes: for every dimension the classes of its positions; None if the whole dimension stays.
        blocks: all blocks of channels.
    """

    sizes: Shapes
    axes: Mapping[str, tuple[tuple[int, ...] | None, ...]]
    blocks: tuple[Block, ...]

    def leading(self) -> dict[str, Indices]:
        """The sub-model of the leading channels of every block."""
        return self.chosen(lambda width, kept: torch.arange(kept))

    def rolling(self, offset: int) -> dict[str, Indices]:
        """As many channels as the narrower net has from `offset` on, going around (FedRolex)."""
        return self.chosen(lambda width, kept: (offset + torch.arange(kept)) % width)

    def drawn(self, generator: torch.Generator) -> dict[str, Indices]:
        """Channels drawn at random without replacement, all sets and orders equally likely (federated dropout)."""
        return self.chosen(lambda width, kept: torch.randperm(width, generator=generator)[:kept])

    def chosen(self, choice: Choice) -> dict[str, Indices]:
        """The sub-model of the units that `choice` makes, once for all blocks that have to agree."""
        made: dict[int, Tensor] = {}
        taken: dict[int, int] = {FIXED: FIXED}  # of each class that the leading slice has, the one in its place
        for block in self.blocks:
            if block.choice not in made:
                width, kept = len(block.channels) // block.unit, block.kept // block.unit
                made[block.choice] = choice(width, kept) if kept < width else torch.arange(width)
            units = made[block.choice][:, None] * block.unit + torch.arange(block.unit)
            taken |= zip(block.channels, (block.channels[i] for i in units.flatten().tolist()), strict=False)
        found: dict[tuple[int, ...], slice | Tensor] = {}
        for row in {row for axes in self.axes.values() for row in axes if row is not None}:
            found[row] = _positions(row, taken)
        return {
            name: tuple(
                slice(0, n) if row is None else found[row] for row, n in zip(axes, self.sizes[name], strict=True)
            )
            for name, axes in self.axes.items()
        }


def _positions(row: tuple[int, ...], taken: Mapping[int, int]) -> slice | Tensor:
    """Where a dimension has the channels that take the places of those that the leading slice has."""
    places: dict[int, list[int]] = {}
    for position, channel in enumerate(row):
        places.setdefault(channel, []).append(position)
    seen: Counter[int] = Counter()
    found: list[int] = []
    for channel in row:
        if channel in taken:
            found.append(places[taken[channel]][seen[channel]])
            seen[channel] += 1
    return slice(0, len(row)) if found == list(range(len(row))) else torch.tensor(found)


@dataclass(frozen=True)
class Cut:
    """How a narrower net is made of a full one.

    Attributes:
        channels: those of the full net, and how many are kept.
        places: where the tensors of the narrower net lie in the full one's.
        trace: of the full net.
    """

    channels: Channels
    places: Mapping[str, Indices]
    trace: Trace

    def of(self, net: nn.Module) -> nn.Module:
        """The full net made narrower, in place: its tensors are parts of what they were, and so are their values."""
        whole = {name: tensor for name, tensor in tensors_of(net).items() if name in self.places}
        cut = {id(tensor): _part(tensor, self.places[name]) for name, tensor in whole.items()}
        before = dict(net.named_parameters(remove_duplicate=False))
        for layer in net.modules():
            for held in (layer._parameters, layer._buffers):
                held.update({name: cut[id(tensor)] for name, tensor in held.items() if id(tensor) in cut})
        for path, layer in net.named_modules():
            self._resize(path, layer, before)
        for layer in net.modules():
            fitted: Callable[[], None] | None = getattr(layer, "after_slicing", None)
            if fitted is not None:
                fitted()
        object.__setattr__(net, _RECORD, self)
        return net

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cut":
        """Itself, which never changes."""
        return self

    def _resize(self, path: str, layer: nn.Module, before: Mapping[str, Tensor]) -> None:
        """Say in a layer's attributes how large it is now."""
        some = cast(Any, layer)
        if isinstance(layer, nn.Linear):
            some.out_features, some.in_features = layer.weight.shape
        elif isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            whole = before.get(f"{path}.weight".lstrip("."))  # none of a layer that was left out of the net
            if layer.groups > 1 and whole is not None:
                some.groups = layer.groups * len(layer.weight) // len(whole)
            some.out_channels, some.in_channels = len(layer.weight), layer.weight.shape[1] * layer.groups
        elif isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
            some.in_channels, some.out_channels = layer.weight.shape[:2]
        elif isinstance(layer, nn.Embedding):
            some.embedding_dim = layer.weight.shape[1]
        elif isinstance(layer, nn.PReLU):
            some.num_parameters = layer.weight.numel()
        elif isinstance(layer, nn.MultiheadAttention) and path in self.trace.heads:
            some.embed_dim = len(layer.out_proj.weight)
            some.num_heads = layer.embed_dim // self.trace.heads[path]
            separate = cast(Any, layer.in_proj_weight) is None
            some.kdim = cast(Tensor, layer.k_proj_weight).shape[1] if separate else layer.embed_dim
            some.vdim = cast(Tensor, layer.v_proj_weight).shape[1] if separate else layer.embed_dim
        elif path in self.trace.normed:
            self._resize_norm(some, self.trace.normed[path])

    def _resize_norm(self, norm: Any, rows: tuple[tuple[int, ...] | None, ...]) -> None:
        kept = {channel for block in self.channels.blocks for channel in block.channels[: block.kept]} | {FIXED}
        counts = [None if row is None else sum(channel in kept for channel in row) for row in rows]
        if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
            sizes = zip(counts, norm.normalized_shape, strict=True)
            norm.normalized_shape = tuple(old if new is None else new for new, old in sizes)
        elif counts[0] is not None and isinstance(norm, nn.GroupNorm):
            norm.num_channels = counts[0]
        elif counts[0] is not None and hasattr(norm, "num_features"):
            norm.num_features = counts[0]


def cut_of(net: nn.Module, of: Callable[[int], int], input_shape: InputShape) -> Cut:
    """How a net is made narrower, proven on it.

    Args:
        net: the full one; it is changed.
        of: how many channels are left of a number of channels, at least one.
        input_shape: of one example.

    Raises:
        NoSlices: some layer cannot be cut, or not followed.
    """
    kind = type(net).__name__
    try:
        traced = trace(net, input_shape)
        blocks = [_with_kept(block, of) for block in _blocks(traced)]
    except Unfollowed as found:
        raise NoSlices(str(found)) from found
    if not blocks:
        raise NoSlices(f"{kind} has no hidden layer whose channels could be left out")
    sizes = {name: tensor.shape for name, tensor in tensors_of(net).items()}
    channels = Channels(sizes, traced.axes, tuple(blocks))
    cut = Cut(channels, {name: _as_slices(place) for name, place in channels.leading().items()}, traced)
    if not hold(channels, net, input_shape):
        raise NoSlices(f"{kind} tells channels apart by position, so they cannot change places")
    narrow = cut.of(net.float())
    try:
        found = trace(narrow, input_shape)
    except Unfollowed as problem:
        raise NoSlices(f"it counts on the full number of channels: narrower, {problem}") from problem
    if found.outputs != traced.outputs:
        raise NoSlices(f"{kind} puts out {tuple(found.outputs[0][1:])} if narrower, not {tuple(traced.outputs[0][1:])}")
    if (layer := untied(traced, found, cut.places)) is not None:
        raise NoSlices(f"layer {layer} has other channels in a narrower net than in the full one, by their number")
    return cut


def channels_to(net: nn.Module, narrow: nn.Module, input_shape: InputShape) -> Channels:
    """The channels of a net of which its builder has made a narrower one.

    Args:
        net: the full one; it is changed.
        narrow: the narrower one.
        input_shape: of one example.

    Raises:
        NoSlices: some layer reads channels in an order of its own, or the narrower net's shapes are none of a part.
    """
    full = {name: tensor.shape for name, tensor in tensors_of(net).items()}
    try:
        traced = trace(net, input_shape)
        slim, shapes = trace(narrow, input_shape), {name: tensor.shape for name, tensor in tensors_of(narrow).items()}
        blocks = _to_shapes(_blocks(traced), traced, full, shapes)
    except Unfollowed as found:
        raise NoSlices(str(found)) from found
    axes = {name: traced.axes[name] for name in shapes}
    channels = Channels({name: full[name] for name in shapes}, axes, tuple(blocks))
    if (layer := untied(traced, slim, channels.leading())) is not None:
        raise NoSlices(f"layer {layer} has other channels in the narrower net than in the full one")
    if any(block.kept < len(block.channels) for block in blocks) and not hold(channels, net, input_shape):
        raise NoSlices(f"{type(net).__name__} tells channels apart by position, so they cannot change places")
    return channels


def lies_in(narrow: nn.Module) -> dict[str, Indices]:
    """Where a narrower net's tensors lie in the full one's: as it was cut, or in leading slices (HeteroFL, eq. 1)."""
    cut = cut_by(narrow)
    shapes = {name: tensor.shape for name, tensor in tensors_of(narrow).items()}
    places = {} if cut is None else cut.places
    return {name: places.get(name, tuple(slice(0, n) for n in shape)) for name, shape in shapes.items()}


def cut_by(narrow: nn.Module) -> Cut | None:
    """How a narrower net was cut; None of one that its builder has made."""
    return getattr(narrow, _RECORD, None)


def part(tensor: Tensor, place: Indices) -> Tensor:
    """What lies there: of slices alone a view."""
    for dim, index in enumerate(place):
        if isinstance(index, Tensor):
            tensor = tensor.index_select(dim, index.to(tensor.device))
        elif index.stop != tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, index.stop)
    return tensor


def inside(place: Indices, wider: Indices) -> Indices:
    """Where a tensor lies in a wider one, of places of both in the full one; all of its positions are the wider's."""
    return tuple(
        index if isinstance(wide, slice) else _found(index, wide) for index, wide in zip(place, wider, strict=True)
    )


def _found(index: slice | Tensor, wide: Tensor) -> Tensor:
    positions = torch.arange(index.stop) if isinstance(index, slice) else index
    return (positions[:, None] == wide).int().argmax(1)


def untied(full: Trace, narrow: Trace, places: Mapping[str, Indices]) -> str | None:
    """The tensor that in a narrower net has other channels than the part of the full net's has; None if none does."""
    to_narrow: dict[int, int] = {FIXED: FIXED}
    to_full: dict[int, int] = {FIXED: FIXED}

    def agree(wide: tuple[int, ...], slim: tuple[int, ...]) -> bool:
        if len(wide) != len(slim):
            return False
        pairs = zip(wide, slim, strict=True)
        return all(to_narrow.setdefault(w, s) == s and to_full.setdefault(s, w) == w for w, s in pairs)

    for name, axes in narrow.axes.items():
        for slim, wide, place in zip(axes, full.axes[name], places[name], strict=True):
            row = None if wide is None else _taken(wide, place)
            if wide is None and slim is not None and name not in full.grouped:  # of which one group may be left
                return name
            if row is not None and len(row) > 1 and not agree(row, slim or (FIXED,) * len(row)):
                return name
    wide = [(w.where, tuple(c for c in w.channels if c in to_narrow)) for w in full.written]
    slim = [w.channels for w in narrow.written]
    if len(wide) != len(slim):
        return "of attention"
    return next((where for (where, row), s in zip(wide, slim, strict=True) if len(s) > 1 and not agree(row, s)), None)


def incoherent(full: nn.Module, narrow: nn.Module, input_shape: InputShape) -> str | None:
    """The layer whose leading slices read other channels in a narrower net than in the full one; None if none is known.

    Nets that cannot be followed are taken as they are.
    """
    try:
        wide, slim = trace(full, input_shape), trace(narrow, input_shape)
    except Unfollowed:
        return None
    shapes = {name: tensor.shape for name, tensor in tensors_of(full).items()}
    places = lies_in(narrow)
    for name, tensor in tensors_of(narrow).items():
        for size, left, row in zip(shapes[name], tensor.shape, wide.axes[name], strict=True):
            if left < size and row is None:
                return name
    return untied(replace(wide, written=()), replace(slim, written=()), places)


def hold(channels: Channels, net: nn.Module, input_shape: InputShape) -> bool:
    """Whether a net with weights drawn at random computes the same when channels that belong together change places.

    Args:
        channels: of the net.
        net: is changed: its tensors become double precision.
        input_shape: of one example.
    """
    draws = torch.Generator().manual_seed(0)
    state = {name: _shaken(name, tensor, draws) for name, tensor in tensors_of(net).items()}
    places = channels.chosen(lambda width, kept: torch.randperm(width, generator=draws))
    moved = {name: _part(tensor, places[name]) if name in places else tensor for name, tensor in state.items()}
    inputs = each(
        blank_inputs(net, input_shape, 2),
        lambda x: torch.randn(x.shape, generator=draws).double() if x.is_floating_point() else x,
    )
    hooks = [m.register_forward_hook(_channel_by_channel) for m in net.modules() if isinstance(m, nn.GroupNorm)]
    with torch.no_grad(), isolated(Key(("hold",))):
        found = [tree_leaves(call_with(net.double().eval(), weights, inputs)) for weights in (state, moved)]
    for hook in hooks:
        hook.remove()
    pairs = [(a, b) for a, b in zip(*found, strict=True) if isinstance(a, Tensor)]
    return all(torch.allclose(b, a, rtol=_SAME, atol=_SAME * float(a.abs().max())) for a, b in pairs)


def _blocks(traced: Trace) -> list[Block]:
    """The blocks of a net, whole: channels that occur equally often wherever channels are written and read."""
    occurs: dict[int, Counter[int]] = {}
    read = (row for axes in traced.axes.values() for row in axes if row is not None)
    for number, row in enumerate(dict.fromkeys([*(row for _, row in traced.written), *read])):
        for channel in row:
            if channel != FIXED:
                occurs.setdefault(channel, Counter())[number] += 1
    alike: dict[frozenset[tuple[int, int]], list[int]] = {}
    for channel, counts in occurs.items():
        alike.setdefault(frozenset(counts.items()), []).append(channel)
    rows = [tuple(row) for row in alike.values()]
    blocks = [Block(row, len(row), 1, 1, number) for number, row in enumerate(rows)]
    for where, row, of in traced.multiples:
        for number in {_block_of(channel, blocks) for channel in row} - {None}:
            assert number is not None
            blocks[number] = replace(blocks[number], multiple=math.lcm(blocks[number].multiple, of))
            if len(blocks[number].channels) % of:
                raise Unfollowed(f"layer {where} has {of} groups or heads over channels of several layers")
    run_of: list[int | None] = []
    for where, row, unit in traced.runs:
        number = _block_of(row[0], blocks)
        run_of.append(number)
        if any(channel != FIXED for channel in row):
            if number is None or blocks[number].channels != row:
                raise Unfollowed(f"layer {where} has groups or heads whose channels are of several layers")
            blocks[number] = replace(blocks[number], unit=math.lcm(blocks[number].unit, unit))
    return _agreeing(blocks, [(run_of[a], run_of[b]) for a, b in traced.together])


def _block_of(channel: int, blocks: list[Block]) -> int | None:
    return next((number for number, block in enumerate(blocks) if channel in block.channels), None)


def _agreeing(blocks: list[Block], pairs: list[tuple[int | None, int | None]]) -> list[Block]:
    """The blocks, of which those of a pair keep the same units and have as many of them."""
    for a, b in pairs:
        if a is not None and b is not None:
            old, new = blocks[b].choice, blocks[a].choice
            blocks = [replace(block, choice=new) if block.choice == old else block for block in blocks]
    for choice in {blocks[a].choice for a, _ in pairs if a is not None}:
        joint = [block for block in blocks if block.choice == choice]
        units = math.gcd(*(len(block.channels) // math.lcm(block.unit, block.multiple) for block in joint))
        blocks = [
            replace(block, unit=len(block.channels) // units, multiple=1) if block.choice == choice else block
            for block in blocks
        ]
    return blocks


def _with_kept(block: Block, of: Callable[[int], int]) -> Block:
    step = math.lcm(block.unit, block.multiple)
    return replace(block, kept=step * of(len(block.channels) // step))


def _to_shapes(blocks: list[Block], traced: Trace, full: Shapes, narrow: Shapes) -> list[Block]:
    """The blocks with as many channels kept as the shapes of a narrower net say."""
    if strange := [name for name in narrow if name not in full or len(full[name]) != len(narrow[name])]:
        raise Unfollowed(f"{strange[0]} is in the narrower net alone")
    of_channel = {channel: number for number, block in enumerate(blocks) for channel in block.channels}
    open_rows: list[tuple[str, Counter[int], int]] = []  # channels of each block per kept one, and how many are left
    for name, shape in narrow.items():
        for row, size, left in zip(traced.axes[name], full[name], shape, strict=True):
            if row is None and left != size:
                raise Unfollowed(
                    f"{name} has fewer channels in the narrower net, but those are no channels that can be cut"
                )
            if row is not None:
                counts = Counter(of_channel[channel] for channel in row if channel != FIXED)
                times = Counter({number: count // len(blocks[number].channels) for number, count in counts.items()})
                open_rows.append((name, times, left - sum(channel == FIXED for channel in row)))
    known: dict[int, int] = {}
    while open_rows:
        rest: list[tuple[str, Counter[int], int]] = []
        for name, times, left in open_rows:
            unknown = [number for number in times if number not in known]
            left_over = left - sum(known[number] * count for number, count in times.items() if number in known)
            if len(unknown) > 1:
                rest.append((name, times, left))
            elif unknown and 0 <= left_over <= times[unknown[0]] * len(blocks[unknown[0]].channels):
                known[unknown[0]] = left_over // times[unknown[0]]
            elif unknown or left_over:
                raise Unfollowed(
                    f"{name} has {left} channels in the narrower net, unlike the layers that it belongs to"
                )
        if len(rest) == len(open_rows):
            raise Unfollowed(f"{rest[0][0]} has channels of several layers, and it is open how many of each")
        open_rows = rest
    for number, kept in known.items():
        if kept % blocks[number].unit:
            raise Unfollowed(f"a narrower net has {kept} of {len(blocks[number].channels)} channels, no whole group")
    return [replace(block, kept=known.get(number, block.kept)) for number, block in enumerate(blocks)]


def _part(tensor: Tensor, place: Indices) -> Any:
    """What lies there, in memory of its own; of a parameter a parameter."""
    found = part(tensor.detach(), place).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _as_slices(place: Indices) -> Indices:
    """The same, with slices for leading positions."""

    def shorter(index: slice | Tensor) -> slice | Tensor:
        leads = isinstance(index, Tensor) and torch.equal(index, torch.arange(len(index)))
        return slice(0, len(cast(Tensor, index))) if leads else index

    return tuple(shorter(index) for index in place)


def _taken(row: tuple[int, ...], index: slice | Tensor) -> tuple[int, ...]:
    return row[index] if isinstance(index, slice) else tuple(row[i] for i in index.tolist())


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
