"""What a caller gives in Python, as keys of a configuration: plain values, and objects under names of their own."""

import functools
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from torch import nn

from potluck.core.ground.discovery import giving
from potluck.core.ground.errors import ConfigError, nearest
from potluck.core.method import Method
from potluck.core.nets.builders import called_by_name, lacking_values, lacks
from potluck.data.dataset import Dataset, Source
from potluck.data.datasets import ArraySource, Frames, FrameSource, HeldSource, list_datasets
from potluck.data.tables.source import tables_in
from potluck.experiment.settings.strict import keys_called
from potluck.methods import get_method, list_methods
from potluck.models import list_models

_METHODS, _MODELS, _DATASETS = "potluck.methods", "potluck.models", "potluck.datasets"

KEYWORDS: Mapping[str, str] = {
    "dataset": "federation.dataset",
    "columns": "federation.columns",
    "clients": "federation.clients",
    "models": "federation.models",
    "partition": "federation.partition",
    "capacities": "federation.capacities",
    "public": "federation.public",
    "rounds": "run.rounds",
    "seed": "run.seed",
}
"""The dotted keys that have a keyword argument."""


P = ParamSpec("P")
R = TypeVar("R")


def explaining(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which says of a keyword argument that it does not take what may be meant.

    Raises:
        ConfigError: when it is called with such an argument.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in known:
                raise ConfigError(
                    f"potluck.{function.__name__}: {name} is none of its arguments; {_meant(name, known)}"
                )
        return function(*args, **keywords)

    return called


def _meant(name: str, known: Iterable[str]) -> str:
    """What to write in place of a keyword argument that does not exist."""
    keys = keys_called(name)
    if keys:
        return "settings are given by key: " + " or ".join(f"settings={{'{key}': ...}}" for key in keys)
    return f"nearest: {', '.join(nearest(name, known))}"


@dataclass(frozen=True)
class Given:
    """A caller's wishes.

    Attributes:
        target: a TOML file, or a method's name or Python file; None for the demonstration.
        values: by dotted key.
        objects: Python objects that a configuration file cannot hold, by group and name.
    """

    target: str | None
    values: Mapping[str, Any]
    objects: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Any])

    def naming(self) -> AbstractContextManager[None]:
        """A block inside which the objects can be named."""
        return giving(self.objects)

    @property
    def unwritable(self) -> list[str]:
        """The names of what a configuration file cannot hold."""
        return [name for group in self.objects.values() for name in group]


def given(method: Any, keywords: Mapping[str, Any], settings: Mapping[str, Any] | None) -> Given:
    """What a caller gives.

    Args:
        method: a method's name, Python file, class or object, or a TOML file; None for the demonstration.
        keywords: by keyword argument; None for those not given.
        settings: by dotted key.

    Raises:
        ConfigError: a key is given twice, or a value is none that a configuration can have.
    """
    objects: dict[str, dict[str, Any]] = {}
    keywords = {name: value for name, value in keywords.items() if value is not None}
    values = _settings(settings or {})
    twice = [name for name in keywords if KEYWORDS[name] in values]
    if twice:
        raise ConfigError(f"{twice[0]}: given as an argument and in settings, as {KEYWORDS[twice[0]]}; give it once")
    target = _method(method, values, objects)
    if "dataset" in keywords:
        keywords["dataset"] = _dataset(keywords["dataset"], objects)
    if "models" in keywords:
        keywords["models"] = _models(keywords["models"], objects, keywords.get("clients"))
    values |= {KEYWORDS[name]: _plain(value, name) for name, value in keywords.items()}
    return Given(target, values, objects)


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"settings: found {type(settings).__name__}; expected values by dotted key, such as {{'method.mu': 0.1}}"
        )
    wrong = [key for key in settings if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"settings: found the key {wrong[0]!r}; expected text, such as 'method.mu'")
    return {key: _plain(value, f"settings: {key}") for key, value in settings.items()}


def _plain(value: Any, where: str) -> Any:
    """The value in the types of a configuration file.

    Raises:
        ConfigError: it has another type.
    """
    if isinstance(value, bool | int | float | str):
        return json.loads(json.dumps(value))  # as NumPy's float and members of an enumeration are values of these types
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, Sequence | range):
        return [_plain(inner, where) for inner in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy or torch
        return value.item()
    found = "None; leave the key out for its default" if value is None else type(value).__name__
    raise ConfigError(f"{where}: expected a number, text, a list or a table, found {found}")


def _method(method: Any, values: dict[str, Any], objects: dict[str, dict[str, Any]]) -> str | None:
    """The target; the hyper-parameters of an object become values."""
    if method is None or isinstance(method, str | Path):
        return None if method is None else str(method)
    kind = method if inspect.isclass(method) else type(method)
    if not issubclass(kind, Method):
        raise ConfigError(f"method: expected a name, a file, a Method or its class, found {kind.__name__}")
    if not is_dataclass(kind) or "__dataclass_fields__" not in vars(kind):
        raise ConfigError(f"method: {kind.__name__} is no dataclass; write @dataclass(frozen=True) above it")
    name = kind.__module__.rpartition(".")[2]
    if name not in list_methods() or get_method(name) is not kind:
        name = kind.__name__.lower() if kind.__name__.lower() not in list_methods() else f"own {kind.__name__.lower()}"
        objects[_METHODS] = {name: kind}
    if method is not kind:
        also = [key for key in values if key.startswith("method.")]
        if also:
            raise ConfigError(f"settings: {also[0]}: the {kind.__name__} that is given has its own; set it there")
        values |= {
            key: _plain(value, key) for key, value in _flat(asdict(cast(Any, method)), "method.") if value is not None
        }
    return name


def _flat(tree: Mapping[str, Any], where: str) -> list[tuple[str, Any]]:
    """The leaves of nested tables, by dotted key."""
    return [
        leaf
        for key, value in tree.items()
        for leaf in (_flat(value, f"{where}{key}.") if isinstance(value, dict) else [(f"{where}{key}", value)])
    ]


def _dataset(found: Any, objects: dict[str, dict[str, Any]]) -> str:
    """The name of a data set."""
    if isinstance(found, str | Path):
        return str(found)
    if isinstance(found, Dataset):
        name, source = found.name, cast(Source, HeldSource(found))
    elif isinstance(found, Mapping):
        name, source = "arrays", ArraySource(found, "dataset")
    elif (rows := tables_in(found)) is not None:
        name, source = "table", FrameSource(Frames(rows), "dataset")
    else:
        raise ConfigError(
            f"dataset: found {type(found).__name__}; expected a name, a path, a Dataset, such as of"
            " potluck.data.datasets.from_torch, arrays by name: x_train, y_train, x_test, y_test, or a DataFrame or two"
        )
    name = name if name not in list_datasets() else f"own {name}"
    objects[_DATASETS] = {name: source}
    return name


def _models(found: Any, objects: dict[str, dict[str, Any]], clients: Any) -> list[Any]:
    """The models as a configuration has them, builders by name.

    Raises:
        ConfigError: one is none, or there are more than clients.
    """
    listed = [found] if isinstance(found, str | Mapping | nn.Module) or callable(found) else found
    if not isinstance(listed, Sequence):
        raise ConfigError(f"models: found {type(found).__name__}; expected a list of names, tables or classes")
    if isinstance(clients, int) and len(listed) > clients:
        raise ConfigError(
            f"models: {len(listed)} models for {clients} clients; expected at most one for each, since clients take"
            " them in turn"
        )
    builders: dict[str, tuple[Any, Callable[..., nn.Module]]] = {}
    names = [
        model if isinstance(model, str | Mapping) else _named(model, i, builders) for i, model in enumerate(listed)
    ]
    if builders:
        objects[_MODELS] = {name: build for name, (_, build) in builders.items()}
    return names


def _named(model: Any, place: int, builders: dict[str, tuple[Any, Callable[..., nn.Module]]]) -> str:
    """A name for a class or function that builds a network; the same one for the same builder."""
    for name, (made, _) in builders.items():
        if made is model:
            return name
    base = _name(model, place)
    taken = {*builders, *list_models()}
    numbered = (f"{base}-{number}" for number in itertools.count(2))
    name = next(name for name in itertools.chain([base], numbered) if name not in taken)
    builders[name] = model, _builder(model, name)
    return name


def _name(model: Any, place: int) -> str:
    if isinstance(model, functools.partial):
        options = ", ".join([*map(str, model.args), *(f"{key}={value}" for key, value in model.keywords.items())])
        return f"{_name(model.func, place)}({options})"
    name = getattr(model, "__name__", type(model).__name__)
    return f"model-{place}" if name == "<lambda>" else name


def _builder(given: Any, name: str) -> Callable[..., nn.Module]:
    """The builder as the model zoo has them, which hands over those arguments that the caller's own asks for by name.

    Raises:
        ConfigError: it is none, or cannot be called with these arguments alone.
    """
    if not callable(given):
        raise ConfigError(
            f"models: found {type(given).__name__}; expected a name, a table, or a class or function that builds one"
        )
    build = called_by_name(cast(Callable[..., Any], given), name)
    if lacking := lacking_values(build):
        raise lacks(name, lacking[0], "give it its value with functools.partial")
    return build
