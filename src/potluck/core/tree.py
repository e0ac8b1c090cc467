"""Trees of tensors and plain values as bytes: safetensors for the numbers, JSON for the shape of the tree.

Nothing here can run code on arrival: there is no pickle, and what does not fit the format is a WireError.
"""

import json
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from potluck.core.errors import WireError

Tree = Any  # Tensor | int | float | bool | str | None | list | tuple | dict with str or int keys, nested
_HEADER = "potluck"
_PLAIN = (str, bool, int, float)
_MALFORMED = (ValueError, TypeError, AttributeError, RuntimeError)  # what false headers and skeletons run into
_CARRIED = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
}


def pack(tree: Tree) -> bytes:
    """The tree as one safetensors file whose metadata holds its skeleton.

    Equal trees, dicts in the same order of keys, give equal bytes. Tensors are copied, so nothing is shared with
    the result.

    Raises:
        WireError: a leaf is neither a tensor nor a plain value.
    """
    tensors: list[Tensor] = []
    skeleton = json.dumps(_skeleton(tree, tensors, "tree"))
    named = {str(index): tensor for index, tensor in enumerate(_independent(tensors))}
    return safetensors.torch.save(named, metadata={_HEADER: skeleton})


def unpack(data: bytes) -> Tree:
    """The tree that `pack` wrote.

    Raises:
        WireError: the bytes are damaged or were not written by `pack`.
    """
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        return _grown(json.loads(header["__metadata__"][_HEADER]), tensors)
    except (safetensors.SafetensorError, ArithmeticError, LookupError, *_MALFORMED) as error:
        raise WireError(f"not a Potluck message: {error}; expected safetensors written by potluck") from error


def _skeleton(node: Tree, tensors: list[Tensor], where: str) -> Any:
    """The tree with every tensor replaced by its position in `tensors`; one-key objects name each node's kind."""
    if isinstance(node, Tensor):
        tensors.append(_portable(node, where))
        return {"tensor": len(tensors) - 1}
    if node is None or isinstance(node, _PLAIN):
        return {"value": node}
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, (str, int)):
                raise WireError(f"{where} has the key {key!r}; expected text or an integer")
        return {"dict": [[key, _skeleton(child, tensors, f"{where}.{key}")] for key, child in node.items()]}
    if isinstance(node, (list, tuple)):
        kind = "list" if isinstance(node, list) else "tuple"
        return {kind: [_skeleton(child, tensors, f"{where}[{i}]") for i, child in enumerate(node)]}
    raise WireError(
        f"{where} is a {type(node).__name__}; expected tensors, numbers, text, None, or dicts and lists of them"
    )


def _portable(tensor: Tensor, where: str) -> Tensor:
    """A dense tensor in memory of a type that safetensors carries."""
    if tensor.layout != torch.strided or tensor.is_meta:
        raise WireError(f"{where} is a {tensor.layout} tensor on {tensor.device}; expected a dense one with values")
    if tensor.dtype not in _CARRIED:
        raise WireError(f"{where} is a {tensor.dtype} tensor, which cannot cross the wire; convert it, say to float32")
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def _grown(node: Any, tensors: dict[str, Tensor]) -> Tree:
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[str(content)]
    if kind == "value":
        return content
    if kind == "dict":
        return {key: _grown(child, tensors) for key, child in content}
    if kind in ("list", "tuple"):
        children = [_grown(child, tensors) for child in content]
        return children if kind == "list" else tuple(children)
    raise WireError(f"unknown node {kind!r} in a message")


def _independent(tensors: list[Tensor]) -> list[Tensor]:
    """The same values in tensors that own their whole memory, as safetensors demands."""
    seen: set[int] = set()
    owned: list[Tensor] = []
    for tensor in tensors:
        shared = tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in seen
        tensor = torch.clone(tensor) if shared else tensor
        seen.add(tensor.data_ptr())
        owned.append(tensor)
    return owned
