"""Products of matrices and attention: what they sum over, and which heads stay whole.

A rule is given the labels, the output, and the arguments of the operation of the same name.
"""

from typing import Any

import torch
from torch import Tensor

from potluck.core.nets.tracing.found import FIXED
from potluck.core.nets.tracing.labels import NO_LABELS, NONE, TensorLabels, thin


def _matmul(labels: TensorLabels, out: Tensor, input: Tensor, other: Tensor) -> None:
    if min(input.dim(), other.dim()) < 2 or labels.is_parameter(input) or labels.is_parameter(other):
        raise labels.unfollowed("multiplies by a matrix of its own; expected an nn.Linear or an nn.Conv")
    labels.put(out, _product(labels, out, labels.of(input), labels.of(other)))


def _rmatmul(labels: TensorLabels, out: Tensor, other: Tensor, input: Tensor) -> None:
    _matmul(labels, out, input, other)


def _product(labels: TensorLabels, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The label of a product (..., m, k) @ (..., k, n)."""
    batch = out.shape[:-2]
    a, b = (x.expand(*batch, *x.shape[-2:]) for x in (a, b))
    if labels.varies(a, -1) or labels.varies(b, -2) or (a.shape[-1] == 1 and _are_channels(labels, a, b)):
        left, right = _one_per(labels, a, -2), _one_per(labels, b, -1)  # (..., k)
        labels.classes.tie(left.contiguous(), right.contiguous())
        for side, other in ((left, right), (right, left)):
            labels.fix(torch.where(labels.classes.roots(other) == NONE, side, float(NONE)))
        _sums_over(labels, left)
        return NO_LABELS.expand(out.shape)
    rows, columns = _one_per(labels, a, -1), _one_per(labels, b, -2)  # (..., m), (..., n)
    if labels.varies(a, -2) and labels.varies(b, -1):
        raise labels.unfollowed("multiplies the channels of two tensors with one another")
    if labels.varies(a, -2):
        _sums_over(labels, rows)
        return rows[..., None].expand(out.shape)
    _sums_over(labels, columns)
    return columns[..., None, :].expand(out.shape)


def _one_per(labels: TensorLabels, label: Tensor, dim: int) -> Tensor:
    """The label without a dimension, along which all are of one channel."""
    whole = label.amax(dim, keepdim=True)
    labels.classes.tie(*(x.contiguous() for x in torch.broadcast_tensors(thin(whole), thin(label))))
    return whole.squeeze(dim)


def _sums_over(labels: TensorLabels, label: Tensor) -> None:
    """Channels (..., k) that stay in the row, the head for instance, that they are in."""
    if not labels.varies(label, -1) and label.shape[-1] > 1:
        return
    rows = torch.unique(thin(label).expand(*thin(label).shape[:-1], label.shape[-1]).flatten(0, -2), dim=0)
    if len(rows) > 1 and bool((rows >= 0).all()):
        labels.written += [(labels.layer, row) for row in rows]


def _scaled_dot_product_attention(
    labels: TensorLabels, out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> None:
    scores = out.new_empty(*out.shape[:-1], key.shape[-2])
    labels.put(scores, _product(labels, scores, labels.of(query), labels.of(key).mT))
    labels.put(out, _product(labels, out, labels.of(scores), labels.of(value)))


def _multi_head_attention_forward(
    labels: TensorLabels,
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
    layer, size = labels.layer, embed_dim_to_check // num_heads
    first = layer not in labels.heads
    labels.heads[layer] = size
    reads = [labels.read(x, -1) for x in (query, key, value)]
    separate = [kwargs.get(f"{kind}_proj_weight") for kind in "qkv"]
    inner = _heads_of(labels, in_proj_weight if in_proj_weight is not None else separate[0], embed_dim_to_check)
    for weight, read in zip([in_proj_weight] if in_proj_weight is not None else separate, reads, strict=False):
        labels.ties(weight, 1, read)
    if in_proj_weight is not None:
        for read in reads[1:]:
            labels.classes.tie(reads[0], read)
        labels.ties(in_proj_weight, 0, inner.repeat(3))
    else:
        for weight in separate:
            labels.ties(weight, 0, inner)
    labels.ties(in_proj_bias, 0, inner.repeat(3))
    for bias in (bias_k, bias_v):
        labels.ties(bias, 2, inner)
    labels.ties(out_proj_weight, 1, inner)
    outer = labels.writes(out_proj_weight, 0)
    labels.ties(out_proj_bias, 0, outer)
    labels.along(out[0], out[0].dim() - 1, outer)
    if first:
        labels.runs.append((layer, inner, size))
        labels.multiples += [(layer, channels, size) for channels in (reads[0], outer)]
    if bool((labels.classes.roots(torch.cat([reads[0], outer])) == FIXED).any()):
        labels.fix(torch.cat([reads[0], inner, outer]))
    if out[1] is not None:
        labels.put(out[1], NO_LABELS.expand(out[1].shape))


def _heads_of(labels: TensorLabels, weight: Tensor | None, width: int) -> Tensor:
    """The channels of all heads of an attention layer."""
    assert weight is not None
    known = labels.axes.get(labels.weight_name(weight), {})
    if 0 in known:
        return known[0][:width]
    channels = labels.classes.fresh(width)
    labels.written.append((labels.layer, channels))
    return channels


def _are_channels(labels: TensorLabels, *them: Tensor) -> bool:
    return all(bool((labels.classes.roots(thin(label)) != NONE).all()) for label in them)


RULES = {
    "matmul": _matmul,
    "bmm": _matmul,
    "rmatmul": _rmatmul,
    "scaled_dot_product_attention": _scaled_dot_product_attention,
    "multi_head_attention_forward": _multi_head_attention_forward,
}
