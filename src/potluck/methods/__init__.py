"""Methods: one file each, whose name is the method's name. There is no other registry."""

import importlib
import inspect
from types import ModuleType
from typing import Any

from potluck.core.ground.discovery import matching, module_names, named_file, objects_given, own_part, plugins, unknown
from potluck.core.ground.errors import ConfigError
from potluck.core.method import Method

_GROUP = "potluck.methods"


def list_methods(pattern: str = "*") -> list[str]:
    """Names of all methods, Potluck's and those of other installed packages, without importing them."""
    return matching(sorted({*module_names(__name__), *plugins(_GROUP)}), pattern)


def get_method(name: str) -> type[Method[Any]]:
    """The method of this name, or the one in a Python file, `FILE.py`, or `FILE.py:CLASS` if it defines several.

    Raises:
        ConfigError: there is no such method, or the module does not define exactly one Method.
    """
    if name in (own := objects_given(_GROUP)):
        return own[name]
    if named_file(name):
        return own_part(name, "one class that derives from Method", _is_method)
    if name in module_names(__name__):
        return _defined_in(importlib.import_module(f"{__name__}.{name}"), name)
    offered = plugins(_GROUP)
    if name in offered:
        found = offered[name].load()
        return _defined_in(found, name) if isinstance(found, ModuleType) else found
    raise unknown("method", name, list_methods(), "potluck list methods")


def _is_method(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Method)


def _defined_in(module: ModuleType, name: str) -> type[Method[Any]]:
    classes = [value for value in vars(module).values() if _is_method(value) and value.__module__ == module.__name__]
    if len(classes) != 1:
        names = ", ".join(cls.__name__ for cls in classes) or "none"
        raise ConfigError(f"method file {name}: expected one class that derives from Method, found {names}")
    return classes[0]
