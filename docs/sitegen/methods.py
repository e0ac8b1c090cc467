"""A page for each of Potluck's methods, made of its documentation, its hyper-parameters and its file; and an index."""

import inspect
import re
import sys
import textwrap
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.core.families import FAMILIES
from potluck.core.ground.discovery import module_names
from potluck.core.method import Method
from potluck.core.needs import Need
from potluck.experiment.settings.keys import Setting, settings_of
from potluck.methods import get_method
from potluck.recipes import list_recipes, load_recipe
from potluck.testing.facts import Facts, facts_of
from potluck.testing.limits import limits_of
from sitegen.text import code, fenced, prose, settings, table

_YEAR = r"\b(?:19|20)\d\d\b"

EVIDENCE = Path(__file__).parents[1] / "evidence.md"
TITLES = ("Symbols", "Wire", "Limits", "Departures from the paper")


def own_methods() -> list[str]:
    """The names of the methods that Potluck brings, without those of other installed packages."""
    return module_names("potluck.methods")


@dataclass(frozen=True)
class Documented:
    """A method and what its file says of it.

    Attributes:
        name: as users type it.
        cls: its class.
        title: the first line of its documentation, without the full stop.
        source: the paper: authors, venue, address; empty if there is none.
        body: the paragraphs that explain it.
        sections: the text of each section, without indent.
        facts: at a glance.
        code: the file below its documentation.
    """

    name: str
    cls: type[Method[Any]]
    title: str
    source: str
    body: str
    sections: dict[str, str]
    facts: Facts
    code: str

    @property
    def short(self) -> str:
        """The method's name as its paper writes it."""
        return self.title.partition(":")[0]

    @property
    def year(self) -> str:
        """When it was published; empty if there is no paper."""
        found = re.search(_YEAR, self.source)
        return found[0] if found else ""

    @property
    def sent(self) -> str:
        """The entries of clients' replies."""
        return ", ".join(map(code, self.facts.up)) or "nothing"


def documented(name: str) -> Documented:
    """A method with its documentation taken apart.

    Raises:
        ValueError: the documentation lacks a section.
    """
    cls = get_method(name)
    module = sys.modules[cls.__module__]
    text = inspect.cleandoc(module.__doc__ or "")
    head, *parts = re.split(rf"^({'|'.join(TITLES)})\n(?=    )", text, flags=re.MULTILINE)
    sections = {title: textwrap.dedent(body).strip("\n") for title, body in zip(parts[::2], parts[1::2], strict=True)}
    if missing := set(TITLES) - sections.keys():
        raise ValueError(f"{module.__file__}: the documentation lacks {', '.join(sorted(missing))}")
    title, source, body = _head(head.strip())
    file = Path(str(module.__file__)).read_text()
    return Documented(
        name, cls, title.removesuffix("."), source, body, sections, facts_of(cls), _below_documentation(file)
    )


def _below_documentation(file: str) -> str:
    """What follows the line that ends a file's documentation, and that may say what ruff is to overlook."""
    return re.split(r'^"""(?:  #.*)?\n', file, maxsplit=1, flags=re.MULTILINE)[1].strip()


def _head(text: str) -> tuple[str, str, str]:
    """First line, paper and explanation."""
    title, *paragraphs = text.split("\n\n")
    if paragraphs and re.search(_YEAR, paragraphs[0]):
        return title, paragraphs[0], "\n\n".join(paragraphs[1:])
    return title, "", "\n\n".join(paragraphs)


def page(method: Documented, recipes: str = "") -> str:
    """The page of a method.

    Args:
        method: it.
        recipes: Markdown on the tables that can be run again, see `reproduction`; empty if there are none.
    """
    parts = [
        f"# {prose(method.title)}",
        prose(method.source) or "*There is no paper.*",
        prose(method.body),
        fenced(f"potluck run {method.name}", "console"),
        "## What it needs",
        _needs(method.cls),
        "## Wire",
        "What crosses the wire in a round, for one client. Sizes between bars are the bytes of tensors; the engine"
        " counts what is really sent, and the conformance suite compares.",
        _wire(method),
        "## Facts",
        table(("", ""), ((f"**{head}**" if head else "", prose(text)) for head, text in _facts(method))),
        evidence(method.name),
        "## Reproduction",
        recipes or "No table of its paper is a recipe.",
        "## Symbols",
        fenced(method.sections["Symbols"]),
        "## Hyper-parameters",
        _hyper_parameters(method),
        "## Limits",
        "Statements that the conformance suite carries out: `potluck check " + method.name + "`.",
        fenced("\n".join(one.text for one in limits_of(method.cls)) or "none"),
        "## Departures from the paper",
        prose(method.sections["Departures from the paper"]),
        "## The file",
        f"`src/potluck/methods/{method.name}.py`, below its documentation:",
        fenced(method.code, "python"),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def reproduction(name: str, cards: Container[str] = ()) -> str:
    """Markdown on the recipes of papers' tables in which a method stands; empty if there is none.

    Args:
        name: of the method.
        cards: names of the recipes that have a page in `reproduction/`.
    """
    found = {one: recipe for one in list_recipes() if name in (recipe := load_recipe(one)).methods}
    if not found:
        return ""
    lines = [
        f"- {code(f'potluck reproduce {one}')}: {prose(recipe.title)}, {prose(recipe.paper.place)}"
        + (f" ([card](../reproduction/{one}.md))" if one in cards else "")
        for one, recipe in found.items()
    ]
    intro = "Tables in which it stands can be run again, at any scale, beside the paper's numbers ([how]"
    return f"{intro}(../guides/reproduce.md)):\n\n" + "\n".join(lines)


def _needs(cls: type[Method[Any]]) -> str:
    needs: list[Need] = sorted(cls().needs(), key=str)
    if not needs:
        return "Nothing special: any models, any data."
    return table(("needs", "if that is lacking"), ((prose(need.text), prose(need.advice)) for need in needs))


def _facts(method: Documented) -> list[tuple[str, str]]:
    """What its class says, and what the engine saw when the page of evidence was made."""
    seen = re.findall(rf"^\| {method.name} \| (\D+) \| (yes|no) \|$", EVIDENCE.read_text(), flags=re.MULTILINE)
    observed = [line for keeps, stacks in seen for line in (("clients keep", keeps), ("stacked", stacks))]
    return [line for line in method.facts.lines() if line[0] not in ("needs", "down", "up")] + observed


def evidence(name: str) -> str:
    """A sentence on the second computation of a method, from the table of `docs/evidence.md`; empty without one."""
    rows = re.findall(rf"^\| {name} \| .+ \| (\de[+-]\d+) \|$", EVIDENCE.read_text(), flags=re.MULTILINE)
    if not rows:
        return ""
    return f"A [second computation](../evidence.md) from the paper differs by at most {max(rows, key=float)}."


def _wire(method: Documented) -> str:
    both = {"to the client": method.facts.down, "to the server": method.facts.up}
    rows = [(way, code(name), code(formula)) for way, entries in both.items() for name, formula in entries.items()]
    further = [line for line in method.sections["Wire"].split("\n") if line.startswith("with ")]
    text = table(("", "entry", "size"), rows) if rows else "Nothing is sent."
    return f"{text}\n\n{fenced(chr(10).join(further))}" if further else text


def _hyper_parameters(method: Documented) -> str:
    """The method's own keys first, then those of each nested table below a heading of its own."""
    found: dict[str, list[Setting]] = {"": []}
    for one in settings_of(method.cls):
        found.setdefault(one.key.rpartition(".")[0].partition(".")[0], []).append(one)
    intro = f"Keys of the table `method`, such as `potluck run {method.name} method.KEY=VALUE`."
    parts = [intro, settings(found.pop(""))]
    for name, entries in found.items():
        parts += [f"### {code(name)}", settings(entries)]
    if method.cls.variants:
        rows = (
            (prose(name), ", ".join(code(f"{key}={value}") for key, value in chosen.items()))
            for name, chosen in method.cls.variants.items()
        )
        intro = "Named options, each of which the conformance suite checks as well."
        parts += ["### Variants", intro, table(("variant", "settings"), rows)]
    return "\n\n".join(filter(None, parts))


def index(methods: list[Documented]) -> dict[str, str]:
    """The index of all methods, and the page of each family, by path; a family's page leads to those of its methods."""
    grouped = {name: found for name in FAMILIES if (found := [one for one in methods if one.cls.family == name])}
    rows = (
        (f"[{prose(one.short)}]({one.name}.md)", code(one.name), FAMILIES[one.cls.family].title.lower(), one.year)
        for one in sorted(methods, key=lambda one: one.short.lower())
    )
    pages = {
        "methods/index.md": "\n\n".join(
            [
                "# Methods",
                f"{len(methods)} methods, in families by what clients and server exchange. Which of them can run on"
                " your federation, and why others cannot, says `potluck check my_experiment.toml`; a method of your own"
                " is [one file](../guides/add-a-method.md).",
                "\n".join(f"- [{FAMILIES[name].title}](family-{name}.md): {FAMILIES[name].intro}" for name in grouped),
                toctree([f"family-{name}" for name in grouped]),
                "## All of them",
                table(("method", "name", "family", "published"), rows),
            ]
        )
        + "\n"
    }
    for name, members in grouped.items():
        rows = ((f"[{prose(one.short)}]({one.name}.md)", prose(_subtitle(one)), one.sent, one.year) for one in members)
        parts = [
            f"# {FAMILIES[name].title}",
            FAMILIES[name].intro,
            table(("method", "", "clients send", "published"), rows),
            toctree([f"{one.short} <{one.name}>" for one in members]),
        ]
        pages[f"methods/family-{name}.md"] = "\n\n".join(parts) + "\n"
    return pages


def _subtitle(method: Documented) -> str:
    return method.title.partition(": ")[2]


def toctree(entries: list[str], *options: str) -> str:
    """Places pages below the one that holds this, without showing them there."""
    return "\n".join(["```{toctree}", ":hidden:", *options, "", *entries, "```"])
