"""The reproduction card: ours beside a paper's numbers, with what one must know to read them, as Markdown."""

import shlex
from collections.abc import Iterable, Sequence
from itertools import groupby

from potluck.analysis.export import TextTable, markdown
from potluck.analysis.provenance import provenance
from potluck.analysis.rendering import NOTHING
from potluck.recipes.beside import Reproduced
from potluck.recipes.contents import Column, Recipe
from potluck.records import Measure


def groups(recipe: Recipe) -> dict[str, tuple[Column, ...]]:
    """The columns by group, each of which is a table."""
    return {name: tuple(members) for name, members in groupby(recipe.columns, lambda column: column.group)}


def _headings(columns: Sequence[Column]) -> list[str]:
    """Three headings for each column: ours, the paper's, the gap."""
    titles = [column.title for column in columns]
    return [f"{title}{what}" for title in titles for what in (": ours", ": paper", ": gap")]


def words(found: Reproduced) -> list[str]:
    """What is compared, and how far the runs are from the paper's experiment; a paragraph each."""
    recipe, paper = found.recipe, found.recipe.paper
    lines = [f"{recipe.title}. {paper.title}{paper.edition}, {paper.place}: {paper.url}"]
    for (size, changed), settings in found.sizes.items():
        of = f" ({', '.join(settings)})" if len(found.sizes) > 1 else ""
        lines.append(f"Size{of}: {size}." + (f" Paper → here: {'; '.join(changed)}." if changed else ""))
    seeds = f"; the paper has {recipe.seeds}" if recipe.seeds else "; the paper does not say how many it has"
    lines.append(f"{found.seeds} seed{'s' if found.seeds > 1 else ''}{seeds}.")
    if found.assignments:
        lines.append(f"Changed by hand: {', '.join(found.assignments)}.")
    if not found.is_the_papers:
        lines.append(
            f"This is not the paper's experiment{_at(found.scale)}: a gap measures the difference in size too, and"
            " says nothing on whether the paper's numbers can be reached."
        )
    lines.append(f"Paper: {recipe.measured.words}{_spread(recipe)} Ours: {_how_ours(recipe)}.")
    lines += [f"The same runs: {figure}." for figure in recipe.figures]
    return lines


def _spread(recipe: Recipe) -> str:
    return f" Its ±: {recipe.measured.spread}." if recipe.measured.spread else ""


def _how_ours(recipe: Recipe) -> str:
    """How our numbers are measured."""
    counts, states = [column.millions for column in recipe.columns], [column.states for column in recipe.columns]
    counted = all(column.millions or column.states for column in recipe.columns)
    what = [] if counted else [f"{_models_of(recipe)}, after the last evaluated round, in percent"]
    what += ["± the standard deviation over seeds"] if what else []
    what += ["gaps in points"] if what else []
    what += ["million numbers of 32 bits that a client sent in a round, mean over clients"] if any(counts) else []
    cut = any(column.parts_cut for column in recipe.columns)
    what += ["the same with each part of the messages cut to two decimals, which are added"] if cut else []
    what += ["MiB of what clients hold, one of each architecture, models in whole MiB"] if any(states) else []
    return "; ".join(what)


def _models_of(recipe: Recipe) -> str:
    """Which models are measured, and on what; with the rows that are measured in another way."""
    others: dict[Measure, list[str]] = {}
    for row in recipe.rows:
        if (by := recipe.by(row)) != recipe.measured.by:
            others.setdefault(by, []).append(row.name)
    apart = [f"{', '.join(names)}: {_MEASURES[by]}" for by, names in others.items()]
    return _MEASURES[recipe.measured.by] + (f" ({'; '.join(apart)})" if apart else "")


_MEASURES: dict[Measure, str] = {
    "common": "mean over all clients' models on the common test set",
    "personal": "mean over all clients' models, each on its own test part",
    "pooled": "all clients' models, on all own test parts as if they were one",
    "global": "the server's model on the common test set",
    "validation": "mean over all clients' models, each on its own validation part",
}


def _at(scale: float) -> str:
    return f" but one at scale {scale:g}" if scale < 1 else ""


def failures(found: Reproduced) -> list[str]:
    """A line for each reason why runs are not finished, and for each row that cannot be run."""
    by_reason: dict[str, list[str]] = {}
    for name, problem in found.problems.items():
        by_reason.setdefault(problem, []).append(name)
    lines = [f"Not finished: {_few(names)}: {reason}" for reason, names in by_reason.items()]
    lines += [f"Not in Potluck: {row.name}: {row.missing}" for row in found.recipe.rows if row.missing]
    shown = {column.setting for column in found.recipe.columns}
    settings = {name: one.missing for name, one in found.recipe.settings.items() if name in shown and one.missing}
    return lines + [f"Not in Potluck: {name}: {reason}" for name, reason in settings.items()]


def _few(names: Sequence[str]) -> str:
    return "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


def card(found: Reproduced, note: str = "") -> str:
    """The card as Markdown, with a note of whoever makes it, such as on the copy of the data."""
    recipe = found.recipe
    notes = [f"Note: {note}"] if note else []
    parts = [f"# {recipe.name}", *words(found), *notes, *(_table(found, *group) for group in groups(recipe).items())]
    if left := failures(found):
        parts.append(_list(left))
    if of_rows := [f"{row.name}: {row.note}" for row in recipe.rows if row.note]:
        parts += ["## Rows", _list(of_rows)]
    parts += ["## Known deviations", _list(recipe.deviations or ("None.",))]
    parts += ["## Made with", _list([_command(found), *_made_with(found)])]
    return "\n\n".join(parts) + "\n"


def _table(found: Reproduced, title: str, columns: Sequence[Column]) -> str:
    rows = tuple(
        (row.name, *(text for column in columns for text in found.cell(row, column).texts)) for row in found.recipe.rows
    )
    heading = f"## {title}\n\n" if title else ""
    return heading + markdown(TextTable(("", *_headings(columns)), rows)).rstrip("\n")


def _list(points: Iterable[str]) -> str:
    return "\n".join(f"- {point}" for point in points)


def _command(found: Reproduced) -> str:
    more = "".join(f" {shlex.quote(one)}" for one in (*found.options, *found.assignments))
    recipe = shlex.quote(found.recipe.path or found.recipe.name)
    return f"`potluck reproduce {recipe} --scale {found.scale:g} --seeds {found.seeds}{more}`"


def _made_with(found: Reproduced) -> list[str]:
    """From the manifests: code, machine, data and dates of the runs."""
    runs = [run for of_cell in found.runs.values() for run in of_cell]
    if not runs:
        return ["No run is finished."]
    dates = sorted(str(run.manifest.get("started", "unknown"))[:10] for run in runs)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    known = [provenance(run) for run in runs]
    commits = _each(of.potluck_commit for of in known)
    return [
        f"{len(runs)} of {len(found.plan)} runs finished, started {when}",
        f"Potluck {_each(of.packages['potluck'] for of in known)}, commit {commits}",
        f"Python {_each(of.python for of in known)}, torch {_each(of.packages['torch'] for of in known)}",
        _each(of.machine for of in known),
        f"Checksums of the data: {_each(f'{run.dataset} {of.data}' for run, of in zip(runs, known, strict=True))}",
    ]


def _each(facts: Iterable[str]) -> str:
    """The different facts, in order of appearance."""
    return ", ".join(dict.fromkeys("unknown" if fact == NOTHING else fact for fact in facts))
