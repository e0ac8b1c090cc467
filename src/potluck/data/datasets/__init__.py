"""Data sets: one file each, found by file name; and your own from a folder, an archive or torch.

Other distributions add data sets through the entry-point group `potluck.datasets`; what it names, a module or
an object, has `describe()` and `load(augmentation)` (see `Source`).
"""

import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from potluck.core.ground.access import entered
from potluck.core.ground.discovery import matching, module_names, named_file, objects_given, plugins, unknown
from potluck.core.ground.errors import ConfigError, DataError
from potluck.core.ground.inputs import shape_of
from potluck.core.tasks.task import Task
from potluck.data.dataset import Dataset, Description, Source
from potluck.data.datasets._folder import FolderSource
from potluck.data.datasets._function import FunctionSource
from potluck.data.datasets._held import ArraySource, Frames, FrameSource, HeldSource
from potluck.data.datasets._npz import NpzSource
from potluck.data.datasets._sized import SizedSource, check_images
from potluck.data.datasets._torch import from_torch
from potluck.data.tables.columns import Columns
from potluck.data.tables.reading import ColumnReading
from potluck.data.tables.source import Rows, TableSource, is_table, values_of_tests
from potluck.data.transforms import STEPS, augmented

__all__ = [
    "ArraySource",
    "FrameSource",
    "Frames",
    "HeldSource",
    "check_augmentation",
    "describe",
    "from_torch",
    "list_datasets",
    "load",
]

_GROUP = "potluck.datasets"
_Tables = TableSource | FunctionSource | FrameSource
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # Path reduces two slashes to one; a single letter would be a drive


def list_datasets(pattern: str = "*") -> list[str]:
    """Names of the data sets that a shell-style pattern selects, without importing them."""
    return matching(sorted({*module_names(__name__), *plugins(_GROUP)}), pattern)


def describe(
    name_or_path: str | Path,
    task: Task | None = None,
    image_size: int | None = None,
    columns: Columns | None = None,
) -> Description:
    """The description of a data set, without reading the inputs.

    Args:
        name_or_path: as for `load`.
        task: as for `load`; for another task than their own, some data must be read.
        image_size: as for `load`.
        columns: as for `load`.

    Raises:
        ConfigError: no data set has this name, or it has no images that could have a size.
        DataError: the path leads to nothing that can be read.
    """
    return _source(name_or_path, task, image_size, columns).describe()


def rows_in(name_or_path: str | Path) -> Rows | None:
    """The rows of a table, or those for training and those for tests; None of a data set that is no table.

    Raises:
        DataError: they cannot be read.
    """
    source = _found(name_or_path)
    return source.rows() if isinstance(source, _Tables) else None


def column_of_tests(name_or_path: str | Path, columns: Columns | None, name: str) -> np.ndarray:
    """The values of a column, as text, for each test example of a table, also of one that is no input.

    Args:
        name_or_path: as for `load`.
        columns: as for `load`.
        name: of the column.

    Raises:
        DataError: it is no table, or has no such column.
    """
    rows = rows_in(name_or_path)
    if rows is None:
        raise DataError(f"{name_or_path}: no column {name!r}, since it is no table")
    return values_of_tests(rows, columns or Columns(), name, str(name_or_path))


def common_reading(name_or_path: str | Path, task: Task | None, columns: Columns) -> ColumnReading | None:
    """How tables are to be read to be read as this data set; None if it is no table. Arguments as for `load`."""
    source = _source(name_or_path, task, None, columns)
    source = source.source if isinstance(source, _Meant) else source
    return source.reading() if isinstance(source, _Tables) else None


def load(
    name_or_path: str | Path,
    *,
    augmentation: str | Sequence[str] = "standard",
    image_size: int | None = None,
    task: Task | None = None,
    columns: Columns | None = None,
) -> Dataset:
    """A data set by name, or from a folder of images, an `.npz` file, a table, or a function of a Python file.

    A name takes precedence over a path; write `./digits` for a folder called digits.

    Args:
        name_or_path: one of `list_datasets()`, or a path. A folder holds `train/<class>/<image>` and
            `test/<class>/<image>`; an `.npz` file holds the arrays x_train, y_train, x_test, y_test, and may name its
            classes in an array of text, `classes`. A table is a `.csv` or `.parquet` file, or a folder with a `train`
            and a `test` of these. `FILE.py:FUNCTION` is called without arguments; it returns a dict of the same
            arrays, a `Dataset`, two map-style torch data sets, for training and for tests, or a DataFrame or two.
        augmentation: of training images: "standard" as is usual for this data set, "none", or names of
            `potluck.data.transforms.STEPS`. Normalisation and size are the same for all.
        image_size: the side of the images, which are made so large; None for their own. Smaller ones are made here, by
            a box filter, larger ones batch by batch, bilinearly.
        task: what the targets mean; by default the data set's task, or a classification.
        columns: what the columns of a table are.

    Raises:
        ConfigError: no data set has this name, there is no such augmentation, or it has no images for either.
        DataError: the data are missing, unreachable or invalid, or do not suit the task.
    """
    check_augmentation(augmentation)
    source = _source(name_or_path, task, image_size, columns)
    if isinstance(augmentation, str):
        return source.load(augmentation)
    dataset = source.load("none")
    check_images("augmentation", dataset.name, shape_of(dataset.train_inputs), dataset.input_shape)
    return replace(dataset, preprocess=augmented(dataset.preprocess, augmentation))


def check_augmentation(chosen: str | Sequence[str]) -> None:
    """Check that an augmentation is one that there is.

    Raises:
        ConfigError: it is not.
    """
    if chosen == "paper":
        raise ConfigError(
            "augmentation: 'paper' is called 'standard' now, which no longer cuts out squares of CIFAR-10's images; for"
            f" these as before: {json.dumps(STEPS)}"
        )
    known = chosen in ("standard", "none") or (chosen and list(chosen) == [step for step in STEPS if step in chosen])
    if not known:
        raise ConfigError(
            "augmentation: expected 'standard', 'none', or a list of steps in the order in which they are applied, such"
            f" as {json.dumps(STEPS)}, found {chosen if isinstance(chosen, str) else list(chosen)!r}"
        )


@dataclass(frozen=True)
class _Meant:
    """A source whose targets are read for a given task."""

    source: Source
    task: Task

    def describe(self) -> Description:
        """Reads the data if their own task is a different one."""
        found = self.source.describe()
        if found.task.name == self.task.name:
            return replace(found, task=self.task)
        return self.load("none").description

    def load(self, augmentation: str) -> Dataset:
        """The data with this task, if their targets suit it."""
        found = self.source.load(augmentation)
        if found.task.name == self.task.name:
            return replace(found, task=self.task)
        if wrong := self.task.form_fault(found.train_targets):
            raise DataError(f"{found.name}: its training targets {wrong}, which is nothing for {self.task.name}")
        return replace(found, task=self.task, num_classes=self.task.width_for(found.train_targets), classes=None)


def _source(name_or_path: str | Path, task: Task | None, image_size: int | None, columns: Columns | None) -> Source:
    """The source of a data set, for a task and a size of images if one is named."""
    source = _found(name_or_path)
    if isinstance(source, _Tables):
        source = source if columns is None else replace(source, columns=columns)
    elif columns is not None:
        raise ConfigError(f"federation.columns: {name_or_path} is no table; leave it out")
    if task is not None:
        source = _of_task(source, task)
    return source if image_size is None else SizedSource(source, image_size)


def _of_task(source: Source, task: Task) -> Source:
    if isinstance(source, NpzSource | ArraySource | TableSource | FrameSource):
        return replace(source, task=task)
    return _Meant(replace(source, task=task) if isinstance(source, FunctionSource) else source, task)


def _found(name_or_path: str | Path) -> Source:
    name = str(name_or_path)
    if name in (own := objects_given(_GROUP)):
        return own[name]
    if named_file(name):
        return FunctionSource(name)
    if not isinstance(name_or_path, Path):
        if name in module_names(__name__):
            return cast(Source, importlib.import_module(f"{__name__}.{name}"))
        offered = plugins(_GROUP)
        if name in offered:
            return offered[name].load()
    path = entered(Path(name).expanduser())
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:  # a name that no file can have, or missing permission
        raise DataError(
            f"{path}: cannot be accessed ({error}); give the path of a folder or of an .npz file"
        ) from error
    if is_table(path) and (is_folder or is_file):
        return TableSource(path)
    if is_folder:
        return FolderSource(path)
    if is_file:
        return NpzSource(path)
    if _URL.match(name):
        raise DataError(f"{name}: an address on the web; download the data, and give the path of the folder or file")
    if isinstance(name_or_path, Path) or path.suffix or "/" in name:
        raise DataError(f"{path}: no such file or folder; expected a folder of images, an .npz file, a table or a name")
    raise unknown("data set", name, list_datasets(), "potluck list datasets")
