"""Training and evaluation mode, set for a while and put back layer by layer."""

from collections.abc import Generator
from contextlib import contextmanager

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
