"""Layers: which channels each reads and writes, and what that ties its weights to.

A rule is given the labels, the output, and the arguments of the operation of the same name.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from potluck.core.nets.tracing.found import FIXED
from potluck.core.nets.tracing.labels import NONE, TensorLabels, thin


def _linear(labels: TensorLabels, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    labels.ties(weight, 1, labels.read(input, -1))
    channels = labels.writes(weight, 0)
    labels.ties(bias, 0, channels)
    labels.along(out, out.dim() - 1, channels)


def _convolution(
    labels: TensorLabels,
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> None:
    read, written = labels.read(input, 1), labels.writes(weight, 0)
    if groups == 1:
        labels.ties(weight, 1, read)
    else:
        labels.grouped.add(labels.weight_name(weight))
        _in_groups(labels, read, written, groups)
    labels.ties(bias, 0, written)
    labels.along(out, 1, written)


def _in_groups(labels: TensorLabels, read: Tensor, written: Tensor, groups: int) -> None:
    """Of a convolution in groups whole groups are kept, so that each reads what it does in the full net."""
    if len(read) == len(written) == groups:
        labels.classes.tie(read, written)
    elif bool((labels.classes.roots(read) == FIXED).any()):
        labels.fix(read)
        labels.fix(written)
    else:
        layer = labels.layer
        labels.together.append((len(labels.runs), len(labels.runs) + 1))
        labels.runs += [(layer, x, len(x) // groups) for x in (read, written)]


def _transposed_convolution(
    labels: TensorLabels,
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
        raise labels.unfollowed("is a transposed convolution in groups")
    labels.ties(weight, 0, labels.read(input, 1))
    channels = labels.writes(weight, 1)
    labels.ties(bias, 0, channels)
    labels.along(out, 1, channels)


def _embedding(labels: TensorLabels, out: Tensor, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> None:
    labels.along(out, out.dim() - 1, labels.writes(weight, 1))


def _batch_norm(
    labels: TensorLabels,
    out: Tensor,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    channels = labels.row(labels.of(input), 1)
    for tensor in (running_mean, running_var, weight, bias):
        labels.ties(tensor, 0, channels)
    labels.normed[labels.layer] = [channels]
    labels.along(out, 1, channels)


def _instance_norm(
    labels: TensorLabels,
    out: Tensor,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    _batch_norm(labels, out, input, running_mean, running_var, weight, bias)


def _group_norm(
    labels: TensorLabels,
    out: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> None:
    _batch_norm(labels, out, input, None, None, weight, bias)
    if num_groups > 1:
        labels.multiples.append((labels.layer, labels.row(labels.of(input), 1), num_groups))


def _layer_norm(
    labels: TensorLabels,
    out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> None:
    _last_dimensions(labels, out, input, len(normalized_shape), [weight, bias])


def _rms_norm(
    labels: TensorLabels,
    out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> None:
    _last_dimensions(labels, out, input, len(normalized_shape), [weight])


def _last_dimensions(
    labels: TensorLabels, out: Tensor, input: Tensor, count: int, tensors: Sequence[Tensor | None]
) -> None:
    label, start = labels.of(input), input.dim() - count
    rows = [_row_or_none(labels, label, dim) for dim in range(start, input.dim())]
    for tensor in tensors:
        for dim, row in enumerate(rows):
            labels.ties(tensor, dim, row)
    labels.normed[labels.layer] = rows
    labels.put(out, label)


def _row_or_none(labels: TensorLabels, label: Tensor, dim: int) -> Tensor:
    """The channels along a dimension; none along one whose positions are of the same channels."""
    roots = labels.classes.roots(thin(label))
    if roots.shape[dim] == 1 or bool((roots.amax(dim) == roots.amin(dim)).all()):
        return torch.full((label.shape[dim],), float(NONE), dtype=torch.float64)
    return labels.row(label, dim)


def _glu(labels: TensorLabels, out: Tensor, input: Tensor, dim: int = -1) -> None:
    first, second = labels.of(input).chunk(2, dim)
    labels.classes.tie(first.contiguous(), second.contiguous())
    labels.put(out, first)


def _prelu(labels: TensorLabels, out: Tensor, input: Tensor, weight: Tensor) -> None:
    if weight.numel() > 1:
        labels.ties(weight, 0, labels.row(labels.of(input), 1))
    labels.put(out, labels.of(input))


RULES = {
    "linear": _linear,
    **{f"conv{n}d": _convolution for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _transposed_convolution for n in (1, 2, 3)},
    "embedding": _embedding,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "glu": _glu,
    "prelu": _prelu,
}
