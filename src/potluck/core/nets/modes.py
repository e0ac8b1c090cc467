"""Training and evaluation mode, and torch's number of threads: set inside a block and restored after it."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from potluck.core.ground.errors import ConfigError


def held_layers(net: nn.Module) -> list[nn.Module]:
    """The layers that stay in evaluation mode in training: those already in it inside a net in training mode.

    A net that is in evaluation mode as a whole, as libraries hand out pre-trained ones, has none.
    """
    return [module for module in net.modules() if not module.training] if net.training else []


def to_training(net: nn.Module) -> nn.Module:
    """Put the net, except its `held_layers`, in training mode, and return it."""
    _train(net, [(module, module.training) for module in net.modules()])
    return net


@contextmanager
def mode(net: nn.Module, *, training: bool) -> Generator[None]:
    """Put `net` in one mode inside the block (`held_layers` excepted in training mode), and restore it afterwards."""
    before = [(module, module.training) for module in net.modules()]
    if training:
        _train(net, before)
    else:
        net.eval()
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


def _train(net: nn.Module, before: list[tuple[nn.Module, bool]]) -> None:
    holds = net.training
    net.train()
    for module, was in before:
        if holds and not was:
            module.training = False


_lock = threading.Lock()
_counts: list[tuple[int, int]] = []  # of each open block: Python's thread, and torch's number of threads


@contextmanager
def threads(count: int) -> Generator[None]:
    """Set torch's number of threads inside the block; the last bits of results depend on it.

    Part of this setting is shared by the whole process, so blocks in several Python threads must agree; it is restored
    when the last of them ends.

    Raises:
        ConfigError: another thread is in such a block with a different number.
    """
    mine = (threading.get_ident(), count)
    with _lock:
        for thread, other in _counts:
            if thread != mine[0] and other != count:
                raise ConfigError(
                    f"run.threads: found {count}, but a run in another thread of this process computes with {other};"
                    " run one after the other, or in separate processes"
                )
        before = torch.get_num_threads()
        _counts.append(mine)
        torch.set_num_threads(count)
    try:
        yield
    finally:
        with _lock:
            _counts.remove(mine)
            if all(thread == mine[0] for thread, _ in _counts):
                torch.set_num_threads(before)
