"""A user's class or function that builds a network, in the form that the model zoo's functions have."""

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, cast

from torch import nn

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import InputShape

_FACTS = ("num_classes", "input_shape")
_HANDED_OVER = (*_FACTS, "scale", "vocab_size", "pad_token_id")  # the last two where inputs are texts


def called_by_name(model: Callable[..., Any], name: str) -> Callable[..., nn.Module]:
    """The builder `build(num_classes, input_shape, *, scale, <options>)` that calls a user's class or function.

    It hands over the number of classes, the shape of an input and the scale, those that the user's own takes by these
    names. All other arguments are options.

    Args:
        model: the class or function.
        name: its name in messages.

    Raises:
        ConfigError: it is a network already; or, when it builds, an option without a default has no value.
    """
    if isinstance(model, nn.Module):
        raise ConfigError(
            f"models: {name} is a network; expected the class or a function that builds one, since every client has its"
            " own: such as lambda: copy.deepcopy(net)"
        )
    taken = _named_arguments(model)
    options = [one for one in taken if one.name not in _FACTS]
    facts = [fact for fact in _FACTS if fact in {one.name for one in taken}]

    def build(num_classes: int, input_shape: InputShape, **given: Any) -> nn.Module:
        if lacking := [one.name for one in options if one.default is one.empty and one.name not in {"scale", *given}]:
            table = f"{{name = '{name}', {lacking[0]} = ...}}"
            raise lacks(name, lacking[0], f"give it a default, or its value in a table: {table}")
        known = {"num_classes": num_classes, "input_shape": input_shape}
        return cast(nn.Module, model(**{fact: known[fact] for fact in facts}, **given))

    types_of = model.__init__ if isinstance(model, type) else model
    functools.update_wrapper(build, types_of, updated=())
    build.__doc__, build.__name__ = model.__doc__, name
    positions = [Parameter(fact, Parameter.POSITIONAL_OR_KEYWORD) for fact in _FACTS]
    vars(build)["__signature__"] = inspect.Signature(
        [*positions, *(one.replace(kind=Parameter.KEYWORD_ONLY) for one in options)]
    )
    return build


def lacks(name: str, argument: str, advice: str) -> ConfigError:
    """The refusal of a model whose argument has no value."""
    expected = "expected none but num_classes and input_shape, by these names"
    return ConfigError(f"models: {name} needs an argument {argument}; {expected}; {advice}")


def lacking_values(build: Callable[..., nn.Module]) -> list[str]:
    """The names of those options of a builder that have no default."""
    options = inspect.signature(build).parameters.values()
    return [
        one.name
        for one in options
        if one.kind is one.KEYWORD_ONLY and one.default is one.empty and one.name not in _HANDED_OVER
    ]


def _named_arguments(model: Callable[..., Any]) -> list[Parameter]:
    """All arguments but the collecting ones, `*args` and `**kwargs`; none of what is written in C."""
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
