"""`potluck list` and `potluck show`: whatever a configuration can name, its description, and its keys explained."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from potluck.cli.prose import reflowed
from potluck.core.families import FAMILIES
from potluck.core.ground.discovery import matching, named_file
from potluck.core.ground.errors import ConfigError, nearest
from potluck.core.ground.inputs import shown
from potluck.core.method import Method
from potluck.core.tasks.named import TASKS
from potluck.core.tasks.own_metrics import own_metric
from potluck.data.dataset import Description
from potluck.data.datasets import describe, list_datasets
from potluck.data.partition import get_partition, list_partitions
from potluck.experiment.federation.needs import needs_of
from potluck.experiment.federation.parts import part_of
from potluck.experiment.folder.folder import open_folder, run_digest
from potluck.experiment.settings.devices import get_device, list_devices
from potluck.experiment.settings.keys import Setting, options_of, settings_of
from potluck.experiment.settings.schema import TABLES, FederationConfig
from potluck.methods import get_method, list_methods
from potluck.models import get_model, list_models
from potluck.testing.facts import facts_of

_LISTS: dict[str, Callable[[], list[str]]] = {
    "methods": list_methods,
    "models": list_models,
    "datasets": list_datasets,
    "partitions": list_partitions,
    "tasks": lambda: list(TASKS),
    "devices": list_devices,
}


def print_lists(kind: str | None, pattern: str, *, long: bool) -> None:
    """Names of one kind, or of every kind, that a pattern selects, methods by family.

    Args:
        kind: which kind, or None for the names of all.
        pattern: shell-style.
        long: whether methods come with their facts.

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
            if kind == "methods":
                _print_methods(console, found, long)
            else:
                for item in found:
                    console.print(f"{item:<22}{_first_line(kind, item)}", highlight=False, soft_wrap=True)


def _print_methods(console: Console, names: Sequence[str], long: bool) -> None:
    """A line for each method, cut where the terminal ends, below its family; or the whole line and its facts."""
    for word, family in FAMILIES.items():
        members = [name for name in names if get_method(name).family == word]
        if members:
            console.print(f"[bold]{family.title}[/bold]", highlight=False)
        for name in members:
            line = Text(f"  {name:<14}{_first_line('methods', name)}")
            console.print(line, soft_wrap=long, no_wrap=not long, overflow="ignore" if long else "ellipsis")
            if long:
                _print_facts(console, name)


def print_details(name: str, *, digest: bool) -> None:
    """Describe the thing with this name.

    Raises:
        ConfigError: there is none.
    """
    console = Console(highlight=False)
    if name not in TABLES and Path(name).is_dir():
        _print_run(console, Path(name), digest)
    elif digest:
        raise ConfigError(f"{name} is not the folder of a run; --digest is for runs")
    elif name in TABLES:
        _print_class(console, TABLES[name], name)
    elif name in list_methods():
        _print_method(console, get_method(name))
    elif name in list_models():
        _print_model(console, name)
    elif name in list_partitions():
        _print_partition(console, name)
    elif name in list_datasets():
        _print_dataset(console, name)
    elif name in TASKS:
        _print_class(console, type(TASKS[name]), "federation.task", {"name": name})
        console.print(f"metrics: {', '.join(metric.label for metric in TASKS[name].metrics)}", markup=False)
    elif name in list_devices():
        _print_device(console, name)
    elif named_file(name):
        part, kind = part_of(name)
        if kind == "method":
            _print_method(console, part)
        else:
            _OF_FILES[kind](console, name)
    else:
        everything = [*TABLES, *TASKS, *(item for names in _LISTS.values() for item in names())]
        raise ConfigError(
            f"nothing is called {name!r}; nearest: {', '.join(nearest(name, everything))}; all: potluck list"
        )


def _print_method(console: Console, cls: type[Method[Any]]) -> None:
    _print_class(console, cls, "method")
    if cls.unguarded:
        console.print(f"no robust rule keeps liars out: {cls.unguarded}", markup=False, soft_wrap=True)
    for need in sorted(needs_of(cls()), key=str):
        console.print(f"needs {need}: if not, {need.advice}", markup=False, soft_wrap=True)
    console.print(f"file {inspect.getfile(cls)}", markup=False, soft_wrap=True)


def _print_model(console: Console, name: str) -> None:
    build = get_model(name)
    _print_prose(console, f"{name}: {_described(build)}")
    console.print(f"federation.models={name}", markup=False)
    options = options_of(build, without=("scale",))
    if options:
        chosen = "".join(f", {one.key}={'...' if one.default is MISSING else _toml(one.default)}" for one in options)
        console.print(f"federation.models=[{{name={_toml(name)}{chosen}}}]", markup=False, soft_wrap=True)
        _print_settings(console, options, "")


def _print_partition(console: Console, name: str) -> None:
    cls = get_partition(name)
    if not named_file(name):
        _print_class(console, cls, "federation.partition", {"name": name})
        return
    part, _ = part_of(name)
    _print_prose(console, f"{name}: {_described(part)}")
    console.print(f"federation.partition={name}", markup=False)
    options = settings_of(part) if isinstance(part, type) else options_of(part)
    _print_settings(console, options, "federation.partition.")


def _print_dataset(console: Console, name: str) -> None:
    console.print(f"{name}: {dataset_line(describe(name))}\n", markup=False)
    console.print(f"federation.dataset={name}", markup=False)
    _print_settings(console, [one for one in settings_of(FederationConfig) if one.key in _OF_DATA], "federation.")


def _print_metric(console: Console, name: str) -> None:
    found = own_metric(name)
    console.print(f"{name}: {found.metric.label}, {found.metric.direction}\n", markup=False)
    console.print(f'federation.metrics=["{name}"]', markup=False)


_OF_DATA = ("augmentation", "image_size", "train_fraction", "task")
_OF_FILES: Mapping[str, Callable[[Console, str], None]] = {
    "model": _print_model,
    "partition": _print_partition,
    "data set": _print_dataset,
    "metric": _print_metric,
}


def _described(part: Any) -> str:
    """A part's documentation without that of its arguments, which follows by key."""
    return (inspect.getdoc(part) or "no documentation").partition("\n\nArgs:")[0]


def _print_prose(console: Console, text: str) -> None:
    """Documentation as wide as the terminal, and an empty line."""
    console.print(f"{reflowed(text, console.width)}\n", markup=False, highlight=False, soft_wrap=True)


def _print_class(console: Console, cls: type[Any], prefix: str, named: Mapping[str, str] | None = None) -> None:
    """Print the documentation of a class's module, or of a class of many, and the keys that set its fields."""
    module = inspect.getmodule(cls)
    own = module is not None and module.__name__.startswith(("potluck.methods.", "potluck.data.partition."))
    text = (module and module.__doc__) if own or prefix == "method" else (inspect.getdoc(cls) or "").split("\n")[0]
    _print_prose(console, text or "")
    for key, value in (named or {}).items():
        console.print(f"{prefix}.{key}={value}", markup=False)
    _print_settings(console, settings_of(cls), f"{prefix}.")


def _print_settings(console: Console, settings: Sequence[Setting], prefix: str) -> None:
    """For each key a line with its default, type and range, and below it its meaning."""
    for one in settings:
        required = one.default is MISSING
        words = f"one of {one.allowed}" if one.kind == "one of" else ", ".join(filter(None, (one.kind, one.allowed)))
        key, default = f"{prefix}{one.key}", "" if required else _shown(one.default)
        note = f"  {words}{'; has no default' if required else ''}"
        console.print(Text.assemble((key, "bold"), f"={default}", (note, "dim")), soft_wrap=True)
        console.print(Padding(Text(one.meaning or "-"), (0, 0, 0, 4)))


def _toml(value: Any) -> str:
    return json.dumps("" if value is None else value)


def _shown(default: Any) -> str:
    """A default as it is written in TOML; empty if nothing is set."""
    if default is None:
        return ""
    if isinstance(default, str):
        return default
    return json.dumps(default)


def _print_facts(console: Console, name: str) -> None:
    """What a method needs, asks and sends, and how it was verified, a line each."""
    try:
        facts = facts_of(get_method(name))
    except (AssertionError, ConfigError) as error:  # a method from elsewhere, whose documentation is not in our form
        console.print(f"    [yellow]{escape(f'potluck check {name}: {error}')}[/yellow]", soft_wrap=True)
        return
    for head, text in facts.lines():
        console.print(f"    {head:<11}{text}", highlight=False, markup=False, soft_wrap=True)
    console.print()


def _print_run(console: Console, folder: Path, digest: bool) -> None:
    manifest, digests = open_folder(folder), run_digest(folder)
    if not digest:
        console.print(json.dumps(manifest, indent=1), highlight=False, markup=False)
    for name, value in digests.items():
        console.print(f"{name} {value}", highlight=False)


def _first_line(kind: str, name: str) -> str:
    if kind == "methods":
        module = inspect.getmodule(get_method(name))
        return ((module and module.__doc__) or "").strip().split("\n")[0]
    if kind == "partitions":
        return (inspect.getdoc(get_partition(name)) or "").split("\n")[0]
    if kind == "datasets":
        return dataset_line(describe(name))
    if kind == "devices":
        return get_device(name).line
    if kind == "tasks":
        return (inspect.getdoc(type(TASKS[name])) or "").split("\n")[0]
    return (inspect.getdoc(get_model(name)) or "").split("\n")[0]


def _print_device(console: Console, name: str) -> None:
    """A class of devices, each of its numbers with its source."""
    device = get_device(name)
    console.print(f"{name}: {device.shows}", markup=False, soft_wrap=True)
    for key, source in device.sources.items():
        console.print(f"  {key:<11}{getattr(device, key):>9g}  {source}", markup=False, soft_wrap=True)


def dataset_line(description: Description) -> str:
    """A data set's input shape, and its classes, or its task and the width of an output."""
    width, task = description.num_classes, description.task
    outputs = f"{width} classes" if task.has_classes else f"{task.name}, {width} output{'s' if width != 1 else ''}"
    return f"inputs {shown(description.input_shape)}, {outputs}"
