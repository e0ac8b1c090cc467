"""Which channels of a net's layers belong together, found by running the net once.

Every element of what flows through the net carries a label: the channel that it is of. A layer that writes channels
gives them new labels. Operations that move elements (flatten, view, concatenation, transposition, padding) move the
labels the same way, and operations that combine elements (a residual sum, a product, attention's scores) say that
their channels are one and the same. A layer that reads channels ties its weights to them. What is left are classes of
channels that can only be kept or dropped together, whatever names or shapes the layers have.

The forward pass runs as the user wrote it, with Python's control flow, so nothing has to be rewritten for tracing. An
operation that is not known here is refused, by its name and that of the layer.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Size, Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from potluck.core.errors import explained
from potluck.core.modes import mode
from potluck.core.rng import Key, isolated

FIXED = 0
"""The class of everything that keeps its number: inputs, outputs, and what an operation ties to them."""

_NONE = -1  # the label of an element that is of no channel, such as a zero that fills up
_BATCH = 2


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations by name, without the underscores of methods in place and of operators.
_ALIKE = _names(
    "add radd iadd sub rsub isub subtract mul rmul imul multiply div rdiv idiv divide truediv rtruediv itruediv"
    " true_divide pow rpow maximum minimum fmin fmax where lerp addcmul addcdiv clamp clamp_min clamp_max clip"
    " masked_fill eq ne lt le gt ge logical_and logical_or logical_not isnan isfinite"
    " relu relu6 leaky_relu rrelu elu celu selu gelu silu mish sigmoid logsigmoid hardsigmoid hardswish hardtanh"
    " tanh tanhshrink softplus softsign softshrink hardshrink threshold exp expm1 log log1p sqrt rsqrt square abs neg"
    " reciprocal sin cos erf sign floor ceil round nan_to_num dropout dropout1d dropout2d dropout3d alpha_dropout"
    " feature_alpha_dropout softmax log_softmax softmin normalize to float double half bfloat16 type type_as clone"
    " contiguous detach requires_grad cpu zeros_like ones_like"
)
_RESHAPES = _names("view reshape view_as reshape_as flatten unflatten squeeze unsqueeze ravel")
_EXPANSIONS = _names("expand expand_as broadcast_to")
_MOVES = _names(
    "permute transpose t swapaxes swapdims movedim moveaxis adjoint chunk split tensor_split unbind narrow select"
    " getitem index_select cat concat concatenate stack hstack vstack repeat repeat_interleave tile roll flip"
    " pixel_shuffle pixel_unshuffle channel_shuffle"
)
_TRANSPOSED = _names("T mT H mH")
_REDUCTIONS = _names("mean sum amax amin max min std var norm logsumexp nanmean")
_CONVOLUTIONS = _names("conv1d conv2d conv3d")
_TRANSPOSED_CONVOLUTIONS = _names("conv_transpose1d conv_transpose2d conv_transpose3d")
_POOLS = _names("interpolate upsample grid_sample local_response_norm") | {
    f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "lp") for n in (1, 2, 3)
}


class Unfollowed(Exception):
    """The net does something whose channels cannot be followed; the text says which layer, and what."""


class Written(NamedTuple):
    """Channels that one layer writes, or that one sum reads, in their order.

    Attributes:
        where: the layer's name.
        channels: their classes.
    """

    where: str
    channels: tuple[int, ...]


class Runs(NamedTuple):
    """Channels of which the first, the second, the third `unit` stay together and keep their order."""

    where: str
    channels: tuple[int, ...]
    unit: int


class Multiple(NamedTuple):
    """Channels whose number stays a multiple of `of`."""

    where: str
    channels: tuple[int, ...]
    of: int


@dataclass(frozen=True)
class Trace:
    """The classes of channels of a net.

    Attributes:
        axes: of every parameter and buffer by name, for each dimension the classes of its positions; None of a
            dimension that is no dimension of channels, or whose channels keep their number.
        written: what layers write, and what sums of products run over.
        runs: channels that go together in runs.
        multiples: channels that are counted in multiples.
        together: pairs of runs (numbers among `runs`) of which the same are kept, such as the inputs and the outputs of
            the groups of a convolution.
        heads: channels of a head by the name of the attention layer.
        grouped: names of the weights of convolutions in groups, whose second dimension counts within a group.
        normed: by the name of a norm, the classes of the channels that it counts, or of each dimension that it is over.
        classifier: names of the weights and biases whose rows are the net's outputs.
        outputs: shapes of the outputs on the two examples.
    """

    axes: Mapping[str, tuple[tuple[int, ...] | None, ...]]
    written: tuple[Written, ...]
    runs: tuple[Runs, ...]
    multiples: tuple[Multiple, ...]
    together: tuple[tuple[int, int], ...]
    heads: Mapping[str, int]
    grouped: frozenset[str]
    normed: Mapping[str, tuple[tuple[int, ...] | None, ...]]
    classifier: frozenset[str]
    outputs: tuple[Size, ...]


def trace(net: nn.Module, input_shape: tuple[int, ...]) -> Trace:
    """The classes of channels of a net, which is run once on two examples of zeros in evaluation mode.

    Raises:
        Unfollowed: a layer does something that is not known here, or fails.
    """
    tracer = _Tracer(net)
    inputs = example(net, input_shape)
    with torch.no_grad(), isolated(Key(("trace",))), mode(net, training=False), tracer.naming():
        tracer.put(inputs, torch.zeros(inputs.shape, dtype=torch.float64))
        try:
            with tracer:
                outputs = net(inputs)
        except Unfollowed:
            raise
        except Exception as error:  # in the user's own code, whatever it is
            raise tracer.unfollowed(f"fails on inputs of shape {tuple(inputs.shape)}: {explained(error)}") from error
    return tracer.found([output for output in tree_leaves(outputs) if isinstance(output, Tensor)])


def example(net: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """Two inputs of zeros; tokens, for nets that embed them."""
    tokens = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in net.modules())
    return torch.zeros(_BATCH, *input_shape, dtype=torch.int64 if tokens else None)


class _Classes:
    """Disjoint sets of labels. A class is loose until one of its labels is written or read by a layer."""

    def __init__(self) -> None:
        self._parent = [FIXED]
        self._loose = [False]

    def fresh(self, count: int, *, loose: bool = False) -> Tensor:
        """New labels, each a class of its own, (count,)."""
        start = len(self._parent)
        self._parent += range(start, start + count)
        self._loose += [loose] * count
        return torch.arange(start, start + count, dtype=torch.float64)

    def of(self, label: int) -> int:
        """The class of a label."""
        parent = self._parent
        while parent[label] != label:
            parent[label] = label = parent[parent[label]]
        return label

    def tie(self, first: Tensor, second: Tensor) -> None:
        """Say of labels of one shape that they are the same pairwise; those of no channel are passed over."""
        if first.data_ptr() == second.data_ptr() and first.shape == second.shape and first.stride() == second.stride():
            return
        pairs = torch.stack([first.reshape(-1), second.reshape(-1)])
        pairs = pairs[:, (pairs >= 0).all(0) & (pairs[0] != pairs[1])]
        for a, b in torch.unique(pairs, dim=1).T.long().tolist() if pairs.numel() else ():
            x, y = sorted((self.of(a), self.of(b)))
            self._parent[y] = x
            self._loose[x] = self._loose[x] and self._loose[y]

    def are_one(self, labels: Tensor) -> bool:
        """Whether all labels are of one class."""
        return len({self.of(int(x)) if x >= 0 else _NONE for x in labels.unique().tolist()}) == 1

    def roots(self, labels: Tensor) -> Tensor:
        """The class of each label; -1 where there is no channel, or a loose one."""
        labels, places = torch.unique(labels, return_inverse=True)
        found = [self.of(int(x)) if x >= 0 else _NONE for x in labels.tolist()]
        return torch.tensor([_NONE if x >= 0 and self._loose[x] else x for x in found])[places]


class _Tracer(TorchFunctionMode):
    """Labels everything that flows through a net."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self._net = net
        self._path: list[str] = []
        self._classes = _Classes()
        self._labels: dict[int, tuple[Tensor, Tensor]] = {}
        self._names: dict[int, str] = {}
        for name, tensor in net.state_dict(keep_vars=True).items():
            self._names.setdefault(id(tensor), name)
        self._axes: dict[str, dict[int, Tensor]] = {}
        self._elements: dict[str, Tensor] = {}
        self._written: list[tuple[str, Tensor]] = []
        self._runs: list[tuple[str, Tensor, int]] = []
        self._multiples: list[tuple[str, Tensor, int]] = []
        self._together: list[tuple[int, int]] = []
        self._heads: dict[str, int] = {}
        self._grouped: set[str] = set()
        self._normed: dict[str, list[Tensor]] = {}

    # Labels

    def put(self, tensor: Tensor, label: Tensor) -> None:
        """Label a tensor, element by element."""
        if label.shape != tensor.shape:
            raise self.unfollowed("gives an output of a shape that was not expected")
        self._labels[id(tensor)] = (tensor, label)

    def label(self, tensor: Tensor) -> Tensor:
        """The label of each element."""
        if id(tensor) in self._labels:
            return self._labels[id(tensor)][1]
        name = self._names.get(id(tensor))
        if name is None or not tensor.is_floating_point():
            return torch.full((), float(_NONE), dtype=torch.float64).expand(tensor.shape)
        if name in self._axes:
            raise self.unfollowed(f"computes with {name}, which a layer has as its weight")
        if name not in self._elements:
            self._elements[name] = self._classes.fresh(tensor.numel(), loose=True).reshape(tensor.shape)
        return self._elements[name]

    def fix(self, label: Tensor) -> None:
        """Say that these channels keep their number."""
        thin = _thin(label)
        self._classes.tie(thin, torch.zeros_like(thin))

    def unfollowed(self, what: str) -> Unfollowed:
        """The answer that names the layer which is running."""
        layer = self._path[-1] if self._path else ""
        kind = type(self._net.get_submodule(layer)).__name__
        return Unfollowed(f"layer {layer} ({kind}) {what}" if layer else f"{kind}.forward {what}")

    @contextmanager
    def naming(self) -> Generator[None]:
        """Inside the block it is known which layer is running."""
        handles: list[Any] = []

        for name, module in self._net.named_modules():
            handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
            handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, layer: nn.Module, inputs: Any) -> None:
        self._path.append(name)

    def _leave(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._path.pop()

    # Operations

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = _name_of(func)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(self._is_labelled(x) for x in given):
            return out
        if name == "setitem":
            raise self.unfollowed("writes into a part of a tensor")
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if outputs:
            self._follow(name, func, out, outputs, args, kwargs, given)
        return out

    def _is_labelled(self, tensor: Tensor) -> bool:
        return id(tensor) in self._labels or (id(tensor) in self._names and tensor.is_floating_point())

    def _follow(
        self,
        name: str,
        func: Callable[..., Any],
        out: Any,
        outputs: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
    ) -> None:
        """Label what an operation has given."""
        rule: Callable[..., None] | None = getattr(self, f"_on_{name}", None)
        if rule is not None:
            rule(out, *args, **kwargs)
        elif name in _CONVOLUTIONS:
            self._convolution(out, *args, **kwargs)
        elif name in _TRANSPOSED_CONVOLUTIONS:
            self._transposed_convolution(out, *args, **kwargs)
        elif name in _ALIKE:
            self.put(out, self._merged(out, [self.label(x) for x in given]))
        elif name in _RESHAPES:
            self.put(out, self.label(given[0]).reshape(out.shape))
        elif name in _EXPANSIONS:
            self.put(out, self.label(given[0]).expand(out.shape))
        elif name in _TRANSPOSED:
            self.put(out, getattr(self.label(given[0]), name))
        elif name in _MOVES:
            first = args[0]
            moved = self.label(first) if isinstance(first, Tensor) else [self.label(x) for x in first]
            for output, label in zip(outputs, tree_leaves(func(moved, *args[1:], **kwargs)), strict=True):
                self.put(output, label)
        elif name in _REDUCTIONS:
            for output in outputs:
                self.put(output, self._reduced(output, *args, **kwargs))
        elif name in _POOLS:
            for output in outputs:
                self._each_channel(output, args[0])
        elif all(bool((_thin(self.label(x)) == FIXED).all()) for x in given):
            for output in outputs:
                self.put(output, torch.zeros((), dtype=torch.float64).expand(output.shape))
        else:
            raise self.unfollowed(f"calls {name}, through which channels are not followed")

    def _merged(self, out: Tensor, labels: Sequence[Tensor]) -> Tensor:
        """The label of what is computed from these element by element."""
        whole = [label for label in labels if label.shape == out.shape]
        merged = torch.full((), float(_NONE), dtype=torch.float64)
        for label in labels:
            # One value for several channels, such as a mask over positions, is none of them.
            if whole and label.shape != out.shape and self._classes.are_one(_thin(label)):
                continue
            first, second = torch.broadcast_tensors(merged, _thin(label))
            self._classes.tie(first, second)
            merged = torch.where(first >= 0, first, second)
        return merged.expand(out.shape)

    def _row(self, label: Tensor, dim: int) -> Tensor:
        """The channels along a dimension, which are the same at all positions of the others."""
        size, rows = label.shape[dim], _thin(label).movedim(dim, 0).flatten(1) if label.dim() > 1 else label[:, None]
        best = rows.amax(1, keepdim=True)
        self._classes.tie(best.expand_as(rows).contiguous(), rows)
        return best[:, 0].expand(size).contiguous()

    def _read(self, tensor: Tensor, dim: int) -> Tensor:
        """The channels along a dimension, as a layer reads them; those of none keep their number."""
        row = self._row(self.label(tensor), dim)
        return torch.where(self._classes.roots(row) == _NONE, torch.zeros_like(row), row)

    def _weight(self, tensor: Tensor) -> str:
        name = self._names.get(id(tensor))
        if name is None:
            raise self.unfollowed("has a weight that is computed and not a parameter of its own")
        if name in self._elements:
            raise self.unfollowed(f"has the weight {name}, with which the net also computes")
        return name

    def _ties(self, tensor: Tensor | None, dim: int, channels: Tensor) -> None:
        """Say which channels a dimension of a parameter or buffer has."""
        if tensor is not None:
            known = self._axes.setdefault(self._weight(tensor), {}).setdefault(dim, channels)
            if known.shape != channels.shape:
                raise self.unfollowed("reads another number of channels than before")
            self._classes.tie(known, channels)

    def _writes(self, tensor: Tensor, dim: int) -> Tensor:
        """The channels that a layer writes by this dimension of its weight."""
        known = self._axes.setdefault(self._weight(tensor), {})
        if dim not in known:
            known[dim] = self._classes.fresh(tensor.shape[dim])
            self._written.append((self._weight(tensor).rpartition(".")[0], known[dim]))
        return known[dim]

    def _along(self, out: Tensor, dim: int, channels: Tensor) -> None:
        """Label an output whose channels lie along a dimension."""
        shape = [1] * out.dim()
        shape[dim] = -1
        self.put(out, channels.reshape(shape).expand(out.shape))

    def _each_channel(self, out: Tensor, x: Tensor) -> None:
        if out.dim() < 3:
            raise self.unfollowed("pools without a dimension of examples")
        self._along(out, 1, self._row(self.label(x), 1))

    def _reduced(self, out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The label of a mean or the like: of the channel if it runs over positions, of none if over channels."""
        dims = kwargs.get("dim", kwargs.get("axis", next((a for a in args if not isinstance(a, (bool, float))), None)))
        if isinstance(dims, Tensor):  # the larger of two tensors
            return self._merged(out, [self.label(x), self.label(dims)])
        over = tuple(range(x.dim())) if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
        over = tuple(sorted(dim % x.dim() for dim in over))
        label = self.label(x)
        roots = self._classes.roots(_thin(label))
        thin = _thin(label)
        same = roots.amax(over, keepdim=True) == roots.amin(over, keepdim=True)
        kept = torch.where(same, thin.amax(over, keepdim=True), float(_NONE))
        shape = [1 if dim in over else size for dim, size in enumerate(x.shape)]
        return kept.expand(shape).reshape(out.shape)

    def _on_pad(
        self, out: Tensor, input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
    ) -> None:
        filling = float(_NONE) if mode == "constant" else None
        self.put(out, nn.functional.pad(self.label(input), list(pad), mode, filling))

    # Layers

    def _on_linear(self, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        self._ties(weight, 1, self._read(input, -1))
        channels = self._writes(weight, 0)
        self._ties(bias, 0, channels)
        self._along(out, out.dim() - 1, channels)

    def _convolution(
        self,
        out: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> None:
        read, written = self._read(input, 1), self._writes(weight, 0)
        if groups == 1:
            self._ties(weight, 1, read)
        else:
            self._grouped.add(self._weight(weight))
            self._in_groups(read, written, groups)
        self._ties(bias, 0, written)
        self._along(out, 1, written)

    def _in_groups(self, read: Tensor, written: Tensor, groups: int) -> None:
        """Of a convolution in groups whole groups are kept, so that each reads what it does in the full net."""
        if len(read) == len(written) == groups:
            self._classes.tie(read, written)
        elif bool((self._classes.roots(read) == FIXED).any()):
            self.fix(read)
            self.fix(written)
        else:
            layer = self._path[-1]
            self._together.append((len(self._runs), len(self._runs) + 1))
            self._runs += [(layer, x, len(x) // groups) for x in (read, written)]

    def _transposed_convolution(
        self,
        out: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> None:
        if groups != 1:
            raise self.unfollowed("is a transposed convolution in groups")
        self._ties(weight, 0, self._read(input, 1))
        channels = self._writes(weight, 1)
        self._ties(bias, 0, channels)
        self._along(out, 1, channels)

    def _on_embedding(self, out: Tensor, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> None:
        self._along(out, out.dim() - 1, self._writes(weight, 1))

    def _on_batch_norm(
        self,
        out: Tensor,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        channels = self._row(self.label(input), 1)
        for tensor in (running_mean, running_var, weight, bias):
            self._ties(tensor, 0, channels)
        self._normed[self._path[-1] if self._path else ""] = [channels]
        self._along(out, 1, channels)

    def _on_instance_norm(
        self,
        out: Tensor,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._on_batch_norm(out, input, running_mean, running_var, weight, bias)

    def _on_group_norm(
        self,
        out: Tensor,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> None:
        self._on_batch_norm(out, input, None, None, weight, bias)
        if num_groups > 1:
            self._multiples.append((self._path[-1] if self._path else "", self._row(self.label(input), 1), num_groups))

    def _on_layer_norm(
        self,
        out: Tensor,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> None:
        self._last_dimensions(out, input, len(normalized_shape), [weight, bias])

    def _on_rms_norm(
        self,
        out: Tensor,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> None:
        self._last_dimensions(out, input, len(normalized_shape), [weight])

    def _last_dimensions(self, out: Tensor, input: Tensor, count: int, tensors: Sequence[Tensor | None]) -> None:
        label, start = self.label(input), input.dim() - count
        rows = [self._row_or_none(label, dim) for dim in range(start, input.dim())]
        for tensor in tensors:
            for dim, row in enumerate(rows):
                self._ties(tensor, dim, row)
        self._normed[self._path[-1] if self._path else ""] = rows
        self.put(out, label)

    def _row_or_none(self, label: Tensor, dim: int) -> Tensor:
        """The channels along a dimension; none along one whose positions are of the same channels."""
        roots = self._classes.roots(_thin(label))
        if roots.shape[dim] == 1 or bool((roots.amax(dim) == roots.amin(dim)).all()):
            return torch.full((label.shape[dim],), float(_NONE), dtype=torch.float64)
        return self._row(label, dim)

    def _on_glu(self, out: Tensor, input: Tensor, dim: int = -1) -> None:
        first, second = self.label(input).chunk(2, dim)
        self._classes.tie(first.contiguous(), second.contiguous())
        self.put(out, first)

    def _on_prelu(self, out: Tensor, input: Tensor, weight: Tensor) -> None:
        if weight.numel() > 1:
            self._ties(weight, 0, self._row(self.label(input), 1))
        self.put(out, self.label(input))

    # Products and attention

    def _on_matmul(self, out: Tensor, input: Tensor, other: Tensor) -> None:
        if min(input.dim(), other.dim()) < 2 or self._is_parameter(input) or self._is_parameter(other):
            raise self.unfollowed("multiplies by a matrix of its own; expected an nn.Linear or an nn.Conv")
        self.put(out, self._product(out, self.label(input), self.label(other)))

    _on_bmm = _on_matmul

    def _on_rmatmul(self, out: Tensor, other: Tensor, input: Tensor) -> None:
        self._on_matmul(out, input, other)

    def _is_parameter(self, tensor: Tensor) -> bool:
        return id(tensor) in self._names

    def _product(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The label of a product (..., m, k) @ (..., k, n)."""
        batch = out.shape[:-2]
        a, b = (x.expand(*batch, *x.shape[-2:]) for x in (a, b))
        if self._varies(a, -1) or self._varies(b, -2) or (a.shape[-1] == 1 and self._are_channels(a, b)):
            left, right = self._one_per(a, -2), self._one_per(b, -1)  # (..., k)
            self._classes.tie(left.contiguous(), right.contiguous())
            for side, other in ((left, right), (right, left)):
                self.fix(torch.where(self._classes.roots(other) == _NONE, side, float(_NONE)))
            self._sums_over(left)
            return torch.full((), float(_NONE), dtype=torch.float64).expand(out.shape)
        rows, columns = self._one_per(a, -1), self._one_per(b, -2)  # (..., m), (..., n)
        if self._varies(a, -2) and self._varies(b, -1):
            raise self.unfollowed("multiplies the channels of two tensors with one another")
        if self._varies(a, -2):
            self._sums_over(rows)
            return rows[..., None].expand(out.shape)
        self._sums_over(columns)
        return columns[..., None, :].expand(out.shape)

    def _varies(self, label: Tensor, dim: int) -> bool:
        """Whether positions along a dimension are of different channels."""
        thin = _thin(label)
        if thin.shape[dim] == 1:
            return False
        roots = self._classes.roots(thin)
        return bool((roots.amax(dim) != roots.amin(dim)).any())

    def _are_channels(self, *labels: Tensor) -> bool:
        return all(bool((self._classes.roots(_thin(label)) != _NONE).all()) for label in labels)

    def _one_per(self, label: Tensor, dim: int) -> Tensor:
        """The label without a dimension, along which all are of one channel."""
        whole = label.amax(dim, keepdim=True)
        self._classes.tie(*(x.contiguous() for x in torch.broadcast_tensors(_thin(whole), _thin(label))))
        return whole.squeeze(dim)

    def _sums_over(self, label: Tensor) -> None:
        """Channels (..., k) that stay in the row, the head for instance, that they are in."""
        if not self._varies(label, -1) and label.shape[-1] > 1:
            return
        rows = torch.unique(_thin(label).expand(*_thin(label).shape[:-1], label.shape[-1]).flatten(0, -2), dim=0)
        if len(rows) > 1 and bool((rows >= 0).all()):
            self._written += [(self._path[-1] if self._path else "", row) for row in rows]

    def _on_scaled_dot_product_attention(
        self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        scores = out.new_empty(*out.shape[:-1], key.shape[-2])
        self.put(scores, self._product(scores, self.label(query), self.label(key).mT))
        self.put(out, self._product(out, self.label(scores), self.label(value)))

    def _on_multi_head_attention_forward(
        self,
        out: tuple[Tensor, Tensor | None],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        **kwargs: Any,
    ) -> None:
        """Whole heads are kept. What comes in, the heads, and what goes out have the same number of channels."""
        layer, size = self._path[-1], embed_dim_to_check // num_heads
        first = layer not in self._heads
        self._heads[layer] = size
        reads = [self._read(x, -1) for x in (query, key, value)]
        separate = [kwargs.get(f"{kind}_proj_weight") for kind in "qkv"]
        inner = self._heads_of(in_proj_weight if in_proj_weight is not None else separate[0], embed_dim_to_check)
        for weight, read in zip([in_proj_weight] if in_proj_weight is not None else separate, reads, strict=False):
            self._ties(weight, 1, read)
        if in_proj_weight is not None:
            for read in reads[1:]:
                self._classes.tie(reads[0], read)
            self._ties(in_proj_weight, 0, inner.repeat(3))
        else:
            for weight in separate:
                self._ties(weight, 0, inner)
        self._ties(in_proj_bias, 0, inner.repeat(3))
        for bias in (bias_k, bias_v):
            self._ties(bias, 2, inner)
        self._ties(out_proj_weight, 1, inner)
        outer = self._writes(out_proj_weight, 0)
        self._ties(out_proj_bias, 0, outer)
        self._along(out[0], out[0].dim() - 1, outer)
        if first:
            self._runs.append((layer, inner, size))
            self._multiples += [(layer, channels, size) for channels in (reads[0], outer)]
        if bool((self._classes.roots(torch.cat([reads[0], outer])) == FIXED).any()):
            self.fix(torch.cat([reads[0], inner, outer]))
        if out[1] is not None:
            self.put(out[1], torch.full((), float(_NONE), dtype=torch.float64).expand(out[1].shape))

    def _heads_of(self, weight: Tensor | None, width: int) -> Tensor:
        """The channels of all heads of an attention layer."""
        assert weight is not None
        known = self._axes.get(self._weight(weight), {})
        if 0 in known:
            return known[0][:width]
        channels = self._classes.fresh(width)
        self._written.append((self._path[-1], channels))
        return channels

    # What was found

    def found(self, outputs: Sequence[Tensor]) -> Trace:
        """All of it, with classes in place of labels."""
        classifier = self._rows_of(outputs)
        for output in outputs:
            self.fix(self.label(output))
        state = self._net.state_dict(keep_vars=True)
        axes = {name: self._axes_of(self._names[id(tensor)], tensor) for name, tensor in state.items()}
        return Trace(
            axes,
            tuple(Written(where, self._tuple(x)) for where, x in self._written),
            tuple(Runs(where, self._tuple(x), unit) for where, x, unit in self._runs),
            tuple(Multiple(where, self._tuple(x), of) for where, x, of in self._multiples),
            tuple(self._together),
            dict(self._heads),
            frozenset(name for name, tensor in state.items() if self._names[id(tensor)] in self._grouped),
            {name: self._rows(rows) for name, rows in self._normed.items()},
            frozenset(name for name, tensor in state.items() if self._names[id(tensor)] in classifier),
            tuple(output.shape for output in outputs),
        )

    def _rows_of(self, outputs: Sequence[Tensor]) -> set[str]:
        """Weights and biases whose first dimension has the channels of the outputs, by their first names."""
        classes = {x for output in outputs for x in self._classes.roots(_thin(self.label(output))).flatten().tolist()}
        classes -= {FIXED, _NONE}
        first = {name: axes[0] for name, axes in self._axes.items() if 0 in axes}
        return {name for name, row in first.items() if classes.issuperset(self._classes.roots(row).tolist())}

    def _axes_of(self, name: str, tensor: Tensor) -> tuple[tuple[int, ...] | None, ...]:
        if name in self._axes:
            return self._rows([self._axes[name].get(dim) for dim in range(tensor.dim())])
        if name in self._elements:
            return self._separated(name, self._classes.roots(self._elements[name]))
        return (None,) * tensor.dim()

    def _separated(self, name: str, roots: Tensor) -> tuple[tuple[int, ...] | None, ...]:
        """Of a tensor that is labelled element by element, the dimension along which its channels lie."""
        varying = [dim for dim in range(roots.dim()) if bool((roots.amax(dim) != roots.amin(dim)).any())]
        if len(varying) > 1:
            raise Unfollowed(f"{name} has different channels along several of its dimensions")
        found: list[tuple[int, ...] | None] = [None] * roots.dim()
        for dim in varying:
            row = roots.movedim(dim, 0).flatten(1)[:, 0] if roots.dim() > 1 else roots
            if bool((row != FIXED).any()):
                found[dim] = tuple(max(x, FIXED) for x in row.tolist())
        return tuple(found)

    def _tuple(self, row: Tensor) -> tuple[int, ...]:
        return tuple(max(x, FIXED) for x in self._classes.roots(row).tolist())

    def _rows(self, rows: Sequence[Tensor | None]) -> tuple[tuple[int, ...] | None, ...]:
        """The classes of each row; None for a row that keeps its number."""
        found = [None if row is None else self._tuple(row) for row in rows]
        return tuple(None if row is None or set(row) == {FIXED} else row for row in found)


def _name_of(func: Callable[..., Any]) -> str:
    """An operation's name, without the underscores of methods in place and of operators."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        name = getattr(cast(Any, func).__self__, "__name__", name)
    return name.strip("_")


def _thin(label: Tensor) -> Tensor:
    """A label without the repetitions that it has along expanded dimensions, which become of size 1."""
    for dim in range(label.dim()):
        if label.stride(dim) == 0 and label.shape[dim] > 1:
            label = label.narrow(dim, 0, 1)
    return label
