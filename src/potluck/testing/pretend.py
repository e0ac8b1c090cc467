"""A pretend accelerator, simulated by the CPU, so that placement can be tested without a GPU.

Inside `PretendDevice()`, tensors can be moved to the device "pretend". The CPU computes with them, so results have the
CPU's bits; an operation on tensors of two devices raises as on a GPU; and copies to the CPU are counted. Draws on the
device, such as Dropout's, come from the CPU's generator. Torch looks for devices at a process's first backward pass:
call `register` before it, where a test module is imported for instance.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretend"
_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default, _aten.copy.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}
_READS = {_aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.equal.default, _aten.nonzero.default}


def can_pretend() -> bool:
    """Whether this version of torch lets Python add a device."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


@dataclass
class Counted:
    """The counts inside a block.

    Attributes:
        to_host: copies from the device to CPU memory, and numbers read from it.
        computed: other operations on the device.
    """

    to_host: int = 0
    computed: int = 0


class PretendDevice(TorchDispatchMode):
    """Inside the block the device "pretend" exists; `counted` counts its operations."""

    def __init__(self) -> None:
        super().__init__()
        register()
        self.counted = Counted()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out one operation."""
        return _carried_out(func, args, kwargs or {}, self.counted)


class _OnDevice(Tensor):
    """A tensor that claims to be on the device; `raw` is the CPU tensor that computes for it."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(cls: "type[_OnDevice]", raw: Tensor) -> "_OnDevice":
        return Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, 0),
            requires_grad=raw.requires_grad,
        )

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carried_out(func, args, kwargs or {}, Counted())


def register() -> None:
    """Add the device to torch, once in a process."""
    try:
        torch.device(NAME)
    except RuntimeError:
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        module = getattr(torch, NAME)
        module.get_rng_state, module.set_rng_state = _no_state, _set_no_state  # which torch asks for


def _no_state(device: Any = None) -> Tensor:
    return torch.empty(0)


def _set_no_state(state: Tensor, device: Any = None) -> None:
    """Nothing to set."""


def _carried_out(func: Any, args: Any, kwargs: Mapping[str, Any], counted: Counted) -> Any:
    _check_devices(func, args, kwargs)
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    from_device = any(isinstance(tensor, _OnDevice) for tensor in given)
    to_device, plain = _target(func, args, kwargs, from_device)
    if from_device and (func in _READS or (func in _COPIES and not to_device)):
        counted.to_host += 1
    elif from_device:
        counted.computed += 1
    raw_args, raw_kwargs = tree_map(_raw, (args, plain))
    result = func(*raw_args, **raw_kwargs)
    if not to_device:
        return result
    wrapped = tree_map(_wrapped, result)
    return return_and_correct_aliasing(func, args, dict(kwargs), wrapped)


def _target(func: Any, args: Any, kwargs: Mapping[str, Any], from_device: bool) -> tuple[bool, dict[str, Any]]:
    """Whether the result is on the device, and the options with which the CPU computes it."""
    plain = dict(kwargs)
    if plain.get("device") is not None:
        named = torch.device(plain["device"]).type == NAME
        plain["device"] = torch.device("cpu")
        return named, plain
    if func in _COPIES and func is not _aten._to_copy.default:
        return isinstance(args[0], _OnDevice), plain
    return from_device, plain


def _check_devices(func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse tensors of two devices, as a GPU would, except in copies, as indices, and numbers as tensors."""
    if func in _COPIES or (func in _INDEXED and isinstance(args[0], _OnDevice)):
        return
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if len({isinstance(tensor, _OnDevice) for tensor in tensors}) > 1:
        raise RuntimeError(f"{func}: expected all tensors on the same device, found {NAME} and cpu")


def _wrapped(leaf: Any) -> Any:
    return _OnDevice(leaf) if isinstance(leaf, Tensor) else leaf


def _raw(leaf: Any) -> Any:
    return leaf.raw if isinstance(leaf, _OnDevice) else leaf
