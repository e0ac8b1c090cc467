"""Data from a function of a Python file."""

import pytest

from potluck.core.ground.errors import DataError
from potluck.data.datasets import load

FILE = """
import numpy as np, torch
x, y = np.zeros((4, 3), "float32"), np.array([0, 1, 0, 1])
def single(): return dict(x_train=x, y_train=torch.tensor(3), x_test=x, y_test=y)
def ragged(): return dict(x_train=x, y_train=[[1], [1, 2]], x_test=x, y_test=y)
def good(): return dict(x_train=x, y_train=y, x_test=x, y_test=list(y))
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("single", "y_train is a single value; expected an array with a row an example"),
        ("ragged", "y_train: expected an array with a row an example: ValueError: setting an array element"),
    ],
)
def test_what_is_no_array_of_examples_is_told(tmp_path, name, expected):
    file = tmp_path / "own.py"
    file.write_text(FILE)
    assert len(load(f"{file}:good").train_targets) == 4
    with pytest.raises(DataError) as caught:
        load(f"{file}:{name}")
    assert str(caught.value).startswith(f"{file}:{name}: {expected}")
