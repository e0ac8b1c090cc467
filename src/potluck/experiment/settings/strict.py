"""Tables made into dataclasses.

Nothing is coerced and nothing unknown is ignored: a wrong key or value is a `ConfigError` that names the file
or argument, the dotted key, what was found and what was expected. Whether a value fits is asked of
`potluck.core.ground.fields`, as it is when a dataclass is made in Python.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, time
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from potluck.core.ground.errors import ConfigError, nearest
from potluck.core.ground.fields import SERIES, check_value, first_fitting, hints_of, kinds_inside, require
from potluck.core.requests.fit import LocalTraining
from potluck.data.partition import get_partition
from potluck.experiment.settings.keys import settings_of
from potluck.experiment.settings.schema import TABLES
from potluck.experiment.settings.tables import Tree, merged, without_none
from potluck.methods import get_method

T = TypeVar("T")


class _UnknownKey(ConfigError):
    """A table, which has a dotted key itself, names something that is none of the dataclass's options."""

    def __init__(self, where: str, name: str, options: Sequence[str]) -> None:
        super().__init__(f"unknown key {where}.{name}")
        self.name, self.near = name, [f"{where}.{one}" for one in nearest(name, options)]


def typed(cls: type[T], tree: Tree, where: str, source: str) -> T:
    """A dataclass from a table, in which lists stand for tuples, and whole numbers also for others.

    A table for a field that is itself a dataclass sets the keys that it names and leaves the others at their defaults.

    Raises:
        ConfigError: a key is unknown or missing, or a value does not fit.
    """
    _without_dates(tree, where, source)
    try:
        return _made(cls, tree, where)
    except _UnknownKey as error:
        inside = [f"{where}.{one.key}" for one in settings_of(cls) if one.key.endswith(f".{error.name}")]
        near = ", ".join(inside or keys_called(error.name) or error.near)
        raise ConfigError(f"{source}: {error}; {f'nearest: {near}' if near else 'it has no options'}") from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _without_dates(node: Any, where: str, source: str) -> None:
    """Check that there are no TOML dates or times, which no setting is; the error names the first."""
    if isinstance(node, date | time):
        raise ConfigError(f"{source}: {where}: found a date or time, {node}; expected a number or text, in quotes")
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        _without_dates(value, f"{where}.{key}", source)


def _made(cls: type[T], tree: Tree, where: str) -> T:
    """The dataclass; errors begin with the dotted key."""
    options = {spec.name: spec for spec in fields(cls) if spec.init}  # type: ignore[arg-type]
    for name in tree:
        if name not in options:
            raise _UnknownKey(where, str(name), list(options))
    for name, spec in options.items():
        given = name in tree or spec.default is not MISSING or spec.default_factory is not MISSING
        require(given, f"{where}.{name}", "a value", None)
    values = {
        name: _fitting(hints_of(cls)[name], _over_default(options[name], value), f"{where}.{name}")
        for name, value in tree.items()
    }
    try:
        return cls(**values)
    except (AssertionError, TypeError) as error:  # from a plug-in's own checks
        raise ConfigError(f"{where}: {error}") from error
    except ValueError as error:  # whose text begins with the field's name
        raise ConfigError(f"{where}.{error}") from error


def _over_default(spec: dataclasses.Field[Any], value: Any) -> Any:
    """A table laid over the default of a field that is a dataclass; any other value as it is."""
    default = spec.default if spec.default_factory is MISSING else spec.default_factory()
    if isinstance(value, dict) and is_dataclass(default) and not isinstance(default, type):
        return merged(without_none(dataclasses.asdict(default)), value)
    return value


def _fitting(hint: Any, value: Any, key: str) -> Any:
    """A table's value as one of an annotation, which it fits."""
    made = _as_kind(hint, value, key)
    check_value(key, made, hint)
    return made


def _as_kind(hint: Any, value: Any, key: str) -> Any:
    """A table's value as one of an annotation, as far as it has its shape; whether it fits is not yet known."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return _as_kind(arguments[0], value, key)
    if origin in (Union, UnionType):
        kinds = sorted(arguments, key=lambda kind: kind is not type(value))  # its own type first: 1 of float | int is 1
        return first_fitting(key, kinds, lambda kind: _fitting(kind, value, key))
    if origin is dict or is_dataclass(origin):
        require(isinstance(value, dict), key, "a table", value)
        return _as_dict(arguments, value, key) if origin is dict else _made(origin, value, key)  # type: ignore[arg-type]
    if origin in SERIES:
        return _as_series(hint, value, key)
    if origin is float:
        check_value(key, value, float)
        return float(value)
    return value


def _as_dict(kinds: tuple[Any, ...], table: Tree, key: str) -> Tree:
    return {name: _as_kind(kinds[1] if kinds else Any, inner, f"{key}.{name}") for name, inner in table.items()}


def _as_series(hint: Any, value: Any, key: str) -> Sequence[Any]:
    if not isinstance(value, list):
        written = f"; write [{json.dumps(value)}]" if isinstance(value, bool | int | float | str) else ""
        raise ConfigError(f"{key}: expected a list, found {value!r}{written}")
    kinds = kinds_inside(key, value, hint)
    made = [_as_kind(kind, one, f"{key}.{place}") for place, (one, kind) in enumerate(zip(value, kinds, strict=True))]
    return tuple(made) if tuple in (hint, get_origin(hint)) else made


def check_keys(tree: Tree, names: Sequence[str], where: str, source: str, table: Tree | None = None) -> None:
    """Check that the tree has these keys alone; `table` is the whole configuration, whose method has keys too."""
    for key, value in tree.items():
        if key not in names:
            dotted = f"{where}.{key}" if where else key
            near = [f"{where}.{name}" if where else name for name in nearest(key, names)]
            asked = f"{key}.{next(iter(value))}" if isinstance(value, dict) and value else key
            elsewhere = keys_called(asked, _method_in(table or {})) or keys_called(key)
            hint = f"; nearest: {', '.join(elsewhere or near)}" if names else "; it has no options"
            raise ConfigError(f"{source}: unknown key {dotted}{hint}")


def keys_called(name: str, method: type[Any] | None = None) -> list[str]:
    """The dotted keys that end in this name, the shortest first, without those that lie deep below the first.

    Of the method's they are those that every method has, unless a method is given.

    Args:
        name: a key's last part, or several of them, such as `training.lr`.
        method: whose hyper-parameters count too.
    """
    known = [f"{table}.{one.key}" for table, cls in TABLES.items() for one in settings_of(cls)]
    known += [f"federation.partition.{one.key}" for one in settings_of(get_partition("dirichlet"))]
    known += [f"method.training.{one.key}" for one in settings_of(LocalTraining)]
    known += [f"method.{one.key}" for one in settings_of(method)] if method is not None else []
    found = sorted((key for key in dict.fromkeys(known) if key.endswith(f".{name}")), key=_depth)
    return [key for key in found if _depth(key) <= _depth(found[0]) + 1]


def _depth(key: str) -> int:
    return key.count(".")


def _method_in(tree: Tree) -> type[Any] | None:
    """The method that a configuration names, if it does so rightly."""
    table = tree.get("method", {})
    try:
        return get_method(str(table.get("name", "fedin"))) if isinstance(table, dict) else None
    except ConfigError:  # which is reported once the keys are right
        return None
