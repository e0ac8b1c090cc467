"""Reference pages from the package: configuration, command line, models, data sets, partitions, tasks, Python names."""

import ast
import importlib
import inspect
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import typer
import yaml

import potluck
from potluck import fl
from potluck.cli.catalogue import dataset_line
from potluck.cli.commands import app
from potluck.core.ground.discovery import module_names
from potluck.core.tasks.named import TASKS
from potluck.data.datasets import describe
from potluck.data.partition import get_partition
from potluck.experiment.settings.keys import Setting, options_of, settings_of
from potluck.experiment.settings.schema import TABLES
from potluck.models import get_model, list_models
from potluck.recipes import list_recipes, load_recipe
from sitegen.text import code, default, definitions, fenced, kind, prose, settings, table


def configuration() -> str:
    """Every key of the tables that all experiments have."""
    parts = [
        "# Configuration",
        "An experiment has three tables: `federation`, `method` and `run`. Write them into a TOML file, or type a key"
        " as an override behind `potluck run`: `run.rounds=5`. What is not given has its default; a key that does not"
        " exist is refused with the nearest ones. `potluck show federation` and `potluck show run` print this page.",
        "The keys of `method` are `name` and the hyper-parameters of the method, on [its page](../methods/index.md)."
        " The file may also name a `preset`.",
    ]
    for name, cls in TABLES.items():
        parts += [f"## {code(name)}", prose(_first_paragraph(cls))]
        parts += [_key(f"{name}.", one) for one in settings_of(cls)]
        if name == "federation":
            parts.append("The keys below `federation.partition` are those of the [partition](partitions.md).")
    return "\n\n".join(parts) + "\n"


def _key(table_name: str, one: Setting) -> str:
    """A key that other pages and the search can find."""
    lines = [f":type: {kind(one)}", f":default: {default(one)}", "", prose(one.meaning)]
    return "\n".join([f"```{{confval}} {table_name}{one.key}", *lines, "```"])


def _first_paragraph(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n\n")[0]


def partitions() -> str:
    """Every partition with its keys."""
    parts = ["# Partitions", "How a training set is divided among clients: `federation.partition`."]
    for name in module_names("potluck.data.partition"):
        cls = get_partition(name)
        text = inspect.cleandoc((inspect.getmodule(cls) or cls).__doc__ or "")
        parts += [f"## {code(name)}", prose(text), settings(settings_of(cls))]
    return "\n\n".join(filter(None, parts)) + "\n"


def datasets() -> str:
    """Every data set by name."""
    rows = ((code(name), prose(dataset_line(describe(name)))) for name in module_names("potluck.data.datasets"))
    return "\n\n".join(
        [
            "# Data sets",
            "Names for `federation.dataset` and `federation.public`. `digits` comes with scikit-learn and `mnist1d` is"
            " generated; the others are read from the folder that `POTLUCK_DATA` names, or else from the Hugging Face"
            " hub. Your own are a folder of images, an `.npz` file or a function: [own"
            " parts](../guides/own-parts.md).",
            table(("name", "examples"), rows),
        ]
    ) + "\n"  # fmt: skip


def recipes(cards: Container[str] = ()) -> str:
    """Every table of a paper that can be run again.

    Args:
        cards: names of the recipes that have a page in `reproduction/`.
    """
    parts = [
        "# Recipes",
        "Tables and figures of papers, run by `potluck reproduce NAME`: the settings, the paper's numbers and what"
        " is known to differ. [How](../guides/reproduce.md), and [what a card says](../reproduction/index.md).",
    ]
    for name in list_recipes():
        recipe = load_recipe(name)
        paper = recipe.paper
        facts = [
            ("Paper", f"[{prose(paper.title)}]({paper.url}){paper.edition}, {paper.place}"),
            ("Methods", ", ".join(f"[{code(one)}](../methods/{one}.md)" for one in recipe.methods)),
            ("Data", ", ".join(map(code, recipe.datasets))),
            ("Measured", prose(recipe.measured.words)),
            *([("Card", f"[ours beside the paper's](../reproduction/{name}.md)")] if name in cards else []),
        ]
        known = "\n".join(f"- {prose(one)}" for one in recipe.deviations or ("Nothing.",))
        parts += [f"## {code(name)}", f"{prose(recipe.title)}.", table(("", ""), facts), "Known to differ:", known]
    return "\n\n".join(parts) + "\n"


def models() -> str:
    """Every model, by family, with the options of the family."""
    families: dict[str, list[str]] = {}
    for name in list_models():
        home = get_model(name).__module__
        if home.startswith("potluck."):
            families.setdefault(home, []).append(name)
    parts = [
        "# Models",
        "Names for `federation.models`, which are dealt to the clients; a table sets options:"
        ' `{name = "cnn3", width = 64}`. [Your own](../guides/bring-your-own-model.md) are functions or modules.',
    ]
    for home, names in families.items():
        text = inspect.cleandoc(importlib.import_module(home).__doc__ or "").partition("\n\nOptions:")[0]
        head, _, rest = text.partition("\n\n")
        options = {name: options_of(get_model(name), without=("scale",)) for name in names}
        meanings = {one.key: one for entries in options.values() for one in entries}
        parts += [
            f"## {prose(head.removesuffix('.').partition(':')[0])}",
            prose(head),
            prose(rest),
            definitions((code(name), _model(name, options[name])) for name in names),
            "Options, whose defaults stand with each model:" if meanings else "",
            definitions((f"{code(one.key)}, {kind(one)}", prose(one.meaning)) for one in meanings.values()),
        ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _model(name: str, options: list[Setting]) -> str:
    """What a model is, and the defaults of its options."""
    chosen = ", ".join(f"{code(one.key)} = {default(one)}" for one in options)
    return f"{prose(_first_paragraph(get_model(name)))}{' Default: ' + chosen + '.' if chosen else ''}"


def tasks() -> str:
    """Every task with its metrics and keys."""
    parts = [
        "# Tasks and metrics",
        "What outputs and targets mean: `federation.task`. [More on tasks](../concepts/tasks.md).",
    ]
    for name, task in TASKS.items():
        metrics = ", ".join(metric.label for metric in task.metrics)
        parts += [
            f"## {code(name)}",
            prose(_first_paragraph(type(task))),
            f"Metrics: {prose(metrics)}.",
            settings(settings_of(type(task))),
        ]
    return "\n\n".join(filter(None, parts)) + "\n"


def commands() -> dict[str, Any]:
    """Every command by name."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="potluck")
    return {name: group.get_command(context, name) for name in group.list_commands(context)}


def command_line() -> str:
    """Every command with its arguments and options."""
    group: Any = typer.main.get_command(app)
    parts = [
        "# Command line",
        "What a user can mend ends with one line and exit code 2; a failed run, check or comparison with 1; an"
        " interrupted one with 130.",
        "## `potluck`",
        prose(group.help),
        definitions(_parameters(group)),
    ]
    for name, command in commands().items():
        words = command.collect_usage_pieces(typer.Context(command))
        parts += [
            f"## `potluck {name}`",
            prose(command.help),
            fenced(" ".join(["potluck", name, *words])),
            definitions(_parameters(command)),
        ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _parameters(command: Any) -> Iterable[tuple[str, str]]:
    """Arguments and options, each with its explanation and default."""
    context = typer.Context(command)
    for one in command.get_params(context):
        if one.param_type_name == "argument":
            words = code(one.make_metavar(context))
        else:
            flag = one.is_flag and not one.secondary_opts
            names = ", ".join([*one.opts, *one.secondary_opts])
            words = code(names if flag or one.secondary_opts else f"{names} {one.make_metavar(context)}")
        stated = isinstance(one.default, str | int | float | Path) and not isinstance(one.default, bool)
        given = f" Default: {code(str(one.default))}." if stated and "Default:" not in one.help else ""
        again = " May be repeated." if one.param_type_name == "option" and one.multiple else ""
        needed = " Required." if one.required else ""
        yield words, f"{prose(one.help)}{given}{again}{needed}"


PAGES = {
    "running": "Running and comparing",
    "words": "The words of a method",
    "rooms": "Rooms of the words",
}
"""The pages of `from potluck import ...`, of what stands flat in `potluck.fl`, and of the modules there."""

FIRST = (
    "potluck.api.run",
    "potluck.api.result",
    "potluck.core.method",
    "potluck.core.roles",
    "potluck.core.message",
    "potluck.core.schema",
    "potluck.core.requests.fit",
    "potluck.core.requests.beside_training",
    "potluck.core.needs",
    "potluck.core.federation",
    "potluck.core.requests.examples",
    "potluck.parts.sharing",
)
"""Modules that come before the others on their pages."""

MODULES = (
    "potluck.core.tasks.metric",
    "potluck.core.tasks.task",
    *(f"potluck.core.tasks.{name}" for name in ("classification", "binary", "multilabel", "regression")),
    *(f"potluck.core.tasks.{name}" for name in ("next_token", "token_classification", "scoring")),
    "potluck.data.datasets",
    "potluck.data.partition",
    "potluck.models",
    "potluck.recipes",
    "potluck.testing",
)
"""Public modules beside these names."""

RECORDS = {
    "potluck.core.summed": ("Summed",),
    "potluck.core.requests.fit": ("FitReport",),
    "potluck.core.roles": ("Failure",),
    "potluck.core.requests.schedule": ("Schedule",),
    "potluck.data.dataset": ("Dataset", "Description"),
    "potluck.engine.answers.events": ("ClientEnd",),
    "potluck.experiment.results.evaluate": ("Evaluation",),
    "potluck.experiment.watching.observers": ("RunStart", "RoundStart", "EvaluationStart", "RunEnd"),
    "potluck.experiment.results.result": ("Result",),
    "potluck.records": ("RoundRecord", "ClientRecord"),
    "potluck.secure.agreement": ("Agreement",),
    "potluck.secure.client": ("SecureClient",),
    "potluck.secure.coverage": ("Coverage", "Summand", "whole_piece", "rows_piece", "piece_at"),
    "potluck.secure.fixed": ("FixedPoint",),
    "potluck.secure.server": ("SecureServer", "SecureSums"),
    "potluck.secure.together": ("Addend", "SecureCourse", "new_identities", "public_keys", "summed_together"),
    "potluck.testing.summing": ("secure_round",),
    "potluck.testing.worlds": ("World", "toy_federation"),
}
"""What users get and seldom import: what functions return, what observers are given, the noise that a promise of
privacy asks for, secure sums, and worlds for tests."""


def words() -> tuple[dict[str, str], dict[str, str]]:
    """The home of each flat word of `potluck.fl`, and of each of its rooms, by name; those of users' face left out."""
    flat: dict[str, str] = {}
    rooms: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(fl)).body:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if inspect.ismodule(getattr(fl, alias.name)):
                rooms[alias.name] = f"{node.module}.{alias.name}"
            elif alias.name not in potluck._HOMES:
                flat[alias.name] = str(node.module)
    return flat, rooms


def python_names() -> dict[str, str]:
    """The pages of the Python reference by path."""
    flat, rooms = words()
    of_users = {name: f"potluck.{home}" for name, home in potluck._HOMES.items()}
    within = {room: [name for name in public_names(_module(home)) if name not in flat] for room, home in rooms.items()}
    sections = {
        "running": [(code(home.removeprefix("potluck.")), home, names) for home, names in _by_home(of_users)],
        "words": [(code(home.removeprefix("potluck.")), home, names) for home, names in _by_home(flat)],
        "rooms": [(code(f"fl.{room}"), home, within[room]) for room, home in sorted(rooms.items())],
    }
    intros = {
        "running": "Import these names from `potluck`.",
        "words": "`from potluck import fl`, then `fl.Client`.",
        "rooms": "`from potluck import fl`, then `fl.losses.distillation`.",
    }
    pages: dict[str, str] = {}
    for page, title in PAGES.items():
        parts = [f"# {title}", intros[page]]
        for head, home, names in sections[page]:
            parts += [f"## {head}", prose(_first_paragraph(_module(home)))]
            parts += [_auto(home, name) for name in names]
        pages[f"reference/python/{page}.md"] = "\n\n".join(parts) + "\n"
    parts = ["# Further modules", "Import these names from the modules in which they stand."]
    for home in MODULES:
        module = _module(home)
        parts += [f"## {code(home)}", prose(_first_paragraph(module))]
        parts += [_auto(home, name) for name in public_names(module)]
    parts += ["## What is returned, what observers are given, noise for privacy, secure sums, small worlds for tests"]
    parts += [_auto(home, name) for home, names in RECORDS.items() for name in names]
    pages["reference/python/modules.md"] = "\n\n".join(parts) + "\n"
    return pages


def _by_home(homes: dict[str, str]) -> list[tuple[str, list[str]]]:
    """The names of each home, those of `FIRST` before the others."""
    ordered = sorted(set(homes.values()), key=lambda home: (_rank(home), home))
    return [(home, [name for name, one in homes.items() if one == home]) for home in ordered]


def _rank(home: str) -> int:
    return FIRST.index(home) if home in FIRST else len(FIRST)


def public_names(module: Any) -> list[str]:
    """What a module offers: its `__all__`, or the functions and classes that it defines without an underscore."""
    defined = (
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )
    return list(getattr(module, "__all__", defined))


def _module(home: str) -> Any:
    return importlib.import_module(home)


def _auto(home: str, name: str) -> str:
    """The directive that documents a name where it is defined."""
    value = getattr(_module(home), name)
    named = getattr(value, "__name__", "") == name  # an alias of a type has the name of that type
    what = "class" if named and inspect.isclass(value) else "function" if inspect.isroutine(value) else "data"
    lines = [f".. auto{what}:: {value.__module__ if named else home}.{name}"]
    lines += {"class": ["   :members:"], "data": ["   :no-value:"]}.get(what, [])
    return "\n".join(["```{eval-rst}", *lines, "```"])


def citation(cff: str) -> str:
    """How to cite Potluck, from the text of its CITATION.cff."""
    facts = yaml.safe_load(cff)
    authors = " and ".join("{" + one["name"] + "}" for one in facts["authors"])
    entry = {
        "title": "{" + facts["title"] + "}",
        "author": "{" + authors + "}",
        "version": "{" + facts["version"] + "}",
        "note": "{" + facts["license"] + "}",
    }
    lines = [f"  {name} = {value}," for name, value in entry.items()]
    return "\n\n".join(
        [
            "# How to cite",
            facts["message"] + " The same facts are in `CITATION.cff`, which reference managers read.",
            fenced("\n".join(["@software{potluck,", *lines, "}"]), "bibtex"),
            "Cite the papers of the methods that you ran as well; each [method's page](methods/index.md) begins with"
            " its paper. Name the version, the experiment's TOML file and the runs' digests, which `potluck show FOLDER"
            " --digest` prints: with these three a reader can repeat your runs, and see whether it worked.",
        ]
    ) + "\n"  # fmt: skip
