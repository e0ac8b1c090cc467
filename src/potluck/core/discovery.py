"""Finding things by file name: a module in a package is a thing of that package, with no table to edit."""

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatch
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from potluck.core.errors import ConfigError, nearest


def module_names(package: str) -> list[str]:
    """Public module names of `package`, sorted, without importing any of them."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    found = pkgutil.iter_modules(spec.submodule_search_locations)
    return sorted(module.name for module in found if not module.name.startswith("_"))


def plugins(group: str) -> dict[str, EntryPoint]:
    """What installed distributions offer under an entry-point group, by name."""
    return {point.name: point for point in entry_points(group=group)}


FILE_PREFIX = "potluck_file_"
"""Of the names of modules that `load_file` makes."""

_copies: ContextVar[Mapping[Path, Path] | None] = ContextVar("copies", default=None)


@contextmanager
def standing_in(copies: Mapping[Path, Path]) -> Generator[None]:
    """Inside the block, `load_file` of a path that has a copy runs the copy."""
    token = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(token)


def load_file(path: Path) -> ModuleType:
    """Import a single Python file that lies outside any package.

    Raises:
        ConfigError: there is no such file.
    """
    source = (_copies.get() or {}).get(path, path)
    if not source.is_file() or path.suffix != ".py":
        found = "not Python" if source.is_file() else "no such file"
        raise ConfigError(f"{path}: {found}; expected a Python file")
    name = f"{FILE_PREFIX}{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look their module up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names that a shell-style pattern selects."""
    return [name for name in names if fnmatch(name, pattern)]


def unknown(kind: str, name: str, known: Iterable[str], command: str) -> ConfigError:
    """The error for a name that nothing answers to, with the nearest names and how to list them all."""
    near = ", ".join(nearest(name, known))
    return ConfigError(f"unknown {kind} {name!r}; nearest: {near}; all: {command}")
