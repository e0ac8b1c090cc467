"""What every network looks like from outside, whatever its author's `forward` takes and returns.

It is called with the inputs alone, and puts out one tensor. Named inputs go to those arguments of `forward` that have
their names; a `forward` with one argument, of another name, is given the mapping, or the tensor if there is but one.
Outputs with several entries, such as the `ModelOutput` of Hugging Face's transformers, are reduced to the logits.
"""

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from potluck.core.ground.errors import nearest
from potluck.core.ground.inputs import InputShape, by_name, sized, zeros

N = TypeVar("N", bound=nn.Module)


def with_entrance(net: N, input_shape: InputShape) -> N:
    """A network that can be called as others are; its tensors keep their names.

    Args:
        net: of anyone's making.
        input_shape: of one example; named inputs are handed over by name.
    """
    is_staged = hasattr(net, "split_problem")  # one of ours, whose stages are called without it, too
    reader: nn.Module = next(net.get_submodule("stages").children()) if is_staged else net
    if isinstance(input_shape, Mapping) and _by_name not in reader._forward_pre_hooks.values():
        reader.register_forward_pre_hook(_by_name, with_kwargs=True)
    if not is_staged and _logits not in net._forward_hooks.values():
        net.register_forward_hook(_logits)
    return net


def blank_inputs(net: nn.Module, input_shape: InputShape, batch: int) -> Any:
    """Inputs of zeros, (batch, ...); one tensor without a name is tokens if the net embeds."""
    if not isinstance(input_shape, Mapping) and embeds(net):
        return torch.zeros(batch, *input_shape, dtype=torch.int64)
    return sized(input_shape, batch, zeros)


def embeds(net: nn.Module) -> bool:
    """Whether a net has a table of embeddings, which is read at whole numbers."""
    return any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in net.modules())


def _by_name(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `forward`, of a mapping that is the only one."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Mapping):
        return args, kwargs
    (takes, takes_any), given = _taken(type(net)), by_name(args[0])
    known = {name: given[name] for name in takes if name in given}
    needed = [name for name, is_needed in takes.items() if is_needed and name not in known]
    if not known and takes_any and not needed:
        return (), dict(given)
    if not known and len(needed) <= 1 and takes:
        return tuple(given.values()) if len(given) == 1 else args, kwargs
    if needed:
        near = nearest(needed[0], list(given))
        raise TypeError(
            f"its forward needs an argument {needed[0]}; the inputs are called {', '.join(given)}: call one alike"
            f" (nearest: {', '.join(near)}), or give it a default"
        )
    return (), known


@lru_cache(maxsize=256)
def _taken(kind: type[nn.Module]) -> tuple[dict[str, bool], bool]:
    """The arguments of a class's `forward` by name and whether it needs each, and whether it takes any others."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    return {one.name: one.default is one.empty for one in named}, takes_any


def _logits(net: nn.Module, args: Any, outputs: Any) -> Any:
    """The logits among several outputs, or the only tensor; anything else as it is, which is refused elsewhere."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(found := getattr(outputs, "logits", None), Tensor):
        return found
    if isinstance(outputs, Mapping) and isinstance(outputs.get("logits"), Tensor):
        return outputs["logits"]
    entries = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
    if isinstance(entries, (list, tuple)) and len(entries) == 1 and isinstance(entries[0], Tensor):
        return entries[0]
    return outputs
