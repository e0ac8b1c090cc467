"""Calling a net with other tensors than its own."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def call_with(net: nn.Module, weights: Mapping[str, Tensor], *inputs: Any) -> Any:
    """What `net(*inputs)` returns with these tensors in the places of its own, which it has again afterwards.

    A tensor that the net has in several places, because layers share it or a layer is registered under two names, is
    replaced in all of them. `torch.func.functional_call` alone leaves a plain tensor behind in such a layer.

    Args:
        net: is called in the mode in which it is.
        weights: parameters and buffers by name, a tensor of several names under any of them; those that are not given
            are the net's own. A buffer is changed in place where the net changes it.
        inputs: of the net.

    Raises:
        ValueError: the net has no parameter or buffer of some name.
    """
    named = dict(chain(net.named_parameters(remove_duplicate=False), net.named_buffers(remove_duplicate=False)))
    if unknown := [name for name in weights if name not in named]:
        raise ValueError(f"{unknown[0]} is not in {type(net).__name__}; expected names of its parameters and buffers")
    given: dict[int, Tensor] = {}
    for name, tensor in named.items():
        if name in weights:
            given.setdefault(id(tensor), weights[name])
    places = {
        f"{path}.{name}".lstrip("."): given[id(tensor)]
        for path, layer in net.named_modules()  # each once, so that each place is
        for name, tensor in chain(layer._parameters.items(), layer._buffers.items())
        if id(tensor) in given
    }
    before = dict(places)
    outputs = functional_call(net, places, inputs, tie_weights=False)
    for place, tensor in before.items():
        if places[place] is not tensor:  # the net has put another there
            tensor.copy_(places[place])
    return outputs
