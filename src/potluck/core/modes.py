"""Training and evaluation mode, and how many threads torch has: set for a while and put back."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def mode(net: nn.Module, *, training: bool) -> Generator[None]:
    """Inside the block all of `net` is in one mode; afterwards each layer has its own back, frozen ones too."""
    before = [(module, module.training) for module in net.modules()]
    net.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


@contextmanager
def threads(count: int) -> Generator[None]:
    """So many torch threads inside the block; results differ in their last bits with the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
