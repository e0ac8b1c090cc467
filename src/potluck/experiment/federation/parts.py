"""Which kind of part a user's file defines under a name."""

import inspect
from typing import Any, Literal

from torch import nn

from potluck.core.ground.discovery import own_part
from potluck.core.ground.errors import ConfigError
from potluck.core.method import Method

PartKind = Literal["method", "model", "partition", "data set", "metric"]

FORMS = (
    "a class that derives from Method, a class or function of num_classes and input_shape for a model, a function of"
    " (targets, clients, key) for a partition, of (outputs, targets) for a metric, or without arguments for data"
)


def part_of(reference: str) -> tuple[Any, PartKind]:
    """What `FILE.py:NAME` names and its kind: a method by its base, others by the arguments that they take.

    Raises:
        ConfigError: there is no such thing, or it takes the arguments of no part.
    """
    found = own_part(reference, f"one part: {FORMS}", _is_part)
    if isinstance(found, type) and issubclass(found, Method):
        return found, "method"
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found, "model"
    if isinstance(found, type):
        return found, "metric" if hasattr(found, "sums") else "partition"
    parameters = inspect.signature(found).parameters
    if "num_classes" in parameters or "input_shape" in parameters:
        return found, "model"
    taken = [
        one.name
        for one in parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty
    ]
    if len(taken) == 2:
        return found, "metric" if taken[1] == "targets" else "model"
    kinds: dict[int, PartKind] = {0: "data set", 3: "partition"}
    if len(taken) not in kinds:
        raise ConfigError(f"{reference} takes ({', '.join(taken)}); expected {FORMS}")
    return found, kinds[len(taken)]


def _is_part(value: object) -> bool:
    """Whether a value may be a part: a function, or a class with the methods of one."""
    if not isinstance(value, type):
        return inspect.isfunction(value)
    return issubclass(value, Method | nn.Module) or "__call__" in vars(value) or hasattr(value, "sums")
