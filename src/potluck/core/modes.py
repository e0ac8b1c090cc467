"""Training and evaluation mode, and how many threads torch has: set for a while and put back."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from potluck.core.errors import ConfigError


def held_layers(net: nn.Module) -> list[nn.Module]:
    """The layers that stay in evaluation mode while `net` is trained: those in it although the net is not.

    A net that is in evaluation mode as a whole, as libraries hand out pre-trained ones, says nothing of its layers.
    """
    return [module for module in net.modules() if not module.training] if net.training else []


def to_training(net: nn.Module) -> nn.Module:
    """Put the net in training mode, its `held_layers` apart, and return it."""
    _train(net, [(module, module.training) for module in net.modules()])
    return net


@contextmanager
def mode(net: nn.Module, *, training: bool) -> Generator[None]:
    """Inside the block `net` is in one mode, in training mode without its `held_layers`; afterwards as it was."""
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
_counts: list[tuple[int, int]] = []  # of each block that is being run: Python's thread, and torch's threads


@contextmanager
def threads(count: int) -> Generator[None]:
    """So many torch threads inside the block; results differ in their last bits with the number.

    Torch has one number for all of a process in part, so blocks of several Python threads must agree; it is put back
    when the last of them ends.

    Raises:
        ConfigError: another thread is in a block with another number.
    """
    mine = (threading.get_ident(), count)
    with _lock:
        for thread, other in _counts:
            if thread != mine[0] and other != count:
                raise ConfigError(
                    f"run.threads: found {count}, but a run in another thread of this process computes with {other};"
                    " play one after the other, or in processes of their own"
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
