"""The keys of a configuration, explained: type, default and range from annotations, the meaning from docstrings.

There is no second text: what a class says of a field under *Attributes*, a function of an option under *Args*, and a
family of models of its options under *Options* is what `potluck show` prints.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from potluck.core.ground.fields import Bound


@dataclass(frozen=True)
class Setting:
    """One key.

    Attributes:
        key: its dotted name below the table that it belongs to.
        kind: its type, in words.
        default: its default; `dataclasses.MISSING` if it has none.
        allowed: which values of the type it may have, in words; empty if all.
        meaning: what its owner's documentation says; empty if that says nothing.
    """

    key: str
    kind: str
    default: Any
    allowed: str
    meaning: str


@dataclass(frozen=True)
class _Words:
    """A type in words, and which of its values are allowed."""

    kind: str
    allowed: list[str] = field(default_factory=list[str])


_KINDS: dict[Any, str] = {
    float: "number",
    int: "whole number",
    bool: "true or false",
    str: "text",
    dict: "table",
}


def settings_of(cls: type[Any], prefix: str = "") -> list[Setting]:
    """Every key of a dataclass; those of nested dataclasses in place of the field that holds them.

    A nested dataclass that may also be absent has a line of its own before those of its keys.
    """
    hints, meanings = get_type_hints(cls, include_extras=True), _meanings_of(cls)
    found: list[Setting] = []
    for spec in fields(cls):
        default = spec.default_factory() if spec.default_factory is not MISSING else spec.default
        key, hint = f"{prefix}{spec.name}", hints[spec.name]
        bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        alone = () if get_origin(bare) is tuple else (bare, *get_args(bare))  # what is in a list has no key of its own
        inner = next((kind for kind in alone if isinstance(kind, type) and is_dataclass(kind)), None)
        if inner is not bare:
            found.append(_setting(key, hint, default, meanings.get(spec.name, "")))
        if inner is not None:
            nested = settings_of(inner, f"{key}.")
            found += nested if not is_dataclass(default) else [_at(default, key, one) for one in nested]
    return found


def options_of(function: Callable[..., Any], without: tuple[str, ...] = ()) -> list[Setting]:
    """The options of a function, which are its arguments by keyword alone; `without` names those that are none."""
    hints = get_type_hints(function, include_extras=True)
    module = sys.modules.get(function.__module__)
    meanings = {
        **_entries(module and module.__doc__, "Options"),
        **_entries(function.__doc__, "Args"),
    }
    return [
        _setting(
            option.name,
            hints.get(option.name, Any),
            MISSING if option.default is option.empty else option.default,
            meanings.get(option.name, ""),
        )
        for option in inspect.signature(function).parameters.values()
        if option.kind is option.KEYWORD_ONLY and option.name not in without
    ]


def _at(default: Any, key: str, setting: Setting) -> Setting:
    """A nested key with the default that its holder gives it."""
    value = default
    for name in setting.key.removeprefix(f"{key}.").split("."):
        value = getattr(value, name, None)
    return Setting(setting.key, setting.kind, value, setting.allowed, setting.meaning)


def _setting(key: str, hint: Any, default: Any, meaning: str) -> Setting:
    words = _in_words(hint)
    return Setting(key, words.kind, default, " and ".join(words.allowed), meaning)


def _in_words(hint: Any) -> _Words:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner = _in_words(arguments[0])
        return _Words(inner.kind, [*inner.allowed, *(str(one) for one in arguments[1:] if isinstance(one, Bound))])
    if origin is Literal:
        return _Words("one of", [", ".join(map(str, arguments))])
    if origin in (Union, UnionType):
        kinds = [_in_words(kind) for kind in arguments if kind is not NoneType]
        return _Words(
            " or ".join(dict.fromkeys(one.kind for one in kinds)), [word for one in kinds for word in one.allowed]
        )
    if origin in (tuple, list) or hint in (tuple, list) or getattr(origin, "__name__", "") == "Sequence":
        inner = _in_words(arguments[0]) if arguments else _Words("")
        several = f"list of {'/'.join(_plural(word) for word in inner.kind.split(' or '))}" if inner.kind else "list"
        return _Words(several, [f"each {word}" for word in inner.allowed])
    if isinstance(hint, type) and is_dataclass(hint):
        return _Words("table")
    return _Words(_KINDS.get(origin or hint, "any value"))


def _plural(kind: str) -> str:
    return {"text": "texts", "one of": "words"}.get(kind, f"{kind}s")


def _meanings_of(cls: type[Any]) -> Mapping[str, str]:
    """What a class and those that it derives from say of their fields."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        found |= _entries(vars(owner).get("__doc__"), "Attributes")
    return found


def _entries(text: str | None, section: str) -> dict[str, str]:
    """The entries of one section of a docstring, `name: meaning`, each on one line."""
    lines = inspect.cleandoc(text or "").split("\n")
    if f"{section}:" not in lines:
        return {}
    found: dict[str, str] = {}
    name = ""
    for line in lines[lines.index(f"{section}:") + 1 :]:
        if line and not line.startswith(" "):
            break
        if entry := re.match(r" {4}(\w+): (.*)", line):
            name, found[entry[1]] = entry[1], entry[2]
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return found
