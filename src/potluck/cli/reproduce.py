"""`potluck reproduce`: list the recipes, or the papers' tables and figures, or run a recipe and print ours beside."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from potluck.analysis.report import write_report
from potluck.api.analyse import Scope, analysis_of
from potluck.cli import stages
from potluck.cli.compare import run_missing
from potluck.cli.terminal import console_on
from potluck.core.ground.errors import ConfigError, DataError
from potluck.data.datasets import load
from potluck.experiment.running.several import Ended
from potluck.experiment.settings.schema import Experiment
from potluck.recipes import Recipe, list_recipes, load_recipe
from potluck.recipes.beside import Planned, Reproduced, beside, finished, plan
from potluck.recipes.card import card, failures, groups, words
from potluck.recipes.papers import load_papers
from potluck.recipes.scaling import check_scale

_WIDE = 1000
_LISTED = 100  # columns of the list of tables and figures, whose cells are sentences


@dataclass(frozen=True)
class Asked:
    """What of a recipe is run and shown.

    Attributes:
        scale: above 0 and at most 1.
        seeds: how many.
        rows: pattern of rows' names; `columns` of columns' titles.
        runs: folder of the runs.
        processes: runs at a time.
        run: whether missing runs are run, or only finished ones shown.
        card: file for the reproduction card.
        note: what the reader of the card must know besides; "" for nothing.
    """

    scale: float
    seeds: int
    rows: str
    columns: str
    runs: Path
    processes: int | None
    run: bool
    card: Path | None
    note: str = ""

    @property
    def part(self) -> tuple[str, ...]:
        """The options that choose rows and columns, if they leave any out."""
        patterns = {"--only": self.rows, "--columns": self.columns}
        return tuple(word for option, pattern in patterns.items() if pattern != "*" for word in (option, pattern))

    def check(self) -> None:
        """Refuse what would only be refused once everything has run.

        Raises:
            ConfigError: the scale is not between 0 and 1, or the card is no Markdown file or cannot be there.
        """
        check_scale(self.scale)
        if self.card and self.card.suffix != ".md":
            raise ConfigError(f"--card {self.card}: a card is written as Markdown; expected a name that ends in .md")
        if self.card and not self.card.absolute().parent.is_dir():
            raise ConfigError(f"--card {self.card}: no such folder {self.card.parent}; make it first")


def print_recipes() -> None:
    """Print all recipes with their size."""
    stages.clear()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("recipe", "paper", "rows", "data sets", "runs × rounds × clients"):
        table.add_column(name)
    for name in list_recipes():
        recipe = load_recipe(name)
        runs = len(list(recipe.cells()))
        missing = sum(row.missing is not None for row in recipe.rows)
        count = f"{len(recipe.rows)}" + (f" ({missing} not here)" if missing else "")
        table.add_row(name, _source(recipe), count, ", ".join(recipe.datasets), f"{runs} × {_rounds_of(recipe)}")
    console = _console()
    console.print(table)
    console.print(
        "Runs, rounds and clients are those of one seed at the papers' full size, which is large without a GPU."
        "\nSmaller: potluck reproduce RECIPE --scale 0.1 --only 'Fed*' --columns '*IID*'"
        "\nEvery table and figure of the papers, and what reproduces it: potluck reproduce --list",
        highlight=False,
        markup=False,
    )


def print_papers(pattern: str) -> None:
    """Print the tables and figures of the papers that a pattern selects, and what reproduces each, or why nothing."""
    papers = load_papers(pattern)
    stages.clear()
    console = _console()
    console.width = min(console.width, _LISTED)
    for paper in papers:
        version = f" ({paper.version})" if paper.version else ""
        console.print(f"\n{paper.name}: {paper.title}{version}\n{paper.url}", highlight=False, markup=False)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("place", no_wrap=True)
        table.add_column("shows")
        table.add_column("reproduced by, or why not")
        for place in paper.places:
            table.add_row(*(escape(cell) for cell in (place.place, place.shows, place.how)))
        console.print(table)
    console.print("A recipe is run by potluck reproduce RECIPE; potluck reproduce lists them.", highlight=False)


def _source(recipe: Recipe) -> str:
    paper = recipe.paper
    return f"{paper.short or paper.title.split(':')[0]}{paper.edition}, {paper.place}"


def _rounds_of(recipe: Recipe) -> str:
    trees = [recipe.tree(row, setting) for row, setting in recipe.cells()]
    rounds = sorted({tree["run"]["rounds"] for tree in trees})
    clients = sorted({tree["federation"]["clients"] for tree in trees})
    return f"{_range(rounds)} × {_range(clients)}"


def _range(values: Sequence[int]) -> str:
    return "–".join(str(value) for value in dict.fromkeys((values[0], values[-1]))) if values else "0"


def print_reproduction(name: str, assignments: Sequence[str], asked: Asked) -> bool:
    """Run what is missing of a recipe, print ours beside the paper's; whether nothing failed."""
    asked.check()
    whole = load_recipe(name)
    recipe = whole.part(asked.rows, asked.columns)
    planned = plan(whole, asked.scale, asked.seeds, list(assignments), recipe)
    stages.clear()
    console = _console()
    before = finished(planned, asked.runs)
    empty = beside(recipe, planned, before, scale=asked.scale, seeds=asked.seeds, assignments=assignments)
    _say(console, [*words(empty), _ahead(planned, sum(end is not None for end in before))])
    ends = _run(planned, before, asked) if asked.run else before
    stages.clear()
    found = beside(
        recipe,
        planned,
        ends,
        scale=asked.scale,
        seeds=asked.seeds,
        assignments=assignments,
        options=asked.part,
    )
    _print_tables(console, found)
    _say(console, [f"Known deviations from the paper:\n{_listed(recipe.deviations)}"])
    _say(console, failures(found))
    if asked.card:
        asked.card.write_text(card(found, asked.note), encoding="utf-8")
        typer.echo(f"Card: {asked.card}")
    folders = [end.folder for end in ends if end and end.folder and end.problem is None]
    if folders:
        _draw(recipe, folders, asked.runs / recipe.name)
    return not found.problems


def _draw(recipe: Recipe, folders: Sequence[Path], to: Path) -> None:
    """Draw the figures of a recipe's finished runs, if it is of any, as `potluck analyse` and `potluck report` do."""
    by = recipe.measured.by
    if (how := recipe.analysis) is not None:
        scope = Scope(by, clients=how.clients, examples=how.examples, map_class=how.map_class)
        page = analysis_of(folders, scope, stages.show_stages).write(to)
        stages.clear()
        typer.echo(f"Figures: {page}, and as SVG, PDF and CSV beside it")
    if recipe.curves is not None:
        typer.echo(f"Curves: {write_report(folders, to, measure=by, smooth=recipe.curves.smooth)}")


def _run(planned: Sequence[Planned], before: Sequence[Ended | None], asked: Asked) -> list[Ended | None]:
    """Run what is missing; runs whose data are not there fail at once, all with one line."""
    left = [one.experiment for one, end in zip(planned, before, strict=True) if end is None]
    stages.show_stages("reading the data")
    lacking = _lacking(dict.fromkeys(name for experiment in left for name in _datasets(experiment)))
    stages.clear()
    ends = list(before)
    wanted: list[int] = []
    for index, one in enumerate(planned):
        problem = next((lacking[name] for name in _datasets(one.experiment) if name in lacking), None)
        if ends[index] is None and problem:
            ends[index] = Ended(one.experiment, None, problem)
        elif ends[index] is None:
            wanted.append(index)
    experiments, names = [planned[index].experiment for index in wanted], [planned[index].name for index in wanted]
    for index, end in zip(wanted, run_missing(experiments, asked.runs, asked.processes, names), strict=True):
        ends[index] = end
    return ends


def _lacking(names: Iterable[str]) -> dict[str, str]:
    """Of these data sets those that cannot be had, and why; the others are decoded once, for all runs."""
    found: dict[str, str] = {}
    for name in names:
        try:
            load(name)
        except DataError as error:
            found[name] = str(error)
    return found


def _datasets(experiment: Experiment) -> list[str]:
    federation = experiment.federation
    return [name for name in (federation.dataset, federation.public) if name not in ("none", "holdout")]


def _ahead(planned: Sequence[Planned], done: int) -> str:
    return f"{len(planned)} runs, {done} of them finished." if planned else "There is nothing that can be run."


def _listed(points: Sequence[str]) -> str:
    return "\n".join(f"- {point}" for point in points) or "- none"


def _say(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def _console() -> Console:
    """Standard output; in a file or a pipe, lines are as long as they are."""
    console = console_on(sys.stdout)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def _print_tables(console: Console, found: Reproduced) -> None:
    for title, columns in groups(found.recipe).items():
        table = Table(title=title or None, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
        table.add_column("", overflow="fold")
        for column in columns:
            table.add_column(f"{column.title}\nours", justify="right")
            table.add_column("\npaper", justify="right")
            table.add_column("\ngap", justify="right")
        for row in found.recipe.rows:
            cells = [text for column in columns for text in found.cell(row, column).texts]
            table.add_row(row.name, *cells)
        console.print(table)
