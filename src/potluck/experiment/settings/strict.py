"""Tables checked against dataclasses.

Nothing is coerced and nothing unknown is ignored: a wrong key or value is a `ConfigError` that names the file
or argument, the dotted key, what was found and what was expected.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from datetime import date, time
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from potluck.core.ground.errors import ConfigError, nearest
from potluck.core.requests.fit import LocalTraining
from potluck.data.partition import get_partition
from potluck.experiment.settings.keys import settings_of
from potluck.experiment.settings.schema import TABLES
from potluck.experiment.settings.tables import Tree, merged, without_none
from potluck.methods import get_method

T = TypeVar("T")
_STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


def typed(cls: type[T], tree: Tree, where: str, source: str) -> T:
    """A dataclass from a table, strictly; only lists are accepted for tuples, as in JSON mode.

    A table for a field that is itself a dataclass sets the keys that it names and leaves the others at their defaults.
    """
    _without_dates(tree, where, source)
    try:
        return _adapter(cls).validate_json(json.dumps(_over_defaults(cls, tree)), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explained(error, cls, where)}") from error
    except TypeError as error:  # from a plug-in's own checks
        raise ConfigError(f"{source}: {where}: {error}") from error


@lru_cache(maxsize=256)
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """The strict checks of a dataclass, which take some hundredths of a second to make."""
    _make_strict(cls)
    return TypeAdapter(cls)


def _without_dates(node: Any, where: str, source: str) -> None:
    """Check that there are no TOML dates or times, which no setting is; the error names the first."""
    if isinstance(node, date | time):
        raise ConfigError(f"{source}: {where}: found a date or time, {node}; expected a number or text, in quotes")
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        _without_dates(value, f"{where}.{key}", source)


def _over_defaults(cls: type[Any], tree: Tree) -> Tree:
    """The tables laid over the defaults of those fields that are dataclasses."""
    laid = dict(tree)
    for spec in fields(cls):
        table = tree.get(spec.name)
        if is_dataclass(spec.default) and not isinstance(spec.default, type) and isinstance(table, dict):
            laid[spec.name] = merged(without_none(dataclasses.asdict(spec.default)), table)
    return laid


def _make_strict(cls: type[Any]) -> None:
    """Have pydantic refuse unknown keys in this dataclass and in nested ones."""
    if "__pydantic_config__" not in dir(cls):
        cls.__pydantic_config__ = _STRICT
    for hint in get_type_hints(cls).values():
        if inner := _dataclass_in(hint):
            _make_strict(inner)


def _explained(error: ValidationError, cls: type[Any], where: str) -> str:
    """The first problem on one line: dotted key, what was expected, what was found."""
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"] if not _is_kind(part)]
    key = ".".join([where, *place])
    if problem["type"] == "unexpected_keyword_argument":
        near = [".".join([where, *place[:-1], name]) for name in nearest(place[-1], _names_at(cls, place[:-1]))]
        inside = [f"{where}.{one.key}" for one in settings_of(cls) if one.key.endswith(f".{place[-1]}")]
        near = inside or keys_called(place[-1]) or near
        return f"unknown key {key}; nearest: {', '.join(near)}" if near else f"unknown key {key}; it has no options"
    if problem["type"] == "value_error":
        return f"{'.'.join([where, *place])}.{problem['msg'].removeprefix('Value error, ')}"
    hint = f"; write [{json.dumps(problem['input'])}]" if problem["type"] in ("tuple_type", "list_type") else ""
    return f"{key}: {problem['msg'][0].lower()}{problem['msg'][1:]}, found {problem['input']!r}{hint}"


def _is_kind(part: int | str) -> bool:
    """Whether a part of the place of a problem is a type that the value could have had, which is no key."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "float", "bool"))


def _names_at(cls: type[Any], place: list[str]) -> list[str]:
    for name in place:
        hints = get_type_hints(cls)
        if name not in hints:  # of a list or a table of tables, the number or the key of one
            continue
        inner = _dataclass_in(hints[name])
        if inner is None:
            return []
        cls = inner
    return [spec.name for spec in fields(cls)]


def _dataclass_in(hint: Any) -> type[Any] | None:
    """The dataclass of a type hint `X` or `X | None`."""
    kinds = [hint, *get_args(hint)]
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


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
