"""The papers whose tables and figures are reproduced: what each shows, in its order, and what reproduces it.

    title = "FedIN: Federated Intermediate Layers Learning for Model Heterogeneity"
    version = "revision"                  # which text of it, if there are several
    url = "https://openreview.net/forum?id=Nh3pX3AnPt"

    [[places]]                            # in the order of the text
    place = "Figure 5"
    shows = "curves of the non-IID runs on CIFAR-10"
    by = "potluck report"                 # a command, by itself or after the recipe's runs
    lacks = "what of it is not reproduced, and why"

Recipes are not named here: a place has those that name it, as the one that their numbers come from (`[paper]`) or
among the further `figures` that show the same runs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files

from potluck.core.ground.discovery import matching
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import Checked, require
from potluck.experiment.settings.strict import typed
from potluck.experiment.settings.tables import read_toml
from potluck.recipes import Recipe, list_recipes, load_recipe

_ENDING = ".toml"
_NUMBER = r"(?:\d+|[IVX]+)[a-z]?"
_PLACE = rf"(?:Table|Figure) {_NUMBER}(?: and {_NUMBER})?+(?: \(\w+\))?+"
_FIGURE = re.compile(rf"(?P<place>{_PLACE})(?: of the (?P<version>\w+)(?: version)?+)?+[: ].+")


@dataclass(frozen=True)
class Place(Checked):
    """A table or figure.

    Attributes:
        place: as the paper numbers it.
        shows: what it shows, in a few words.
        by: a command that reproduces it, by itself or from the runs of its recipes; "" if none is needed or known.
        lacks: what of it is not reproduced, and why; "" for nothing.
        recipes: names of the recipes that run it.
    """

    place: str
    shows: str
    by: str = ""
    lacks: str = ""
    recipes: tuple[str, ...] = ()

    @property
    def how(self) -> str:
        """What reproduces it, and why not the rest."""
        runs = ", ".join(self.recipes)
        ways = f"{runs}, then {self.by}" if runs and self.by else runs or self.by
        return "; ".join(part for part in (ways, self.lacks) if part)


@dataclass(frozen=True)
class Publication(Checked):
    """One text of a paper.

    Attributes:
        name: of its file.
        title: of the paper.
        url: where it can be read.
        version: which text, if there are several; "" if there is one.
        places: its tables and figures in order; behind them what its recipes compare beyond these.
    """

    title: str
    url: str
    places: tuple[Place, ...]
    version: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        names = [one.place for one in self.places]
        require(len(set(names)) == len(names), "places", "different tables and figures", names)


def list_papers(pattern: str = "*") -> list[str]:
    """Names of the papers that a shell-style pattern selects."""
    names = [place.name.removesuffix(_ENDING) for place in files(__name__).iterdir() if place.name.endswith(_ENDING)]
    return matching(sorted(names), pattern)


def load_papers(pattern: str = "*") -> list[Publication]:
    """The papers that a pattern selects, with their recipes.

    Raises:
        ConfigError: there is no such paper, a file is wrong, or a table or figure has neither a recipe, nor a command,
            nor a reason why not.
    """
    if not (names := list_papers(pattern)):
        raise ConfigError(f"no paper {pattern!r}; the papers: {', '.join(list_papers())}")
    recipes = [load_recipe(name) for name in list_recipes()]
    return [_with_recipes(_read(name), recipes) for name in names]


def shown_by(recipe: Recipe) -> list[tuple[str, str]]:
    """The places that a recipe runs, each behind the version of its paper: its own one, and its `figures`.

    Raises:
        ConfigError: one of its figures does not begin with a table or figure.
    """
    found = [(recipe.paper.version, recipe.paper.place)]
    for figure in recipe.figures:
        match = _FIGURE.fullmatch(figure)
        if match is None:
            good = "a sentence that begins with one, such as 'Figure 5: the same curves'"
            raise ConfigError(f"recipe {recipe.name}: figures: expected {good}, found {figure!r}")
        found.append((match["version"] or recipe.paper.version, match["place"]))
    return found


def _read(name: str) -> Publication:
    with as_file(files(__name__) / f"{name}{_ENDING}") as path:
        return replace(typed(Publication, read_toml(path), "paper", f"paper {name}"), name=name)


def _with_recipes(paper: Publication, recipes: Sequence[Recipe]) -> Publication:
    """The paper with the recipes of each place, and with those recipes that are of no place that it names."""
    of_places: dict[str, list[str]] = {}
    beyond: dict[str, Place] = {}
    known = {one.place for one in paper.places}
    for recipe in recipes:
        if recipe.paper.title != paper.title:
            continue
        for place in [place for version, place in shown_by(recipe) if version == paper.version]:
            of_places.setdefault(place, []).append(recipe.name)
            if place not in known:
                beyond.setdefault(place, Place(place, recipe.title))
    places = [replace(one, recipes=tuple(of_places.get(one.place, ()))) for one in (*paper.places, *beyond.values())]
    for one in places:
        require(bool(one.how), f"paper {paper.name}: {one.place}", "a recipe, a command, or why there is none", "none")
    return replace(paper, places=tuple(places))
