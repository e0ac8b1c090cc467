"""Your own data from Python: a data set that is in memory already, its arrays, or tables."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.core.ground.errors import DataError
from potluck.core.tasks.named import CLASSIFICATION
from potluck.core.tasks.task import Task
from potluck.data.dataset import Dataset, Description
from potluck.data.datasets._arrays import Arrays, check_names, flattened
from potluck.data.datasets._images import CHANNELS
from potluck.data.tables.columns import Columns
from potluck.data.tables.reading import ColumnReading
from potluck.data.tables.source import ByText, Rows, dataset_of, reading_of
from potluck.data.transforms import without_augmentation


@dataclass(frozen=True, eq=False)
class HeldSource:
    """A data set in memory."""

    dataset: Dataset

    def describe(self) -> Description:
        """Its own."""
        return self.dataset.description

    def load(self, augmentation: str) -> Dataset:
        """The data set; for "none" without the random part of its preprocessing."""
        preprocess = self.dataset.preprocess
        if augmentation != "none" or preprocess is None:
            return self.dataset
        return replace(self.dataset, preprocess=without_augmentation(preprocess))


@dataclass(frozen=True, eq=False)
class ArraySource:
    """Arrays or tensors x_train, y_train, x_test and y_test, and what else may be in an `.npz` file.

    Several inputs by name are a mapping in place of one: `x_train={"ids": ..., "mask": ...}`.

    A tensor of images has its channels first, as everywhere in torch; an array, as everywhere in NumPy, last or first.
    """

    arrays: Mapping[str, Any]
    name: str
    task: Task = CLASSIFICATION

    def describe(self) -> Description:
        """Reads everything, which is in memory."""
        return self.load("none").description

    def load(self, augmentation: str) -> Dataset:
        """All arrays; they are not augmented.

        Raises:
            DataError: an array is missing or is none, or they do not fit together or the task.
        """
        found = flattened(self.arrays)
        check_names(found, self.name)
        arrays = {name: _array(array, f"{self.name}: {name}") for name, array in found.items()}
        return Arrays(self.name, self.name, self.task).dataset(arrays)


@dataclass(frozen=True, eq=False)
class Frames:
    """A DataFrame, or one for training and one for tests, by its identity."""

    rows: Rows


@dataclass(frozen=True)
class FrameSource:
    """A table in memory; see `potluck.data.tables.source.TableSource` for how its rows are divided and read."""

    frames: Frames
    name: str
    columns: Columns | None = None
    task: Task | None = None

    def describe(self) -> Description:
        """Reads everything, which is in memory."""
        return self.load("none").description

    def load(self, augmentation: str) -> Dataset:
        """All rows; they are not augmented.

        Raises:
            DataError: a column is missing or does not suit.
        """
        return _read(self.frames, self.name, ByText.of(self.columns or Columns()), self.task or CLASSIFICATION)

    def rows(self) -> Rows:
        """As they are given."""
        return self.frames.rows

    def reading(self) -> ColumnReading:
        """How other tables are to be read, to be read alike."""
        return reading_of(self.rows(), self.columns or Columns(), self.task or CLASSIFICATION, self.name)


@lru_cache(maxsize=1)  # a run describes its data more than once before it loads them
def _read(frames: Frames, name: str, key: ByText[Columns], task: Task) -> Dataset:
    return dataset_of(frames.rows, key.columns, task, name, name)


def _array(found: Any, where: str) -> np.ndarray:
    """An array with a row an example; images of bytes in a tensor become an array with the channels last."""
    if isinstance(found, Tensor):
        found = found.detach().cpu()
        has_channels = found.dtype == torch.uint8 and found.dim() == 4 and found.shape[1] in CHANNELS
        found = (found.permute(0, 2, 3, 1) if has_channels else found).numpy()
    try:
        array = np.asarray(found)
    except ValueError as error:  # rows of different lengths
        raise DataError(f"{where}: {error}; bring all rows to one shape") from error
    if array.dtype == object or array.ndim == 0:
        raise DataError(f"{where}: expected an array with a row an example, found {type(found).__name__}")
    return array
