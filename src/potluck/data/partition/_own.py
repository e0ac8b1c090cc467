"""A partition from the user's own file: a function as a scheme, and a check of what it returns."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import field, is_dataclass, make_dataclass
from typing import Any, get_type_hints

import torch
from torch import Tensor

from potluck.core.ground.errors import ConfigError, DataError, PotluckError, explained
from potluck.core.ground.fields import Checked
from potluck.core.ground.rng import Key

Division = Callable[..., Sequence[Any]]


def of_function(function: Division, name: str) -> type[Any]:
    """A scheme that divides by a function: a frozen dataclass of its options, with its documentation."""
    hints = get_type_hints(function, include_extras=True)
    options = [
        (one.name, hints.get(one.name, Any), field() if one.default is one.empty else field(default=one.default))
        for one in inspect.signature(function).parameters.values()
        if one.kind is one.KEYWORD_ONLY
    ]

    def divide(self: Any, targets: Tensor, clients: int, key: Key) -> Sequence[Any]:
        return function(targets, clients, key, **{option: getattr(self, option) for option, _, _ in options})

    namespace = {
        "__call__": _watched(divide, name),
        "__doc__": function.__doc__,
        "__module__": function.__module__,
        "by_label": getattr(function, "by_label", True),
    }
    return make_dataclass(function.__name__, options, bases=(Checked,), namespace=namespace, frozen=True, kw_only=True)


def of_class(cls: type[Any], name: str) -> type[Any]:
    """A scheme of the user's, whose parts are checked.

    Raises:
        ConfigError: it is not a dataclass.
    """
    if not is_dataclass(cls):
        raise ConfigError(f"{name} is not a dataclass; write @dataclass(frozen=True), its fields are the options")
    own = {"__call__": _watched(cls.__call__, name), "__doc__": cls.__doc__, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), own)


def _watched(divide: Division, name: str) -> Callable[..., list[Tensor]]:
    """The call of a scheme, with the place of what goes wrong in it, and its parts checked."""

    def call(self: Any, targets: Tensor, clients: int, key: Key) -> list[Tensor]:
        try:
            parts = divide(self, targets, clients, key)
        except PotluckError:
            raise
        except Exception as error:  # the user's own code
            raise DataError(f"federation.partition: {name}: {explained(error)}") from error
        return checked(parts, len(targets), clients, f"federation.partition: {name}")

    return call


def checked(parts: Any, examples: int, clients: int, where: str) -> list[Tensor]:
    """The parts as sorted int64 tensors.

    Raises:
        DataError: they are not one part for each client, or not disjoint, non-empty rows of the training set.
    """
    try:
        found = [torch.as_tensor(part) for part in parts]
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: expected a list of row numbers for each client, found {parts!r:.80}") from error
    if len(found) != clients:
        raise DataError(f"{where}: returned {len(found)} parts for {clients} clients; return one for each")
    for client, part in enumerate(found):
        if part.dim() != 1 or part.is_floating_point() or part.is_complex() or part.dtype == torch.bool:
            found_kind = f"{part.dtype} of shape {tuple(part.shape)}"
            raise DataError(f"{where}: client {client}: expected row numbers, whole and in one row, found {found_kind}")
        if len(part) == 0:
            raise DataError(f"{where}: client {client} has no examples; give each client at least one")
        if int(part.min()) < 0 or int(part.max()) >= examples:
            wrong = int(part.min()) if int(part.min()) < 0 else int(part.max())
            raise DataError(f"{where}: client {client} has row {wrong}; expected rows from 0 to {examples - 1}")
    taken = torch.cat(found).long().bincount()
    if int(taken.max()) > 1:
        raise DataError(f"{where}: row {int(taken.argmax())} is given {int(taken.max())} times; parts share no example")
    return [part.long().sort().values for part in found]
