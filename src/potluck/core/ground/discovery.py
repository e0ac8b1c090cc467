"""Discovery by file name: each module of a package is one method, model or data set, with no registry to edit."""

import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from potluck.core.ground.access import entered
from potluck.core.ground.errors import ConfigError, PotluckError, explained, is_users, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def module_names(package: str) -> list[str]:
    """Public module names of `package`, sorted, without importing any of them."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    places = tuple(spec.submodule_search_locations)
    return list(_names_in(places, tuple(file for place in places for file in os.listdir(place))))


@cache
def _names_in(places: tuple[str, ...], files: tuple[str, ...]) -> tuple[str, ...]:
    """The names in folders with these files; kept, since each name that is looked up asks for all of them."""
    found = pkgutil.iter_modules(places)
    return tuple(sorted(module.name for module in found if not module.name.startswith("_")))


def plugins(group: str) -> "dict[str, EntryPoint]":
    """What installed distributions offer under an entry-point group, by name."""
    return {point.name: point for point in _installed(group, tuple(sys.path))}


@cache
def _installed(group: str, path: tuple[str, ...]) -> "tuple[EntryPoint, ...]":
    """The entry points found along a path; kept, since this reads the metadata of every installed package."""
    from importlib.metadata import entry_points  # brings Python's package for e-mail: a sixth of `potluck --help`

    return tuple(entry_points(group=group))


FILE_PREFIX = "potluck_file_"
"""The prefix of module names that `load_file` makes."""

_copies: ContextVar[Mapping[Path, Path] | None] = ContextVar("copies", default=None)


@contextmanager
def standing_in(copies: Mapping[Path, Path]) -> Generator[None]:
    """Inside the block, `standing_for` a path that has a copy is the copy."""
    token = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(token)


_given: ContextVar[Mapping[str, Mapping[str, Any]] | None] = ContextVar("given", default=None)


@contextmanager
def giving(objects: Mapping[str, Mapping[str, Any]]) -> Generator[None]:
    """Inside the block these Python objects can be named too, by the group of entry points that they could be in."""
    token = _given.set(objects)
    try:
        yield
    finally:
        _given.reset(token)


def objects_given(group: str) -> Mapping[str, Any]:
    """The objects of a group that this block is given, by name."""
    return (_given.get() or {}).get(group, {})


def standing_for(path: Path) -> Path:
    """The copy that stands in for a file of the user's, or the file itself.

    Raises:
        ConfigError: the owner of this node did not name it.
    """
    return (_copies.get() or {}).get(entered(path), path)


def load_file(path: Path) -> ModuleType:
    """Import a Python file outside any package; its top-level code may import modules from its own folder.

    Raises:
        ConfigError: there is no such file, it cannot be imported, or the owner of this node did not name it.
    """
    source = standing_for(path)
    if not source.is_file() or path.suffix != ".py":
        found = "not Python" if source.is_file() else "no such file"
        raise ConfigError(f"{path}: {found}; expected a Python file")
    name = f"{FILE_PREFIX}{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)  # what lies beside it is found there, also if a copy of it runs
    sys.modules[name] = module  # dataclasses and type hints look up their module here
    try:
        with _neighbours_of(path):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, PotluckError | KeyboardInterrupt):
            raise
        raise ConfigError(f"{path}: cannot be imported: {explained(error)}") from error
    return module


def named_file(name: str) -> tuple[Path, str] | None:
    """The file and the name in it of `FILE.py:NAME`, the name empty for `FILE.py`; None for what names no file."""
    path, _, inside = name.rpartition(":")
    if path.endswith(".py"):
        return Path(path), inside
    return (Path(name), "") if name.endswith(".py") else None


CONFIG_PREFIX = "hf:"
"""Of the name of a network whose configuration is a file of transformers' form, or a folder with a config.json."""


def config_file(name: str) -> Path | None:
    """The file that `hf:CONFIG.json` or `hf:FOLDER` names; None for other names."""
    if not name.startswith(CONFIG_PREFIX):
        return None
    place = Path(name.removeprefix(CONFIG_PREFIX))
    return place if place.suffix == ".json" else place / "config.json"


def own_part(name: str, expected: str, fits: Callable[[Any], bool] = callable) -> Any:
    """What a user's file defines under the name in `FILE.py:NAME`; for `FILE.py`, the only thing in it that fits.

    Args:
        name: of this form.
        expected: what it should be, for messages: "a function that builds a network".
        fits: whether an object can be it.

    Raises:
        ConfigError: there is no such file or it cannot be imported, or it has no such thing, or several.
    """
    found = named_file(name)
    assert found is not None
    path, inside = found
    module = load_file(path.resolve())
    offered = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__ and fits(value)
    }
    if inside:
        value = getattr(module, inside, None)
        if value is None or not fits(value):
            near = f"; it has {', '.join(offered)}" if offered else ""
            raise ConfigError(f"{path} has no {inside!r} that fits; expected {expected}{near}")
        return value
    if len(offered) != 1:
        names = ", ".join(offered) or "none"
        raise ConfigError(f"{path}: expected {expected}, found {names}; name the one that is meant: {path}:NAME")
    return next(iter(offered.values()))


@contextmanager
def _neighbours_of(path: Path) -> Generator[None]:
    """Let the modules in a file's folder be imported inside the block, as when Python runs the file.

    They are visible to this file alone: another file finds modules of the same names in its own folder, and the rest of
    the program finds the installed ones.
    """
    folder, before = str(path.parent), set(sys.modules)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if _lies_in(sys.modules[name], path.parent):
                del sys.modules[name]


def _lies_in(module: ModuleType, folder: Path) -> bool:
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    return any(Path(place).is_relative_to(folder) and is_users(place) for place in places if place)


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names that a shell-style pattern selects."""
    return [name for name in names if fnmatch(name, pattern)]


def unknown(kind: str, name: str, known: Iterable[str], command: str) -> ConfigError:
    """The error for an unknown name, with the nearest names and the command that lists all."""
    near = ", ".join(nearest(name, known))
    file, _, inside = name.replace(":", ".").rpartition(".")
    own = f"; of a file: {file}.py:{inside}" if file and Path(f"{file}.py").is_file() else ""
    return ConfigError(f"unknown {kind} {name!r}; nearest: {near}; all: {command}{own}")
