"""Algebra on weights: dicts of tensors by state-dict name, matched by name and shape and never by position.

Functions never change their arguments; what they leave as it is they may return as it is. Means are accumulated in
the order given, so a fixed order of clients gives the same bits every time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Size, Tensor, nn

Weights = dict[str, Tensor]


def weights_of(net: nn.Module) -> Weights:
    """A copy of all parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def parameters_of(net: nn.Module) -> Weights:
    """A copy of the trainable tensors only."""
    return {name: tensor.detach().clone() for name, tensor in net.named_parameters(remove_duplicate=False)}


def buffers_of(net: nn.Module) -> Weights:
    """A copy of what is kept but not trained, such as BatchNorm's running statistics."""
    trained = {name for name, _ in net.named_parameters(remove_duplicate=False)}
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items() if name not in trained}


def outline(net: nn.Module, input_shape: tuple[int, ...] = ()) -> Weights:
    """Names, shapes and types of all parameters and buffers, without their values (on the "meta" device)."""
    return {name: tensor.detach().to("meta") for name, tensor in net.state_dict().items()}


def load(net: nn.Module, weights: Mapping[str, Tensor], *, partial: bool = False) -> nn.Module:
    """Copy `weights` into `net` and return it; with `partial` the tensors that are not named stay.

    Raises:
        ValueError: a name is missing (unless `partial`), unknown, or has another shape.
    """
    own = net.state_dict()
    problems = [f"{name} is not in the model" for name in weights if name not in own]
    if not partial:
        problems += [f"{name} is missing" for name in own if name not in weights]
    for name, tensor in weights.items():
        if name in own and own[name].shape != tensor.shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, the model {tuple(own[name].shape)}")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"weights do not fit {type(net).__name__}: {'; '.join(problems[:3])}{more}")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
    return net


def zeros_like(weights: Mapping[str, Tensor]) -> Weights:
    """Zeros of the same names, shapes and types."""
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def plus(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float = 1.0) -> Weights:
    """A + scale * b; names that `b` lacks keep the value of `a`."""
    return {name: tensor + scale * b[name] if name in b else tensor.clone() for name, tensor in a.items()}


def minus(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Weights:
    """A - b, name by name."""
    return {name: tensor - b[name] for name, tensor in a.items()}


def pick(weights: Mapping[str, Tensor], shapes: Mapping[str, Size]) -> Weights:
    """The tensors that a model with these shapes owns, matched by name and shape."""
    return {name: tensor for name, tensor in weights.items() if name in shapes and shapes[name] == tensor.shape}


def mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The mean weighted by `shares`, which need not sum to one. Integer tensors (counters) give their maximum.

    One tensor comes back bit for bit: its share is exactly 1.
    """
    if not tensors[0].is_floating_point():
        return torch.stack(list(tensors)).amax(0)
    whole = sum(shares)
    total = tensors[0] * (shares[0] / whole)
    for tensor, share in zip(tensors[1:], shares[1:], strict=True):
        total.add_(tensor, alpha=share / whole)
    return total


def mean_where_present(
    owned: Sequence[Mapping[str, Tensor]], shares: Sequence[float], keep: Mapping[str, Tensor]
) -> Weights:
    """Layer by layer, the mean over the clients that own the layer; layers nobody owns keep their value.

    This is the layer-wise aggregation of FedIN's revision, eq. 19 (with equal shares) and, among clients
    of one architecture, FedAvg.

    Raises:
        ValueError: two clients have a layer of the same name in different shapes.
    """
    holders: dict[str, list[int]] = {}
    for index, weights in enumerate(owned):
        for name in weights:
            holders.setdefault(name, []).append(index)
    merged: Weights = dict(keep)
    for name, indices in holders.items():
        tensors = [owned[index][name] for index in indices]
        check_same_shapes(name, [tensor.shape for tensor in [*tensors, keep.get(name, tensors[0])]])
        merged[name] = mean(tensors, [shares[index] for index in indices])
    return merged


def check_same_shapes(name: str, shapes: Sequence[Size]) -> None:
    """Refuse to average a layer that has several shapes.

    Raises:
        ValueError: it has; with advice.
    """
    if len(set(shapes)) > 1:
        found = " and ".join(sorted({str(tuple(shape)) for shape in shapes}))
        raise ValueError(
            f"layer {name} has the shapes {found} at different clients; layers are averaged by name, so use"
            " models of one nested family, or average within architectures: sharing.scope = 'architecture'"
        )


def cut(weights: Mapping[str, Tensor], shapes: Mapping[str, Size]) -> Weights:
    """The leading slice of each tensor that fits a narrower model with these shapes (HeteroFL, eq. 1)."""
    return {name: weights[name][_leading(shape)].clone() for name, shape in shapes.items() if name in weights}


def mean_where_covered(
    slices: Sequence[Mapping[str, Tensor]],
    keep: Mapping[str, Tensor],
    rows: Callable[[int, str], Tensor | None] = lambda index, name: None,
) -> Weights:
    """Element by element, the mean over the leading slices that cover the element; others keep their value.

    Integer tensors (counters) give the maximum of the slices.

    Args:
        slices: one dict a client, each tensor a leading slice of the one in `keep`.
        keep: the full tensors before the round.
        rows: for client `index` and a tensor's name, a boolean mask over the slice's first dimension that
            limits what the client covers, or None for the whole slice.
    """
    merged: Weights = {}
    for name, old in keep.items():
        if not old.is_floating_point():
            merged[name] = mean([weights[name] for weights in slices], [1.0] * len(slices)) if slices else old
            continue
        total, count = torch.zeros_like(old), torch.zeros_like(old)
        for index, weights in enumerate(slices):
            mine, mask = weights[name], rows(index, name)
            at = _leading(mine.shape)
            covered = torch.ones_like(mine, dtype=torch.bool)
            if mask is not None:
                covered &= mask.view(-1, *[1] * (mine.dim() - 1))
            total[at] += torch.where(covered, mine, 0.0)
            count[at] += covered
        merged[name] = torch.where(count > 0, total / count.clamp(min=1), old)
    return merged


def without_conflict(
    gradients: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    granularity: Literal["tensor", "whole", "kernel"] = "tensor",
) -> Weights:
    """The nearest gradients to `gradients` whose inner product with `others` is not negative.

    With a = <o, o> and b = <o, g>: g where b >= 0, otherwise g - (b / a) o, the Euclidean projection on the half
    space (FedIN, eq. 13). Where o vanishes, g stays.

    Args:
        gradients: what to project, by name.
        others: what not to oppose, of the same names and shapes.
        granularity: inner products over each "tensor", over the "whole" of all, or over each convolution "kernel".
    """
    if granularity == "whole":
        a = torch.stack([other.square().sum() for other in others.values()]).sum()
        b = torch.stack([(other * gradients[name]).sum() for name, other in others.items()]).sum()
        return {name: _projected(gradients[name], other, a, b) for name, other in others.items()}
    projected: Weights = {}
    for name, other in others.items():
        axes = (-2, -1) if granularity == "kernel" and other.dim() == 4 else tuple(range(other.dim()))
        a = other.square().sum(axes, keepdim=True)
        b = (other * gradients[name]).sum(axes, keepdim=True)
        projected[name] = _projected(gradients[name], other, a, b)
    return projected


def _projected(gradient: Tensor, other: Tensor, a: Tensor, b: Tensor) -> Tensor:
    conflict = (b < 0) & (a > 0)
    return torch.where(conflict, gradient - b / torch.where(a > 0, a, 1.0) * other, gradient)


def _leading(shape: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)
