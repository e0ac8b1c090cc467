"""Devices: the CPU, or an accelerator.

Handlers and messages know nothing of devices: their tensors are in CPU memory. For each fit and each evaluation the
engine moves networks, extras and batches to the device, and networks and reports back, so that data are copied to the
CPU once a request and not once a step.
"""

import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import by_name, each
from potluck.core.ground.rng import Key
from potluck.core.requests.examples import Examples

CPU = torch.device("cpu")
_SHARE_FOR_DATA = 0.5  # of the device's free memory, for one data set
_resident: dict[tuple[int, torch.device], Tensor] = {}


@cache  # asked for in every step
def device_named(name: str) -> torch.device:
    """The device with this name; "auto" is the accelerator that torch finds, or else the CPU.

    Raises:
        ConfigError: there is no such device on this machine.
    """
    found = _accelerator()
    if name == "auto":
        return found or CPU
    device = torch.device(name)
    if device.type != "cpu" and not _has(device):
        here = f"{found.type!r}, 'auto' or 'cpu'" if found else "'cpu' or 'auto'"
        raise ConfigError(
            f"run.computing.device: found {name!r}, which this machine, or this build of torch, does not have;"
            f" expected {here}"
        )
    return device


def description(device: torch.device) -> str:
    """The device's name, with its model where torch knows it."""
    module: Any = getattr(torch, device.type, None)
    if device.type == "cpu" or not hasattr(module, "get_device_name"):
        return str(device)
    return f"{device} ({module.get_device_name(device)})"


@contextmanager
def placed(device: torch.device, *nets: nn.Module) -> Generator[None]:
    """Have the networks on the device inside the block, and in CPU memory afterwards."""
    if device == CPU:
        yield
        return
    try:
        for net in nets:
            net.to(device)
        yield
    finally:
        for net in nets:
            net.to(CPU)


@contextmanager
def drawing_on(device: torch.device, key: Key) -> Generator[None]:
    """Seed the device's own generator, from which Dropout draws, inside the block, and restore its state afterwards."""
    module: Any = getattr(torch, device.type, None)
    seeds = device != CPU and hasattr(module, "get_rng_state") and hasattr(module, "manual_seed")
    with torch.random.fork_rng([device], device_type=device.type) if seeds else nullcontext():
        if seeds:
            module.manual_seed(key.seed)
        yield


def moved(tree: Any, device: torch.device) -> Any:
    """A tree of mappings, lists and tuples with its tensors on the device; networks in it are for `placed`."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, Mapping):
        return {key: moved(child, device) for key, child in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(moved(child, device) for child in tree))
    return type(tree)(moved(child, device) for child in tree) if isinstance(tree, (list, tuple)) else tree


def networks_in(tree: Any) -> Iterator[nn.Module]:
    """The networks among a tree's leaves."""
    if isinstance(tree, nn.Module):
        yield tree
    elif isinstance(tree, Mapping):
        for child in tree.values():
            yield from networks_in(child)
    elif isinstance(tree, (list, tuple)):
        for child in tree:
            yield from networks_in(child)


def resident(examples: Examples, device: torch.device) -> Examples:
    """The examples with their tensors on the device, if they fit beside the networks.

    A tensor is moved once for all clients that share it, and is freed on the device with its original. A preprocessing
    with `on_host` reads its inputs in CPU memory.
    """
    stored = by_name(examples.inputs).values()
    if device == CPU or getattr(examples.preprocess, "on_host", False) or not _fit(stored, device):
        return examples
    columns = {name: _copy_of(tensor, device) for name, tensor in examples.columns.items()}
    inputs = each(examples.inputs, lambda tensor: _copy_of(tensor, device))
    return replace(examples, inputs=inputs, targets=_copy_of(examples.targets, device), columns=columns)


def _copy_of(tensor: Tensor, device: torch.device) -> Tensor:
    key = id(tensor), device
    if key not in _resident:
        _resident[key] = tensor.to(device)
        weakref.finalize(tensor, _resident.pop, key, None)
    return _resident[key]


def _fit(tensors: Iterable[Tensor], device: torch.device) -> bool:
    """Whether tensors are on the device already, or take at most `_SHARE_FOR_DATA` of the memory free there."""
    module: Any = getattr(torch, device.type, None)
    needed = sum(tensor.nbytes for tensor in tensors if (id(tensor), device) not in _resident)
    if not needed or not hasattr(module, "mem_get_info"):
        return True
    free, _ = module.mem_get_info(device)
    return needed <= _SHARE_FOR_DATA * free


def _accelerator() -> torch.device | None:
    """The type of accelerator that torch finds on this machine."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _has(device: torch.device) -> bool:
    """Whether tensors can be put there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):  # raised by builds without support for the device
        return False
    return True
