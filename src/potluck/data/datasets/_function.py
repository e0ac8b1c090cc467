"""Your own data from a function of a Python file, `FILE.py:FUNCTION`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from potluck.core.ground.access import entered
from potluck.core.ground.digest import digest
from potluck.core.ground.discovery import named_file, own_part
from potluck.core.ground.errors import DataError, PotluckError, explained
from potluck.core.tasks.named import CLASSIFICATION
from potluck.core.tasks.task import Task
from potluck.data.dataset import Dataset, Description
from potluck.data.datasets._arrays import Arrays, check_names, flattened
from potluck.data.datasets._torch import from_torch

_EXPECTED = (
    "a dict of the arrays x_train, y_train, x_test, y_test and perhaps classes, a Dataset, or a pair of torch data"
    " sets, for training and for tests"
)


@dataclass(frozen=True)
class FunctionSource:
    """A function without arguments that returns the data: a dict of arrays as in an `.npz` file, and other forms.

    It is called once, and again only for other data or after its file has changed.
    """

    name: str
    task: Task | None = None

    def describe(self) -> Description:
        """Calls the function."""
        return self.load("none").description

    def load(self, augmentation: str) -> Dataset:
        """What the function returns; it is not augmented."""
        place = named_file(self.name)
        assert place is not None
        file = entered(place[0])
        content = file.read_bytes() if file.is_file() else b""
        return _loaded(self.name, str(file.resolve()), digest(content), self.task)


@lru_cache(maxsize=1)  # a run describes its data more than once before it loads them
def _loaded(name: str, path: str, content: str, task: Task | None) -> Dataset:
    function = own_part(name, "a function that returns data")
    try:
        found = function()
    except PotluckError:
        raise
    except Exception as error:  # the user's own code
        raise DataError(f"{name}: {explained(error)}") from error
    return _dataset(found, name, task)


def _dataset(found: Any, name: str, task: Task | None) -> Dataset:
    if isinstance(found, Dataset):
        return replace(found, name=name)
    if isinstance(found, Mapping):
        return Arrays(name, name, task or CLASSIFICATION).dataset(_arrays(found, name))
    if isinstance(found, Sequence) and len(found) == 2:
        return from_torch(found[0], found[1], name=name)
    raise DataError(f"{name}: expected {_EXPECTED}; found {type(found).__name__}")


def _arrays(found: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    arrays = flattened(found)
    check_names(arrays, name, _EXPECTED)
    return {key: _array(value, f"{name}: {key}") for key, value in arrays.items()}


def _array(value: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except Exception as error:  # rows of different lengths, or a tensor that requires a gradient
        raise DataError(f"{where}: expected an array with a row an example: {explained(error)}") from error
    if not array.ndim:
        raise DataError(f"{where} is a single value; expected an array with a row an example")
    return array
