"""A row of a recipe may be measured in another way than the table, and the table says so."""

import tomllib

import pytest

from potluck.analysis.read import last, read_run
from potluck.experiment.running.several import Ended, _start
from potluck.recipes.beside import beside, plan
from potluck.recipes.card import card, words
from potluck.recipes.contents import read_recipe

RECIPE = """\
title = "A method on digits, measured in two ways"

[paper]
title = "A paper"
place = "Table 9"
url = "https://example.org"

[measured]
by = "common"
words = "accuracy."

[experiment.federation]
dataset = "digits"
clients = 4
models = [{ name = "cnn2", width = 4 }]
partition = { name = "pathological", classes = 2 }

[experiment.method.training]
lr = 0.01
epochs = 3

[experiment.run]
rounds = 1

[settings.digits]
images = 1437

[[columns]]
title = "accuracy"
setting = "digits"

[[columns]]
title = "rounds to 30 %"
setting = "digits"
rounds_to = 30

[[rows]]
name = "Local"
paper = ["50.0", "7"]
method.name = "local"

[[rows]]
name = "Local, own tests"
paper = ["60.0", "8"]
by = "personal"
method.name = "local"
"""


@pytest.mark.slow
def test_a_row_with_a_measure_of_its_own_shows_that_measure(tmp_path):
    recipe = read_recipe(tomllib.loads(RECIPE), "mine", "mine.toml")
    first, second = plan(recipe, 1.0, 1)
    _start(first.experiment, tmp_path / "claim", tmp_path / "runs", lambda kind, value: None)
    (folder,) = (tmp_path / "runs").iterdir()
    ends = [Ended(one.experiment, folder) for one in (first, second)]  # the same run, measured in two ways
    found = beside(recipe, [first, second], ends, scale=1.0, seeds=1)
    record, score = last(read_run(folder)), recipe.columns[0]
    for row, measure in zip(recipe.rows, ("common", "personal"), strict=True):
        expected = 100 * record.value(measure, "accuracy")
        shown = found.cell(row, score)
        assert shown.ours == f"{expected:.1f}"
        assert shown.gap == pytest.approx(expected - recipe.printed(row, score).value)
    common, personal = (found.cell(row, recipe.columns[1]).ours for row in recipe.rows)
    assert (common, personal) == (">1", "1")  # nobody knows the others' classes
    for text in (" ".join(words(found)), card(found)):
        assert "(Local, own tests: mean over all clients' models, each on its own test part)" in text
