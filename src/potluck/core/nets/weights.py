"""Algebra on weights: dicts of tensors by state-dict name, matched by name and shape, never by position.

Functions never change their arguments; tensors that they do not modify may be returned without copying. Means are
accumulated in the order given, so a fixed order of clients gives the same bits every time.

Frozen tensors are part of the architecture: parameters that a net's builder leaves without `requires_grad`, and the
buffers of layers that it leaves in evaluation mode. They are never trained, sent, averaged or stored; every module of
an architecture has them as the builder made them.

A tensor that a net has in several places, because its layers share a weight or one layer is registered under two names,
is one tensor: it goes by the first of its names, is sent, counted and averaged once, and is loaded into all its places.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Size, Tensor, nn

from potluck.core.ground.inputs import InputShape
from potluck.core.nets.modes import held_layers

Weights = dict[str, Tensor]
Combine = Callable[[Sequence[Tensor], Sequence[float]], Tensor]
"""Combines the tensors of several clients, given their shares, into one."""


def tensors_of(net: nn.Module) -> Weights:
    """The parameters and buffers themselves, as the state dict names them, each once: by the first of its names."""
    first = {id(parameter): name for name, parameter in net.named_parameters()}
    state: Weights = net.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


def weights_of(net: nn.Module) -> Weights:
    """A copy of all parameters and buffers, frozen ones included."""
    return {name: tensor.detach().clone() for name, tensor in tensors_of(net).items()}


def learnt_of(net: nn.Module) -> Weights:
    """A copy of all parameters and buffers that are not frozen."""
    frozen = frozen_names(net)
    return {name: tensor.detach().clone() for name, tensor in tensors_of(net).items() if name not in frozen}


def parameters_of(net: nn.Module) -> Weights:
    """A copy of the trained parameters."""
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters() if parameter.requires_grad}


def buffers_of(net: nn.Module) -> Weights:
    """A copy of the buffers, such as BatchNorm's running statistics, except frozen ones."""
    parameters = {name for name, _ in net.named_parameters()}
    buffers = {name: tensor for name, tensor in tensors_of(net).items() if name not in parameters}
    frozen = frozen_names(net) if buffers else frozenset[str]()
    return {name: tensor.detach().clone() for name, tensor in buffers.items() if name not in frozen}


def frozen_of(net: nn.Module) -> Weights:
    """A copy of the frozen parameters and buffers."""
    if not (frozen := frozen_names(net)):
        return {}
    return {name: tensor.detach().clone() for name, tensor in tensors_of(net).items() if name in frozen}


def frozen_names(net: nn.Module) -> frozenset[str]:
    """Names of the frozen parameters and buffers."""
    if not _has_frozen(net):  # collecting names takes longer than this test
        return frozenset()
    names = {name for name, parameter in net.named_parameters() if not parameter.requires_grad}
    if held := {id(buffer) for layer in held_layers(net) for buffer in layer.buffers(recurse=False)}:
        names |= {name for name, tensor in tensors_of(net).items() if id(tensor) in held}
    return frozenset(names)


def _has_frozen(net: nn.Module) -> bool:
    layers = list(net.modules())
    held = net.training and any(not layer.training for layer in layers)
    return held or any(p is not None and not p.requires_grad for layer in layers for p in layer._parameters.values())


def outline(net: nn.Module, input_shape: InputShape = ()) -> Weights:
    """Names, shapes and types of the tensors that are not frozen, without values (on the "meta" device)."""
    frozen = frozen_names(net)
    return {name: tensor.detach().to("meta") for name, tensor in tensors_of(net).items() if name not in frozen}


def layout(net: nn.Module, input_shape: InputShape = ()) -> dict[str, tuple[Size, bool]]:
    """Of each parameter and buffer by name, the shape, and whether it is frozen."""
    frozen = frozen_names(net)
    return {name: (tensor.shape, name in frozen) for name, tensor in tensors_of(net).items()}


def load(net: nn.Module, weights: Mapping[str, Tensor], *, partial: bool = False) -> nn.Module:
    """Copy `weights` into `net` and return it; with `partial`, missing tensors stay as they are; frozen ones always do.

    A tensor of several names may come under any of them, and under several if the values are equal.

    Raises:
        ValueError: a name is missing (unless `partial` or frozen), unknown, or has another shape, or two names of one
            tensor have different values.
    """
    own: Weights = net.state_dict(keep_vars=True)
    problems = [f"{name} is not in the model" for name in weights if name not in own]
    if not partial:
        given = {id(own[name]) for name in weights if name in own}
        missing = [name for name, tensor in tensors_of(net).items() if id(tensor) not in given]
        frozen = frozen_names(net) if missing else frozenset[str]()
        problems += [f"{name} is missing" for name in missing if name not in frozen]
    first: dict[int, Tensor] = {}
    for name, tensor in [(name, tensor) for name, tensor in weights.items() if name in own]:
        if own[name].shape != tensor.shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, the model {tuple(own[name].shape)}")
        elif (other := first.setdefault(id(own[name]), tensor)) is not tensor and _differ(tensor, other):
            problems.append(f"{name} has another value than a name of the same tensor")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"weights do not fit {type(net).__name__}: {'; '.join(problems[:3])}{more}")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
    return net


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(one.nan_to_num(), other.nan_to_num())


def zeros_like(weights: Mapping[str, Tensor]) -> Weights:
    """Zeros of the same names, shapes and types."""
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def plus(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float = 1.0) -> Weights:
    """`a + scale * b`; names that `b` lacks keep the value of `a`."""
    return {name: tensor + scale * b[name] if name in b else tensor.clone() for name, tensor in a.items()}


def minus(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Weights:
    """`a - b`, name by name."""
    return {name: tensor - b[name] for name, tensor in a.items()}


def pick(weights: Mapping[str, Tensor], shapes: Mapping[str, Size]) -> Weights:
    """The tensors that a model with these shapes owns, matched by name and shape.

    Raises:
        TypeError: a shape is a tensor, which would match nothing.
    """
    for name, shape in shapes.items():
        if isinstance(shape, Tensor):
            raise TypeError(f"pick: found a tensor as the shape of {name!r}; expected its shape: tensor.shape")
    return {name: tensor for name, tensor in weights.items() if name in shapes and shapes[name] == tensor.shape}


def in_common(mine: Mapping[str, Size], theirs: Mapping[str, Size]) -> frozenset[str]:
    """The names of the tensors that two networks have in common: those of layers that both have.

    They have a layer, what one module has itself, if its tensors of one name have one shape, its weight among them: a
    bias alone, or a table that is cut, is none.

    Args:
        mine: shapes by name, of one.
        theirs: of the other.
    """
    layers = _by_module(mine), _by_module(theirs)
    found = set[str]()
    for module in layers[0].keys() & layers[1].keys():
        own, other = (layer[module] for layer in layers)
        both = own.keys() & other.keys()
        axes = max(len(shape) for shape in (*own.values(), *other.values()))
        if all(own[name] == other[name] for name in both) and any(len(own[name]) == axes for name in both):
            found |= both
    return frozenset(found)


def _by_module(shapes: Mapping[str, Size]) -> dict[str, dict[str, Size]]:
    found: dict[str, dict[str, Size]] = {}
    for name, shape in shapes.items():
        found.setdefault(name.rpartition(".")[0], {})[name] = shape
    return found


def mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The mean weighted by `shares`, which need not sum to one. Integer tensors (counters) give their maximum.

    Equal tensors give their value bit for bit.
    """
    running = RunningMean()
    for tensor, share in zip(tensors, shares, strict=True):
        running.add(tensor, share)
    return running.value()


class RunningMean:
    """The running weighted mean of tensors of one shape, none of which it holds.

    Attributes:
        weight: the sum of the shares.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._mean: Tensor | None = None

    @property
    def shape(self) -> Size | None:
        """The mean so far; None before the first tensor."""
        return None if self._mean is None else self._mean.shape

    def add(self, tensor: Tensor, share: float = 1.0) -> None:
        """Add a tensor; a share of 0 leaves it out unless it is the first. Integers give the maximum."""
        self.weight += share
        if self._mean is None:
            self._mean = tensor.clone()
        elif not tensor.is_floating_point():
            torch.maximum(self._mean, tensor, out=self._mean)
        elif share:
            self._mean.lerp_(tensor, share / self.weight)

    def value(self) -> Tensor:
        """The mean so far.

        Raises:
            ValueError: there is nothing to average.
        """
        if self._mean is None:
            raise ValueError("mean of no tensors")
        return self._mean


def mean_where_present(
    owned: Sequence[Mapping[str, Tensor]],
    shares: Sequence[float],
    keep: Mapping[str, Tensor],
    combine: Combine = mean,
) -> Weights:
    """Layer by layer, the mean over the clients that own the layer; layers that no client owns keep their value.

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
        merged[name] = combine(tensors, [shares[index] for index in indices])
    return merged


def check_same_shapes(name: str, shapes: Sequence[Size]) -> None:
    """Check that a layer has one shape at all clients.

    Raises:
        ValueError: it has several; the message advises.
    """
    if len(set(shapes)) > 1:
        found = " and ".join(sorted({str(tuple(shape)) for shape in shapes}))
        raise ValueError(
            f"layer {name} has the shapes {found} at different clients; layers are averaged by name, so use"
            " models of one nested family, or average within architectures: sharing.scope = 'architecture'"
        )
