"""Your own data from a function of a Python file, `FILE.py:FUNCTION`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from potluck.core.ground.access import entered
from potluck.core.ground.digest import digest
from potluck.core.ground.discovery import named_file, own_part, standing_for
from potluck.core.ground.errors import DataError, PotluckError, explained
from potluck.core.tasks.named import CLASSIFICATION
from potluck.core.tasks.task import Task
from potluck.data.dataset import Dataset, Description
from potluck.data.datasets._arrays import Arrays, check_names, flattened
from potluck.data.datasets._torch import from_torch
from potluck.data.tables.columns import Columns
from potluck.data.tables.reading import ColumnReading
from potluck.data.tables.source import ByText, Rows, dataset_of, reading_of, tables_in

_EXPECTED = (
    "a dict of the arrays x_train, y_train, x_test, y_test and perhaps classes, a Dataset, a pair of torch data sets,"
    " for training and for tests, or a DataFrame"
)


@dataclass(frozen=True)
class FunctionSource:
    """A function without arguments that returns the data: a dict of arrays as in an `.npz` file, and other forms.

    It is called once, and again only for other data or after its file has changed.
    """

    name: str
    task: Task | None = None
    columns: Columns | None = None

    def describe(self) -> Description:
        """Calls the function."""
        return self.load("none").description

    def load(self, augmentation: str) -> Dataset:
        """What the function returns; it is not augmented."""
        return _loaded(self.name, *self._file(), self.task, ByText.of(self.columns))

    def reading(self) -> ColumnReading | None:
        """How tables are to be read, to be read as the function's; None if it returns none."""
        rows, columns, task = self.rows(), self.columns or Columns(), self.task or CLASSIFICATION
        return None if rows is None else reading_of(rows, columns, task, self.name)

    def rows(self) -> Rows | None:
        """The table that it returns, or two; None if it returns something else."""
        return tables_in(_called(self.name, *self._file()))

    def _file(self) -> tuple[str, str]:
        """The path, and a digest of the content, or of the copy that stands in for it."""
        place = named_file(self.name)
        assert place is not None
        file = entered(place[0]).resolve()
        read = standing_for(file)
        return str(file), digest(read.read_bytes() if read.is_file() else b"")


@lru_cache(maxsize=1)
def _called(name: str, path: str, content: str) -> Any:
    function = own_part(name, "a function that returns data")
    try:
        return function()
    except PotluckError:
        raise
    except Exception as error:  # the user's own code
        raise DataError(f"{name}: {explained(error)}") from error


@lru_cache(maxsize=1)  # a run describes its data more than once before it loads them
def _loaded(name: str, path: str, content: str, task: Task | None, key: ByText[Columns | None]) -> Dataset:
    found, meant = _called(name, path, content), task or CLASSIFICATION
    rows = tables_in(found)
    if rows is not None:
        return dataset_of(rows, key.columns or Columns(), meant, name, name)
    _called.cache_clear()  # arrays are not held twice
    if key.columns is not None:
        raise DataError(f"{name}: federation.columns speaks of a table; found {type(found).__name__}")
    if isinstance(found, Dataset):
        return replace(found, name=name)
    if isinstance(found, Mapping):
        return Arrays(name, name, meant).dataset(_arrays(found, name))
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
