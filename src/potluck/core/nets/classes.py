"""Networks with outputs for some of the federation's classes alone, which stand beside networks with all of them.

A client that knows dogs, owls and foxes has three outputs. To everyone who calls it, its network still puts out a
logit for each class of the federation, in the federation's order: that of a class it does not have is minus infinity,
which is probability zero. So labels mean the same everywhere, and a number for a class stands at the place of that
class, whoever has it.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.weights import tensors_of

N = TypeVar("N", bound=nn.Module)

_RECORD = "_potluck_classes"
"""The attribute of a network that says which classes its outputs are for. It is no module, parameter or buffer."""


@dataclass(frozen=True)
class OwnClasses:
    """The classes that a network's outputs are for.

    Attributes:
        numbers: the federation's number of each output's class, in the order of the outputs.
        width: how many classes the federation has.
    """

    numbers: tuple[int, ...]
    width: int

    def __post_init__(self) -> None:
        known = all(0 <= number < self.width for number in self.numbers)
        if not self.numbers or not known or len(set(self.numbers)) < len(self.numbers):
            raise ConfigError(
                f"own classes: found {self.numbers}; expected different numbers, at least one, from 0 to"
                f" {self.width - 1}"
            )

    def __str__(self) -> str:
        return ",".join(_ranges(self.numbers))

    def spread(self, outputs: Tensor) -> Tensor:
        """Own outputs (..., own) as those of all classes (..., classes), minus infinity for classes of others.

        A loss that asks something of the others, and so has a gradient in them, gives NaN instead of nonsense.
        """
        nothing: Tensor = _Nothing.apply(outputs)
        places = torch.full((self.width,), len(self.numbers))
        places[list(self.numbers)] = torch.arange(len(self.numbers))
        return torch.cat([outputs, nothing], -1).index_select(-1, places.to(outputs.device))

    def rows_of(self, tensor: Tensor, axis: int) -> Tensor:
        """Of a tensor of all classes, what belongs to these, in their order."""
        return tensor.index_select(axis, torch.tensor(self.numbers, device=tensor.device))

    @property
    def lacking(self) -> Tensor:
        """Which of the federation's classes are not among these, bool (classes,)."""
        others = torch.ones(self.width, dtype=torch.bool)
        others[list(self.numbers)] = False
        return others

    def only(self, numbers: Tensor) -> Tensor:
        """Numbers (rows, classes), minus infinity for the classes that are not among these."""
        return numbers.masked_fill(self.lacking, -torch.inf)


class _Nothing(torch.autograd.Function):
    """The output for a class that a network does not have, (..., 1) of outputs (..., own)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(outputs: Tensor) -> Tensor:
        """Minus infinity."""
        return torch.full_like(outputs[..., :1], -torch.inf)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep how many outputs there are."""
        ctx.own = inputs[0].shape[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Zero, or NaN where a loss depends on what is not there."""
        (gradient,) = gradients
        asked = torch.where(gradient == 0, 0.0, torch.nan).to(gradient)
        return asked.expand(*gradient.shape[:-1], ctx.own)


def _ranges(numbers: tuple[int, ...]) -> list[str]:
    """Numbers as text, runs of three and more as `first-last`."""
    found, left = list[str](), list(numbers)
    while left:
        run = 1
        while run < len(left) and left[run] == left[0] + run:
            run += 1
        found += [f"{left[0]}-{left[run - 1]}"] if run > 2 else [str(number) for number in left[:run]]
        del left[:run]
    return found


@dataclass(frozen=True, eq=False)
class OwnHead:
    """The builder of an architecture's networks with outputs for some classes alone.

    Attributes:
        builder: makes a network with that many outputs.
        base: the name of the architecture with all classes, whose other tensors begin alike.
        classes: of the outputs.
        axes: by name, the axis along which a tensor has the classes; names that are absent have none.
    """

    builder: Callable[..., nn.Module]
    base: str
    classes: OwnClasses
    axes: Mapping[str, int]

    def __call__(self, **options: Any) -> nn.Module:
        """A new network of the builder's."""
        return self.builder(**options)

    def part_of(self, weights: Mapping[str, Tensor], named: Callable[[str], str] = str) -> dict[str, Tensor]:
        """Of the tensors of a network with all classes, those of this one; `named` makes their names in it."""
        axes = {name: self.axes.get(named(name)) for name in weights}
        rows = self.classes.rows_of
        return {n: tensor if (axis := axes[n]) is None else rows(tensor, axis) for n, tensor in weights.items()}


def axes_of_classes(net: nn.Module, wider: nn.Module, classes: int) -> dict[str, int]:
    """By name, the axis along which a network's tensors have the classes.

    Args:
        net: with outputs for all classes.
        wider: the same with one more output.
        classes: how many there are.

    Raises:
        ConfigError: a tensor's shape depends on the number of classes, and not as one of which a class is a row.
    """
    found, more = dict[str, int](), {name: tensor.shape for name, tensor in tensors_of(wider).items()}
    for name, tensor in tensors_of(net).items():
        pairs = list(zip(tensor.shape, more.get(name, tensor.shape), strict=False))
        differing = [axis for axis, (size, other) in enumerate(pairs) if size != other]
        if not differing:
            continue
        if len(differing) > 1 or pairs[differing[0]] != (classes, classes + 1):
            raise ConfigError(
                f"{name} has shape {tuple(tensor.shape)} for {classes} classes and {tuple(more[name])} for"
                f" {classes + 1}; expected a row for each class, so that clients may have some of the classes"
            )
        found[name] = differing[0]
    return found


class _Spreading:
    """The last forward hook of a network with classes of its own."""

    def __init__(self, classes: OwnClasses) -> None:
        self.classes = classes

    def __call__(self, net: nn.Module, args: Any, outputs: Any) -> Any:
        """All classes' outputs; what is not one output a class is left as it is, and refused elsewhere."""
        fits = isinstance(outputs, Tensor) and outputs.dim() and outputs.shape[-1] == len(self.classes.numbers)
        return self.classes.spread(outputs) if fits else outputs

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Spreading":
        return self


def with_classes(net: N, classes: OwnClasses) -> N:
    """A network of own outputs, which from now on puts out those of all classes; its tensors keep their names."""
    net.register_forward_hook(_Spreading(classes))
    setattr(net, _RECORD, classes)
    return net


def alone(net: N) -> N:
    """The network of own outputs that `with_classes` was given, as its owner deploys it."""
    for key, hook in list(net._forward_hooks.items()):
        if isinstance(hook, _Spreading):
            del net._forward_hooks[key]
    vars(net).pop(_RECORD, None)
    return net


def own_classes_of(net: nn.Module) -> OwnClasses | None:
    """The classes of a network's outputs; None if it has all of the federation's."""
    return getattr(net, _RECORD, None)


def spread_outputs(net: nn.Module, outputs: Tensor) -> Tensor:
    """What a network's last part has put out by itself, as the network would put it out."""
    own = own_classes_of(net)
    return outputs if own is None else own.spread(outputs)


@contextmanager
def own_outputs(net: nn.Module) -> Generator[None]:
    """Inside the block, a network puts out what its author wrote: outputs of its own classes alone."""
    hooks = net._forward_hooks
    kept = {key: hook for key, hook in hooks.items() if isinstance(hook, _Spreading)}
    try:
        for key in kept:
            del hooks[key]
        yield
    finally:
        hooks.update(kept)
