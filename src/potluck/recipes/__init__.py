"""Recipes: the tables and figures of the papers as experiments at full size, with the papers' numbers beside them.

    from potluck.recipes import list_recipes, load_recipe

    for name in list_recipes():
        recipe = load_recipe(name)
        print(recipe.name, recipe.paper.place, recipe.methods)

`potluck reproduce NAME` runs one, at any scale.
"""

from importlib.resources import as_file, files
from pathlib import Path

from potluck.core.ground.discovery import matching, unknown
from potluck.experiment.settings.tables import read_toml
from potluck.recipes.contents import Column, Measured, Paper, Printed, Recipe, Row, Setting, read_recipe

__all__ = ["Column", "Measured", "Paper", "Printed", "Recipe", "Row", "Setting", "list_recipes", "load_recipe"]

_ENDING = ".toml"


def list_recipes(pattern: str = "*") -> list[str]:
    """Names of the recipes that a shell-style pattern selects."""
    names = [place.name.removesuffix(_ENDING) for place in files(__name__).iterdir() if place.name.endswith(_ENDING)]
    return matching(sorted(names), pattern)


def load_recipe(name: str) -> Recipe:
    """The recipe of this name, or in a file.

    Args:
        name: one of `list_recipes()`, or the path of a file of your own, which ends in `.toml`.

    Raises:
        ConfigError: there is no such recipe, or something in it is unknown, of the wrong type, or contradictory.
    """
    if name.endswith(_ENDING):
        return read_recipe(read_toml(Path(name)), Path(name).stem, name, name)
    if name not in list_recipes():
        raise unknown("recipe", name, list_recipes(), "potluck reproduce")
    with as_file(files(__name__) / f"{name}{_ENDING}") as path:
        return read_recipe(read_toml(path), name, f"recipe {name}")
