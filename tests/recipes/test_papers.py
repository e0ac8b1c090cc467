"""The papers' tables and figures: none is left out, and each recipe stands at the one that it says it is of."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from potluck.cli.commands import app
from potluck.core.ground.errors import ConfigError
from potluck.recipes import list_recipes, load_recipe
from potluck.recipes.contents import read_recipe
from potluck.recipes.papers import Place, Publication, _with_recipes, list_papers, load_papers, shown_by

# How far each paper numbers its tables and figures. Of Felo's, only those that its first pages name.
NUMBERED = {
    "fedepth": (2, 5),
    "fedin-arxiv": (8, 9),
    "fedin-revision": (7, 12),
    "fedorion": (4, 6),
    "felo": (1, 2),
}
ROMAN = {"I": 1, "II": 2, "III": 3, "IV": 4, "V": 5, "VI": 6, "VII": 7, "VIII": 8}


@pytest.fixture(scope="module")
def papers():
    """All papers by name, with their recipes."""
    return {paper.name: paper for paper in load_papers()}


def numbers(paper, kind):
    found = [match[1] for one in paper.places if (match := re.match(rf"{kind} (\d+|[IVX]+)", one.place))]
    return {ROMAN.get(number) or int(number) for number in found}


@pytest.mark.parametrize("name", list_papers())
def test_no_table_and_no_figure_of_a_paper_is_left_out(papers, name):
    tables, figures = NUMBERED[name]
    assert numbers(papers[name], "Table") == set(range(1, tables + 1))
    assert numbers(papers[name], "Figure") == set(range(1, figures + 1))


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_stands_at_every_table_and_figure_that_it_names(papers, name):
    recipe = load_recipe(name)
    for version, place in shown_by(recipe):
        at = [one for one in papers.values() if (one.title, one.version) == (recipe.paper.title, version)]
        if not at and not place.startswith(("Table", "Figure")):
            continue  # a setting of Potluck's own
        (paper,) = at
        (found,) = [one for one in paper.places if one.place == place]
        assert name in found.recipes
        assert found.shows != recipe.title or not place.startswith(("Table", "Figure")), (
            f"{paper.name}.toml lacks {place}"
        )
        if version == recipe.paper.version:
            assert paper.url == recipe.paper.url


def test_a_command_that_is_named_exists_with_its_options(papers):
    commands = typer.main.get_command(app).commands
    by = {one.by for paper in papers.values() for one in paper.places if one.by}
    assert by
    for line in by:
        program, name, *options = shlex.split(line.partition(" (")[0])
        if program == "python":
            assert (Path(__file__).parents[2] / name).is_file()
        else:
            folder = [] if name == "plan" else ["runs"]
            commands[name].make_context(name, [*folder, *options])


def made(**recipe):
    tree = {
        "title": "One more",
        "paper": {"title": "A paper", "place": "our own setting", "url": "https://example.org"},
        "measured": {"by": "common", "words": "As it is."},
        "settings": {},
        "columns": [],
        "rows": [],
    }
    return read_recipe(tree | recipe, "mine", "mine")


def test_a_recipe_of_no_table_is_listed_behind_the_papers_own():
    paper = Publication("A paper", "https://example.org", (Place("Table 1", "all", lacks="a sketch"),))
    *_, found = _with_recipes(paper, [made()]).places
    assert (found.place, found.shows, found.how) == ("our own setting", "One more", "mine")


def test_a_table_that_nothing_reproduces_needs_a_reason():
    paper = Publication("A paper", "https://example.org", (Place("Table 1", "all"),))
    with pytest.raises(ConfigError, match="Table 1"):
        _with_recipes(paper, [])


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        ("Figure 2: curves", ("", "Figure 2")),
        ("Figure 6 (left): curves: smoothed", ("", "Figure 6 (left)")),
        ("Table 5a of the revision is the same", ("revision", "Table 5a")),
        ("Figure 6c and 6d: the same", ("", "Figure 6c and 6d")),
        ("Figure 9 of the arXiv version: the same", ("arXiv", "Figure 9")),
    ],
)
def test_a_further_figure_says_where_it_stands(figure, expected):
    assert shown_by(made(figures=[figure]))[1:] == [expected]


def test_a_further_figure_that_does_not_say_where_is_refused():
    with pytest.raises(ConfigError, match="recipe mine: figures: expected a sentence that begins with one"):
        shown_by(made(figures=["The same curves: Figure 9"]))
