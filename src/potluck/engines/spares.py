"""Modules used again: building one draws weights that are overwritten at once, which takes longer than copying some."""

from collections.abc import Callable
from typing import Any

from torch import nn

from potluck.core.weights import Weights, load, weights_of

_PLAIN = (bool, int, float, str, bytes, tuple, type(None))


class Spares:
    """One live module or more of each architecture, for one client after the other.

    Args:
        build: a module of an architecture with the run's initial weights.
    """

    def __init__(self, build: Callable[[str], nn.Module]) -> None:
        self._build = build
        self._initial: dict[str, Weights] = {}
        self._looks: dict[str, object] = {}
        self._free: dict[str, list[nn.Module]] = {}

    def take(self, architecture: str, weights: Weights | None = None) -> nn.Module:
        """A module with these weights, or the run's initial ones.

        Raises:
            ValueError: the weights do not fit.
        """
        free = self._free.setdefault(architecture, [])
        if not free:
            net = self._build(architecture)
            if architecture not in self._initial:
                self._initial[architecture] = weights_of(net)
            self._looks.setdefault(architecture, _look(net))
            return net if weights is None else load(net, weights)
        return load(free.pop(), self._initial[architecture] if weights is None else weights)

    def give_back(self, architecture: str, net: nn.Module) -> None:
        """Take a module back if nothing but its weights has changed, and none of its tensors escapes `take`'s copy."""
        copied = {name for name, _ in net.named_buffers()} <= net.state_dict().keys()
        if copied and architecture in self._looks and _look(net) == self._looks[architecture]:
            self._free[architecture].append(net)


def _look(net: nn.Module) -> object:
    """What one module of an architecture has in common with another, unless somebody has changed it."""
    layers = [(name, type(layer), _settings(vars(layer))) for name, layer in net.named_modules()]
    tensors = [
        (name, tensor.shape, tensor.dtype, tensor.requires_grad, tensor.grad is None, not tensor._backward_hooks)
        for name, tensor in (*net.named_parameters(), *net.named_buffers())
    ]
    return layers, tensors


def _settings(attributes: dict[str, Any]) -> list[tuple[str, object]]:
    """Values of plain attributes, sizes of containers such as those of hooks, kinds of all others."""
    found: list[tuple[str, object]] = []
    for name, value in attributes.items():
        if isinstance(value, _PLAIN):
            found.append((name, value))
        else:
            found.append((name, (type(value), len(value)) if isinstance(value, (dict, list, set)) else type(value)))
    return found
