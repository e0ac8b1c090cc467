"""A pool of reusable modules: constructing one initialises weights that are overwritten immediately."""

from collections.abc import Callable

from torch import nn

from potluck.core.nets.weights import Weights, frozen_of, load, weights_of

_PLAIN = (bool, int, float, str, bytes, tuple, type(None))


class ModulePool:
    """The modules of each architecture, lent to one client after the other.

    Args:
        build: builds a module of an architecture with the run's initial weights.
    """

    def __init__(self, build: Callable[[str], nn.Module]) -> None:
        self._build = build
        self._initial: dict[str, Weights] = {}
        self._frozen: dict[str, Weights] = {}
        self._looks: dict[str, list[object] | None] = {}
        self._free: dict[str, list[nn.Module]] = {}

    def take(self, architecture: str, weights: Weights | None = None) -> nn.Module:
        """A module with these weights, or the run's initial ones; frozen tensors are as built.

        Raises:
            ValueError: the weights do not fit.
        """
        free = self._free.setdefault(architecture, [])
        if not free:
            net = self._build(architecture)
            if architecture not in self._initial:
                self._initial[architecture], self._frozen[architecture] = weights_of(net), frozen_of(net)
                self._looks[architecture] = _look(net) if _all_copied(net) else None
            return net if weights is None else load(net, weights)
        if weights is None:
            return load(free.pop(), self._initial[architecture])
        return load(free.pop(), {**weights, **self._frozen[architecture]})

    def give_back(self, architecture: str, net: nn.Module) -> None:
        """Return a module to the pool if only its weights have changed, all of which `take` overwrites."""
        look = self._looks.get(architecture)
        if look is not None and _look(net) == look:
            self._free[architecture].append(net)


def _all_copied(net: nn.Module) -> bool:
    """Whether the state dict covers all tensors."""
    return {name for name, _ in net.named_buffers()} <= net.state_dict().keys()


def _look(net: nn.Module) -> list[object]:
    """A fingerprint of everything but the weights; equal for two unmodified modules of one architecture.

    Taken after every call, so it reads each layer's own dict once.
    """
    found: list[object] = []
    for name, layer in net.named_modules():
        found += [name, type(layer), *layer.__dict__, *map(_setting, layer.__dict__.values())]
        for tensor in (*layer._parameters.values(), *layer._buffers.values()):
            if tensor is not None:
                found += [tensor.shape, tensor.dtype, tensor.requires_grad, tensor.grad is None]
                found.append(not tensor._backward_hooks)
    return found


def _setting(value: object) -> object:
    """A plain value, the size of a container such as that of hooks, or the type of anything else."""
    if isinstance(value, _PLAIN):
        return value
    return (type(value), len(value)) if isinstance(value, (dict, list, set)) else type(value)
