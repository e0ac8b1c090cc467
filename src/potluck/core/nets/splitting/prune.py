"""A net with some of its tensors alone, which runs by its own `forward` wherever it reads no others."""

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn


def pruned(net: nn.Module, names: Collection[str]) -> nn.Module:
    """A copy of a net that has these of its parameters and buffers, which it shares with it, and no others.

    Where another one was stands a tensor without numbers, since a `forward` may name it before the part that is run.

    Args:
        net: stays as it is.
        names: as the state dict has them; a tensor of several names is kept by any of them.
    """
    named = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    kept = {id(tensor) for name, tensor in named if name in names}
    memo: dict[int, Any] = {}
    for _, tensor in named:
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor if id(tensor) in kept else torch.empty_like(tensor.detach(), device="meta")
    absent = {id(memo[id(tensor)]) for _, tensor in named if id(tensor) not in kept}
    found = copy.deepcopy(net, memo)
    for module in found.modules():
        for held in (module._parameters, module._buffers):
            for name in [name for name, tensor in held.items() if id(tensor) in absent]:
                module.__dict__[name] = _dropped(module, held, name)
    return found


def _dropped(module: nn.Module, held: dict[str, Any], name: str) -> Tensor:
    module._non_persistent_buffers_set.discard(name)
    return held.pop(name)
