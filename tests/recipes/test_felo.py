"""The recipes of Felo and Velo: rows are the methods that the paper's first pages name, and guesses are called so."""

import pytest

from potluck.recipes import load_recipe

# The introduction, in the order of its text: by distillation, without public data, by sub-models.
NAMED = {
    "FedMD": "fedmd",
    "MocoSFL": None,
    "FedAUX": "fedaux",
    "RHFL": "rhfl",
    "FCCL": "fccl",
    "HypeMeFed": "hypemefed",
    "FedGen": "fedgen",
    "FedHe": "fedhe",
    "FedGKT": "fedgkt",
    "HeteroFL": "heterofl",
    "SlimFL": "slimfl",
    "FjORD": "fjord",
    "ScaleFL": "scalefl",
    "FedASA": None,
    "InCoFL": "incoavg",
}
OURS = {"Felo": "felo", "Velo": "velo"}
RECIPES = [("felo-heterogeneous", NAMED | OURS), ("felo-homogeneous", {"FedAvg": "fedavg"} | OURS)]


@pytest.mark.parametrize(("name", "rows"), RECIPES)
def test_rows_are_the_methods_that_the_first_pages_name(name, rows):
    """ "Our methods also outperform FedAvg in the homogeneous environment": no other is named of that."""
    found = {row.name: row.method and row.method["name"] for row in load_recipe(name).rows}
    assert list(found.items()) == list(rows.items())


@pytest.mark.parametrize(("name", "rows"), RECIPES)
def test_every_guess_is_called_one_and_no_number_is_printed(name, rows):
    recipe = load_recipe(name)
    for guessed in ("CIFAR-10 and CINIC-10", "size of the experiment", "etwork", "non-IID"):
        assert any("guess" in text and guessed in text for text in recipe.deviations), guessed
    assert {one.group for one in recipe.columns} == {"CIFAR-10", "CINIC-10"}
    assert not any(text for row in recipe.rows for text in row.paper)


@pytest.mark.parametrize("name", ["MocoSFL", "FedASA"])
def test_a_method_that_is_not_built_has_its_reason(name):
    row = next(row for row in load_recipe("felo-heterogeneous").rows if row.name == name)
    assert {"MocoSFL": "every batch", "FedASA": "only its abstract"}[name] in row.missing
