"""Trees of tensors and plain values as bytes: safetensors for the numbers, JSON for the shape of the tree.

Reading runs no code: there is no pickle, and anything that does not fit the format is a WireError. Input is untrusted,
so it must be exactly what `pack` writes, and within the limits below.
"""

import json
import math
import warnings
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from potluck.core.ground.errors import WireError

PackedTree = Any  # Tensor | int | float | bool | str | None | list | tuple | dict with str or int keys, nested
_HEADER = "potluck"
_PLAIN = (str, bool, int, float)

DEEPEST = 64
"""The deepest nesting of dicts and lists. Methods nest four deep; Python's recursion limit is some hundreds."""

MOST_NODES = 2**20
"""The most leaves, dicts and lists of one tree; a model of a thousand layers has some thousand. Each becomes several
hundred bytes of Python objects, so this bounds the memory that a small message can take."""

LONGEST_HEADER = 2**26
"""The most bytes of the skeleton with names, shapes and offsets of the tensors: 64 MiB, some sixty bytes a node."""

LONGEST_TEXT = 2**22
"""The most characters of one text. The longest that Potluck writes describes how a network is built: some ten
thousand."""

_LONGEST_INTEGER = 2**12  # bits; Python refuses to read integers of more than 4,300 digits
_NAMED = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_CARRIED = frozenset(_NAMED.values())


def pack(tree: PackedTree) -> bytes:
    """The tree as one safetensors file whose metadata holds its skeleton.

    Equal trees, dicts in the same order of keys, give equal bytes. Tensors are copied, so nothing is shared with
    the result.

    Raises:
        WireError: a leaf is neither a tensor nor a plain value, or the tree is larger than `unpack` reads.
    """
    tensors: list[Tensor] = []
    skeleton = json.dumps(_skeleton(tree, tensors, "tree", DEEPEST))
    named = {str(index): tensor for index, tensor in enumerate(_independent(tensors))}
    return safetensors.torch.save(named, metadata={_HEADER: skeleton})


def unpack(data: bytes, *, views: bool = False) -> PackedTree:
    """The tree that `pack` wrote.

    Args:
        data: the bytes.
        views: whether the tensors share the memory of `data`, which halves the memory of a large tree. Then `data` must
            have no other reader, since changing a tensor changes the bytes.

    Raises:
        WireError: the bytes are damaged, were not written by `pack`, or claim more than the limits allow.
    """
    try:
        header = _header(data)
        tensors = _views(data) if views else safetensors.torch.load(data)
        return _Growing(tensors).tree(json.loads(header))
    except Exception as error:  # our own errors, and those that malformed headers raise in three libraries
        reason = " ".join(str(error).split())[:200]
        raise WireError(f"not a Potluck message: {reason}; expected safetensors written by potluck") from error


def _header(data: bytes) -> str:
    """The skeleton, as JSON."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= min(len(data) - 8, LONGEST_HEADER):
        raise WireError(f"a header of {length} bytes in {len(data)} bytes; at most {LONGEST_HEADER} are read")
    text = data[8 : 8 + length]
    if (nodes := text.count(b"{") + text.count(b"[")) > 4 * MOST_NODES:  # three or four brackets a node
        raise WireError(f"{nodes} brackets in its header; at most {4 * MOST_NODES} are read")
    found = json.loads(text)["__metadata__"][_HEADER]
    if not isinstance(found, str):
        raise WireError("its skeleton is no text")
    return found


def _views(data: bytes) -> dict[str, Tensor]:
    """The tensors as views of `data`, in which the safetensors format puts them side by side without a gap."""
    length = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(data[8 : 8 + length])
    del found["__metadata__"]
    start, at, tensors = 8 + length, 0, dict[str, Tensor]()
    with warnings.catch_warnings():  # about tensors in read-only bytes, which have no other reader
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        for name, entry in sorted(found.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = _NAMED[entry["dtype"]], [_whole(size) for size in entry["shape"]]
            begin, end = (_whole(offset) for offset in entry["data_offsets"])
            count, what = math.prod(shape), f"tensor {name[:40]} of shape {str(shape)[:40]}"
            if min(shape, default=0) < 0 or begin != at or end - begin != count * dtype.itemsize:
                raise WireError(f"{what} at {begin} to {end}, not from {at} on")
            if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:  # empty, with such strides
                raise WireError(f"{what}, whose strides overflow")
            if count and (start + at) % dtype.itemsize:
                raise WireError(f"{what} lies at no multiple of its {dtype.itemsize} bytes")
            flat = torch.frombuffer(data, dtype=dtype, count=count, offset=start + at) if count else torch.empty(0)
            tensors[name], at = flat.to(dtype).view(shape), end
    if start + at != len(data):
        raise WireError(f"{len(data) - start - at} bytes behind the last tensor")
    return tensors


def _whole(value: Any) -> int:
    """A whole number; `true` and `false` are none, though Python takes them for such."""
    if type(value) is not int:
        raise WireError(f"a {type(value).__name__} in its header where a whole number belongs")
    return value


def _skeleton(node: PackedTree, tensors: list[Tensor], where: str, deeper: int) -> Any:
    """The tree with every tensor replaced by its position in `tensors`; one-key objects name each node's type.

    At most `deeper` levels may follow.
    """
    if isinstance(node, Tensor):
        tensors.append(_portable(node, where))
        return {"tensor": len(tensors) - 1}
    if node is None or isinstance(node, _PLAIN):
        return {"value": _writable(node, where)}
    if deeper == 0:
        raise WireError(f"{where[:80]}... lies deeper than {DEEPEST} dicts and lists")
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, (str, int)):
                raise WireError(f"{where} has the key {key!r}; expected text or an integer")
            _writable(key, f"a key of {where}")
        return {"dict": [[key, _skeleton(child, tensors, f"{where}.{key}", deeper - 1)] for key, child in node.items()]}
    if isinstance(node, (list, tuple)):
        kind = "list" if isinstance(node, list) else "tuple"
        return {kind: [_skeleton(child, tensors, f"{where}[{i}]", deeper - 1) for i, child in enumerate(node)]}
    raise WireError(
        f"{where} is a {type(node).__name__}; expected tensors, numbers, text, None, or dicts and lists of them"
    )


def _portable(tensor: Tensor, where: str) -> Tensor:
    """The tensor, if it is dense, in memory, and of a type that safetensors supports."""
    if tensor.layout != torch.strided or tensor.is_meta:
        raise WireError(f"{where} is a {tensor.layout} tensor on {tensor.device}; expected a dense one with values")
    if tensor.dtype not in _CARRIED:
        raise WireError(f"{where} is a {tensor.dtype} tensor, which cannot cross the wire; convert it, say to float32")
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def can_be_written(text: str) -> bool:
    """Whether the text can be encoded; half of a surrogate pair cannot."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _writable(value: Any, where: str) -> Any:
    """The plain value, if JSON can write it and `unpack` would read it."""
    if isinstance(value, str) and (len(value) > LONGEST_TEXT or not can_be_written(value)):
        wrong = f"{len(value)} characters long" if len(value) > LONGEST_TEXT else "half of a surrogate pair"
        raise WireError(f"{where} is text that cannot cross the wire: {wrong}")
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > _LONGEST_INTEGER:
        raise WireError(f"{where} is an integer of {value.bit_length()} bits; expected at most {_LONGEST_INTEGER}")
    return value


class _Growing:
    """Builds a tree from its skeleton, which must use every tensor once, in order, as `pack` writes them.

    Otherwise two leaves could share memory, and a few bytes could become many tensors.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._used = 0
        self._nodes = 0

    def tree(self, skeleton: Any) -> PackedTree:
        """The whole of it."""
        grown = self._grown(skeleton, DEEPEST)
        if self._used != len(self._tensors):
            raise WireError(f"{len(self._tensors)} tensors, of which it uses {self._used}")
        return grown

    def _grown(self, node: Any, deeper: int) -> PackedTree:
        ((kind, content),) = node.items()
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise WireError(f"more than {MOST_NODES} nodes")
        if kind == "tensor":
            return self._tensor(content)
        if kind == "value":
            if content is not None and not isinstance(content, _PLAIN):
                raise WireError(f"a {type(content).__name__} where a message has a plain value")
            return _writable(content, "a value of a message")
        if deeper == 0:
            raise WireError(f"a message of more than {DEEPEST} dicts and lists within one another")
        if kind == "dict":
            return self._dict(content, deeper - 1)
        if kind in ("list", "tuple"):
            children = [self._grown(child, deeper - 1) for child in content]
            return children if kind == "list" else tuple(children)
        raise WireError(f"unknown node {str(kind)[:40]!r} in a message")

    def _tensor(self, place: Any) -> Tensor:
        if place != self._used or isinstance(place, bool):
            raise WireError(f"tensor {str(place)[:40]} where {self._used} comes next")
        self._used += 1
        tensor = self._tensors[str(place)]
        if tensor.dtype not in _CARRIED:
            raise WireError(f"a {tensor.dtype} tensor, which no message carries")
        return tensor

    def _dict(self, content: Any, deeper: int) -> dict[Any, PackedTree]:
        grown: dict[Any, PackedTree] = {}
        for key, child in content:
            if not isinstance(key, (str, int)) or _writable(key, "a key of a message") in grown:
                raise WireError(f"the key {str(key)[:40]!r} in a message; expected text or integers, each once")
            grown[key] = self._grown(child, deeper)
        return grown


def _independent(tensors: list[Tensor]) -> list[Tensor]:
    """The same values in tensors that own their memory, as safetensors requires."""
    seen: set[int] = set()
    owned: list[Tensor] = []
    for tensor in tensors:
        shared = tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in seen
        tensor = torch.clone(tensor) if shared else tensor
        seen.add(tensor.data_ptr())
        owned.append(tensor)
    return owned
