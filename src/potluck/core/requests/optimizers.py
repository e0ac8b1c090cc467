"""Optimisers by name: those of `torch.optim` that take dense gradients and evaluate the loss once a step."""

import inspect
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from potluck.core.ground.errors import ConfigError, nearest

_OTHERS = {
    "lbfgs": "it evaluates the loss several times a step",
    "sparseadam": "it takes sparse gradients only",
    "muon": "it takes matrices only, and networks have biases",
}
_FUSED = ("adam", "adamw", "sgd")  # these have a fused kernel for all weights on every processor


@cache
def optimizers() -> dict[str, type[Optimizer]]:
    """The classes by name; names are those in `torch.optim`, in lower case."""
    classes = [found for found in vars(torch.optim).values() if inspect.isclass(found)]
    named = {found.__name__.lower(): found for found in classes if issubclass(found, Optimizer)}
    return {name: found for name, found in sorted(named.items()) if found is not Optimizer and name not in _OTHERS}


def known_optimizer(name: str) -> str:
    """A name as in `optimizers`, which is given in any case.

    Raises:
        ConfigError: there is no such optimiser, or it cannot be used here.
    """
    lower = name.lower()
    if lower in _OTHERS:
        raise ConfigError(f"optimizer: found {name!r}, which cannot be used: {_OTHERS[lower]}; expected another")
    if lower not in optimizers():
        near = ", ".join(map(repr, nearest(lower, optimizers())))
        raise ConfigError(f"optimizer: found {name!r}, expected the name of a class in torch.optim; nearest: {near}")
    return lower


@cache
def takes(name: str, option: str) -> bool:
    """Whether an optimiser has an option of this name."""
    return option in inspect.signature(optimizers()[name]).parameters


def new_optimizer(
    name: str, weights: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
) -> Optimizer:
    """A new optimiser of these weights; options not given have torch's defaults."""
    options: dict[str, Any] = {"lr": lr}
    if takes(name, "weight_decay"):
        options["weight_decay"] = weight_decay
    if name == "sgd":
        options["momentum"] = momentum
    if name in _FUSED:
        options["fused"] = True
    return optimizers()[name](list(weights), **options)
