"""`potluck list` and `potluck show`: methods, models, data sets, partitions, and their descriptions."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from potluck.core.discovery import matching
from potluck.core.errors import ConfigError, nearest
from potluck.core.method import Method
from potluck.data.dataset import Description
from potluck.data.datasets import describe, list_datasets
from potluck.data.partition import get_partition, list_partitions
from potluck.experiment.config import hyper_parameters
from potluck.experiment.folder import open_folder, run_digest
from potluck.methods import get_method, list_methods
from potluck.models import get_model, list_models
from potluck.testing.facts import facts_of

_LISTS: dict[str, Callable[[], list[str]]] = {
    "methods": list_methods,
    "models": list_models,
    "datasets": list_datasets,
    "partitions": list_partitions,
}


def print_lists(kind: str | None, pattern: str) -> None:
    """Names of one kind, or of every kind, that a pattern selects.

    Raises:
        ConfigError: there is no such kind, or no name of it matches.
    """
    if kind is not None and kind not in _LISTS:
        raise ConfigError(f"unknown kind {kind!r}; nearest: {nearest(kind, _LISTS, 1)[0]}; all: {', '.join(_LISTS)}")
    console = Console()
    for name, names in _LISTS.items():
        if kind is None:
            console.print(f"[bold]{name}[/bold]: {', '.join(names())}", highlight=False)
        elif kind == name:
            found = matching(names(), pattern)
            if not found:
                raise ConfigError(f"no {kind} match {pattern!r}; all: potluck list {kind}")
            for item in found:
                console.print(f"{item:<22}{_first_line(kind, item)}", highlight=False, soft_wrap=True)
                if kind == "methods":
                    _print_facts(console, item)


def print_details(name: str, *, digest: bool) -> None:
    """Describe the thing with this name.

    Raises:
        ConfigError: there is none.
    """
    console = Console()
    if Path(name).is_dir():
        _print_run(console, Path(name), digest)
    elif digest:
        raise ConfigError(f"{name} is not the folder of a run; --digest is for runs")
    elif name in list_methods() or name.endswith(".py"):
        _print_class(console, get_method(name), "method")
        _print_needs(console, get_method(name))
    elif name in list_models():
        variant = get_model(name)
        console.print(f"{name}{inspect.signature(variant)}", highlight=False)
        console.print(inspect.getdoc(variant) or "", highlight=False)
    elif name in list_partitions():
        _print_class(console, get_partition(name), "federation.partition")
    elif name in list_datasets():
        console.print(f"{name}: {_dataset_line(describe(name))}", highlight=False)
    else:
        everything = [item for names in _LISTS.values() for item in names()]
        raise ConfigError(
            f"nothing is called {name!r}; nearest: {', '.join(nearest(name, everything))}; all: potluck list"
        )


def _print_class(console: Console, cls: type[Any], prefix: str) -> None:
    """Print the module's documentation and the fields that a configuration may set."""
    module = inspect.getmodule(cls)
    console.print(((module and module.__doc__) or "").strip(), highlight=False, markup=False)
    table = Table(title="hyper-parameters")
    for column in ("key", "type", "default"):
        table.add_column(column)
    for key, kind, default in hyper_parameters(cls):
        table.add_row(f"{prefix}.{key}", kind.replace("[", r"\["), repr(default).replace("[", r"\["))
    console.print(table)


def _print_facts(console: Console, name: str) -> None:
    """What a method needs, sends, keeps, whether it stacks and how it was verified, a line each."""
    try:
        facts = facts_of(get_method(name))
    except (AssertionError, ConfigError) as error:  # a method from elsewhere, whose documentation is not in our form
        console.print(f"    [yellow]{escape(f'potluck check {name}: {error}')}[/yellow]", soft_wrap=True)
        return
    for head, text in facts.lines():
        console.print(f"    {head:<11}{text}", highlight=False, markup=False, soft_wrap=True)
    console.print()


def _print_needs(console: Console, cls: type[Method[Any]]) -> None:
    """The method's needs with its defaults, and advice."""
    for need in sorted(cls().needs(), key=str):
        console.print(f"needs {need}: if not, {need.advice}", highlight=False, markup=False, soft_wrap=True)


def _print_run(console: Console, folder: Path, digest: bool) -> None:
    manifest = open_folder(folder)
    if not digest:
        console.print(json.dumps(manifest, indent=1), highlight=False, markup=False)
    for name, value in run_digest(folder).items():
        console.print(f"{name} {value}", highlight=False)


def _first_line(kind: str, name: str) -> str:
    if kind == "methods":
        module = inspect.getmodule(get_method(name))
        return ((module and module.__doc__) or "").strip().split("\n")[0]
    if kind == "partitions":
        return (inspect.getdoc(get_partition(name)) or "").split("\n")[0]
    if kind == "datasets":
        return _dataset_line(describe(name))
    return (inspect.getdoc(get_model(name)) or "").split("\n")[0]


def _dataset_line(description: Description) -> str:
    """A data set's input shape, and its classes, or its task and the width of an output."""
    width, task = description.num_classes, description.task
    outputs = f"{width} classes" if task.has_classes else f"{task.name}, {width} output{'s' if width != 1 else ''}"
    return f"inputs {description.input_shape}, {outputs}"
