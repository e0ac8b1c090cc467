"""The tables of a configuration: read from TOML files, overridden by dotted keys, laid over one another."""

import copy
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.core.ground.discovery import CONFIG_PREFIX, config_file, named_file
from potluck.core.ground.errors import ConfigError
from potluck.data.datasets import list_datasets

Tree = dict[str, Any]
_PLACES = {"dataset", "public", "data", "partition", "models", "server_model", "metrics"}
_LISTS = ("federation.models", "federation.data", "federation.capacities", "federation.metrics")


def read_toml(path: Path) -> Tree:
    """The tables of a TOML file.

    Raises:
        ConfigError: there is no such file, or it is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error


Assignments = Sequence[str] | Mapping[str, Any]
"""Values for dotted keys: text `dotted.key=value`, in which a value is TOML or else text, or Python values by key."""


def read_experiment(path: Path) -> Tree:
    """The tables of a user's TOML file, in which relative paths may start in the file's own folder.

    A path that leads to a file or folder there is taken from there, and any other from the current folder.

    Raises:
        ConfigError: there is no such file, or it is not TOML.
    """
    tree, folder = read_toml(path), path.parent
    federation, method = tree.get("federation"), tree.get("method")
    if isinstance(federation, dict):
        for key in _PLACES & federation.keys():
            federation[key] = _from_folder(federation[key], folder)
        columns = federation.get("columns")
        if isinstance(columns, dict) and "tokenizer" in columns:
            columns["tokenizer"] = _from_folder(columns["tokenizer"], folder)
    if isinstance(method, dict) and "name" in method:
        method["name"] = _from_folder(method["name"], folder)
    return tree


def _from_folder(value: Any, folder: Path) -> Any:
    """A path, or a table or list of them, as from the current folder."""
    if isinstance(value, list):
        return [_from_folder(one, folder) for one in value]
    if isinstance(value, dict) and "name" in value:
        paths = {key: _from_folder(value[key], folder) for key in ("name", "weights") if key in value}
        return {**value, **paths}
    if not isinstance(value, str) or value in list_datasets():
        return value
    if (config := config_file(value)) is not None:
        return CONFIG_PREFIX + _from_folder(str(config), folder)
    file, inside = named_file(value) or (Path(value), "")
    there = folder / file
    if file.is_absolute() or folder == Path(".") or not there.exists():
        return value
    return f"{there}:{inside}" if inside else str(there)


def override(tree: Tree, assignments: Assignments) -> Tree:
    """The tables with assignments applied.

    The last assignment to a key counts; otherwise their order does not matter: tables are applied before keys in them.
    Another partition, by `partition` or its `name`, has none of the options of the one before.

    Raises:
        ConfigError: an assignment has no `=`, or leads through something that is not a table.
    """
    tree, assigned = (
        copy.deepcopy(tree),
        {_of_partition(key, found): found for key, found in _assigned(assignments).items()},
    )
    for key, value in sorted(assigned.items(), key=lambda item: item[0].count(".")):
        *tables, last = key.split(".")
        place = tree
        for name in tables:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{key}: {name} is not a table; give it whole, as {'.'.join(tables)}=...")
        if last == "partition" and isinstance(value, str):
            same = isinstance(place.get(last), dict) and place[last].get("name") == value
            place[last] = place[last] if same else {"name": value}
        else:
            place[last] = value
        if last == "epochs" and ".".join([*tables, "steps"]) not in assigned:
            place.pop("steps", None)  # as in `merged`
        if isinstance(replaced := tree.get("preset"), dict):
            replaced.pop(key, None)  # it is no longer the preset's choice
    return tree


def _of_partition(key: str, value: Any) -> str:
    """The key of an assignment; of a partition's name that of the partition, all of which it replaces."""
    return key.removesuffix(".name") if key.endswith("partition.name") and isinstance(value, str) else key


def _assigned(assignments: Assignments) -> Tree:
    """The assigned values by dotted key."""
    if isinstance(assignments, Mapping):
        return dict(assignments)
    found: Tree = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            torn = (
                '; quotes keep a value with spaces whole: "key=[1, 2]"' if assignment.endswith(("]", "}", ",")) else ""
            )
            raise ConfigError(f"{assignment!r}: expected key=value, such as run.rounds=10{torn}")
        found[key.strip()] = _listed(text) if key.strip() in _LISTS else _value(text)
    return found


def _listed(text: str) -> Any:
    """The value of a key that holds a list; on the command line its brackets and quotes may be left out."""
    value = _value(text)
    if isinstance(value, list):
        return value
    inside = _value(f"[{text}]")
    return inside if isinstance(inside, list) else [part.strip() for part in text.split(",")]


def merged(base: Tree, changes: Tree) -> Tree:
    """The tables of `base` with those of `changes` laid over them.

    Steps in `base`, which decide how long a training is, do not outlive epochs in `changes`.
    """
    laid = {key: value for key, value in base.items() if key != "steps" or "epochs" not in changes}
    for key, value in changes.items():
        inner = base.get(key)
        laid[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return laid


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def without_none(node: Any) -> Any:
    """The tree in TOML's types: no nulls, no tuples."""
    if isinstance(node, dict):
        return {key: without_none(value) for key, value in node.items() if value is not None}
    return [without_none(value) for value in node] if isinstance(node, (list, tuple)) else node
