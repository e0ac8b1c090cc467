"""The pages of the site: written ones with links that lead to their places on the site, and generated ones."""

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sitegen import methods, reference
from sitegen.methods import toctree

_FENCE = re.compile(r"^( *)(```+|:::+).*?^\1\2 *$", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Section:
    """A folder of pages with an index of its own.

    Attributes:
        title: of the index.
        intro: below the title.
        first: names of pages that come first, in this order; the others follow by name.
    """

    title: str
    intro: str
    first: tuple[str, ...] = ()


SECTIONS = {
    "tutorials": Section(
        "Tutorials",
        "Each takes a quarter of an hour on a laptop, without a network. Type what stands behind `$`.",
        ("first-run", "own-model", "own-data", "own-method", "comparison", "deploy"),
    ),
    "guides": Section(
        "Guides",
        "How to do one thing, with all that there is to choose.",
        (
            "python",
            "bring-your-own-model",
            "tables-and-text",
            "budgets",
            "twin",
            "asynchronous",
            "without-pytorch",
            "own-parts",
            "add-a-method",
            "compare",
            "report",
            "analyse",
            "attack",
            "liars",
            "follow-a-run",
        ),
    ),
    "concepts": Section("Concepts", "How it works, and what can be relied on.", ("a-round", "tasks", "privacy")),
    "decisions": Section("Decisions", "Choices that bind, and their reasons."),
    "reproduction": Section("Reproduction", "Which of the papers' numbers come out, and how far the others are."),
    "benchmarks": Section("Benchmarks", "What was measured, on what, and by which command."),
}

OUTSIDE = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "benchmarks/speed/README.md": "benchmarks/how-speed-is-measured.md",
}
"""Pages that do not lie in `docs/`, beside the benchmarks' results: their places on the site."""

NAMED = {"readme": "README <readme>", "security": "Security <security>"}
"""Entries of the side bar whose titles are too long for it, or say too little there."""

REFERENCE = ("configuration", "command-line", "models", "datasets", "partitions", "tasks", "recipes", "python/index")


def pages(root: Path) -> dict[str, str]:
    """The text of every page of the site by its path there, such as `guides/compare.md`.

    Args:
        root: of the repository.
    """
    homes = written(root)
    found = {home: _moved(root, file, home, homes) for file, home in homes.items()}
    found |= _generated(root)
    found |= _indexes(found)
    found["index.md"] += _look_up(found) + _navigation(found)
    return found


def written(root: Path) -> dict[str, str]:
    """Written pages: where each stands on the site, by its path in the repository."""
    docs = [
        path
        for path in sorted((root / "docs").rglob("*.md"))
        if not path.is_relative_to(root / "docs/_build") and "sitegen" not in path.parts
    ]
    homes = {path.relative_to(root).as_posix(): path.relative_to(root / "docs").as_posix() for path in docs}
    homes |= {
        f"benchmarks/results/{path.name}": f"benchmarks/{path.name}"
        for path in sorted((root / "benchmarks/results").glob("*.md"))
    }
    return {file: home.replace("README.md", "index.md") for file, home in homes.items()} | OUTSIDE


def linked_files(root: Path) -> dict[str, Path]:
    """Files that pages link to and that are no pages, by their place on the site."""
    homes = written(root)
    found: dict[str, Path] = {}
    for file in homes:
        for _, _, target in _LINK.findall(_FENCE.sub("", (root / file).read_text())):
            path = _in_repository(root, file, target)
            if path and path not in homes and (root / path).is_file():
                found[f"files/{path}"] = root / path
    return found


def _in_repository(root: Path, file: str, target: str) -> str | None:
    """The path of what a link leads to, if it lies in the repository."""
    if re.match(r"[a-z]+:|#", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(file), target.partition("#")[0]))
    return path if not path.startswith("..") and (root / path).exists() else None


def _moved(root: Path, file: str, home: str, homes: Mapping[str, str]) -> str:
    """A written page with links that are right in its place on the site; those to nowhere stay, and fail the build."""

    def relative(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        path = _in_repository(root, file, target)
        if path is None:
            return link[0]
        if (root / path).is_dir():
            return text
        place = homes.get(path, f"files/{path}")
        anchor = target.partition("#")[2]
        way = posixpath.relpath(place, posixpath.dirname(home) or ".")
        return f"{picture}[{text}]({way}{'#' + anchor if anchor else ''})"

    text = (root / file).read_text()
    parts, end = [], 0
    for block in _FENCE.finditer(text):
        parts += [_LINK.sub(relative, text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, _LINK.sub(relative, text[end:])])


def _generated(root: Path) -> dict[str, str]:
    own = [methods.documented(name) for name in methods.own_methods()]
    cards = {path.stem for path in (root / "docs/reproduction").glob("*.md")}
    found = {f"methods/{one.name}.md": methods.page(one, methods.reproduction(one.name, cards)) for one in own}
    found |= methods.index(own)
    found |= {
        "reference/configuration.md": reference.configuration(),
        "reference/command-line.md": reference.command_line(),
        "reference/models.md": reference.models(),
        "reference/datasets.md": reference.datasets(),
        "reference/partitions.md": reference.partitions(),
        "reference/tasks.md": reference.tasks(),
        "reference/recipes.md": reference.recipes(cards),
        "cite.md": reference.citation((root / "CITATION.cff").read_text()),
    }
    return found | reference.python_names()


def _indexes(found: Mapping[str, str]) -> dict[str, str]:
    """The index of each folder; a page that stands there as its index is its beginning."""
    made: dict[str, str] = {}
    for folder, section in SECTIONS.items():
        names = [PurePosixPath(path).stem for path in sorted(found) if posixpath.dirname(path) == folder]
        names = [name for name in (*section.first, *names) if name != "index"]
        if names:
            made[f"{folder}/index.md"] = _index(found, folder, section, list(dict.fromkeys(names)))
    python = Section("Python", "What `potluck` and `potluck.fl` give, and the public modules beside them.")
    made["reference/python/index.md"] = _index(found, "reference/python", python, [*reference.PAGES, "modules"])
    links = "\n".join(f"- [{_title(found | made, f'reference/{name}.md')}]({name}.md)" for name in REFERENCE)
    made["reference/index.md"] = f"# Reference\n\nMade from the package itself.\n\n{links}\n\n{toctree([*REFERENCE])}\n"
    return made


def _index(found: Mapping[str, str], folder: str, section: Section, names: list[str]) -> str:
    own = found.get(f"{folder}/index.md")
    links = "\n".join(f"- [{_title(found, f'{folder}/{name}.md')}]({name}.md)" for name in names)
    head = own if own is not None else f"# {section.title}\n\n{section.intro}\n\n{links}"
    return f"{head.rstrip()}\n\n{toctree(names)}\n"


def _title(found: Mapping[str, str], path: str) -> str:
    first = re.search(r"^# (.+)", found[path], flags=re.MULTILINE)
    if not first:
        raise ValueError(f"{path} has no title")
    return first[1]


def _look_up(found: Mapping[str, str]) -> str:
    """The landing page's way to the pages that are generated."""
    count = len(methods.own_methods())
    return f"""
## Look up

- [{count} methods](methods/index.md), each with its paper, what it sends, what it needs, its hyper-parameters, how far
  it was verified, and its code
- [Every key of a configuration](reference/configuration.md) and [every command](reference/command-line.md)
- [Models](reference/models.md), [data sets](reference/datasets.md), [partitions](reference/partitions.md), [tasks and
  metrics](reference/tasks.md)
- [The wire](concepts/wire.md), for nodes in other languages
- [The names in Python](reference/python/index.md)
"""


def _navigation(found: Mapping[str, str]) -> str:
    """The side bar: sections, and every page at the top that has no other place."""
    placed = ("tutorials", "guides", "concepts", "methods", "reference", "reproduction", "benchmarks", "decisions")
    top = [path.removesuffix(".md") for path in found if "/" not in path and path != "index.md"]
    last = ["security", "hostile-answers", "contributing", "changelog", "readme", "cite"]
    others = [name for name in sorted(top) if name not in ("glossary", *last)]
    folders = [f"{name}/index" for name in placed if f"{name}/index.md" in found]
    learn, look = folders[:3], folders[3:5]
    return "\n\n" + "\n\n".join(
        [
            toctree([*learn, "glossary"], ":caption: Learn"),
            toctree(look, ":caption: Look up"),
            toctree([*folders[5:], *others, *[NAMED.get(name, name) for name in last]], ":caption: About"),
        ]
    ) + "\n"  # fmt: skip
