"""Operations on elements: those that compute one by one, move or repeat them, or reduce over a dimension."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from potluck.core.nets.tracing.found import FIXED
from potluck.core.nets.tracing.labels import NONE, TensorLabels, thin


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
_POOLS = _names("interpolate upsample grid_sample local_response_norm") | {
    f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "lp") for n in (1, 2, 3)
}


def follow(
    labels: TensorLabels,
    name: str,
    func: Callable[..., Any],
    outputs: Sequence[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Label what an operation has given.

    Raises:
        Unfollowed: it is not known here.
    """
    out, given = outputs[0], [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if name in _ALIKE:
        labels.put(out, labels.merged(out, [labels.of(x) for x in given]))
    elif name in _RESHAPES:
        labels.put(out, labels.of(given[0]).reshape(out.shape))
    elif name in _EXPANSIONS:
        labels.put(out, labels.of(given[0]).expand(out.shape))
    elif name in _TRANSPOSED:
        labels.put(out, getattr(labels.of(given[0]), name))
    elif name in _MOVES:
        first = args[0]
        moved = labels.of(first) if isinstance(first, Tensor) else [labels.of(x) for x in first]
        for output, label in zip(outputs, tree_leaves(func(moved, *args[1:], **kwargs)), strict=True):
            labels.put(output, label)
    elif name in _REDUCTIONS:
        for output in outputs:
            labels.put(output, _reduced(labels, output, *args, **kwargs))
    elif name in _POOLS:
        for output in outputs:
            _each_channel(labels, output, args[0])
    elif all(bool((thin(labels.of(x)) == FIXED).all()) for x in given):
        for output in outputs:
            labels.put(output, torch.zeros((), dtype=torch.float64).expand(output.shape))
    else:
        raise labels.unfollowed(f"calls {name}, through which channels are not followed")


def _each_channel(labels: TensorLabels, out: Tensor, x: Tensor) -> None:
    if out.dim() < 3:
        raise labels.unfollowed("pools without a dimension of examples")
    labels.along(out, 1, labels.row(labels.of(x), 1))


def _reduced(labels: TensorLabels, out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The label of a mean or the like: of the channel if it runs over positions, of none if over channels."""
    dims = kwargs.get("dim", kwargs.get("axis", next((a for a in args if not isinstance(a, (bool, float))), None)))
    if isinstance(dims, Tensor):  # the larger of two tensors
        return labels.merged(out, [labels.of(x), labels.of(dims)])
    over = tuple(range(x.dim())) if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    over = tuple(sorted(dim % x.dim() for dim in over))
    flat = thin(labels.of(x))
    roots = labels.classes.roots(flat)
    same = roots.amax(over, keepdim=True) == roots.amin(over, keepdim=True)
    kept = torch.where(same, flat.amax(over, keepdim=True), float(NONE))
    shape = [1 if dim in over else size for dim, size in enumerate(x.shape)]
    return kept.expand(shape).reshape(out.shape)


def _pad(
    labels: TensorLabels,
    out: Tensor,
    input: Tensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> None:
    filling = float(NONE) if mode == "constant" else None
    labels.put(out, nn.functional.pad(labels.of(input), list(pad), mode, filling))


RULES = {"pad": _pad}
