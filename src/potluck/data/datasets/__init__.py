"""Data sets: one file each, found by file name; and your own from a folder, an archive or torch.

Other distributions add data sets through the entry-point group `potluck.datasets`; what it names, a module or
an object, has `describe()` and `load(augmentation)` (see `Source`).
"""

import importlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from potluck.core.access import entered
from potluck.core.discovery import given, matching, module_names, named_file, plugins, unknown
from potluck.core.errors import ConfigError, DataError
from potluck.core.task import Task
from potluck.data.dataset import Dataset, Description, Source
from potluck.data.datasets._files import FolderSource, NpzSource
from potluck.data.datasets._function import FunctionSource
from potluck.data.datasets._held import ArraySource, HeldSource
from potluck.data.datasets._torch import from_torch

__all__ = ["AUGMENTATIONS", "ArraySource", "HeldSource", "describe", "from_torch", "list_datasets", "load"]

AUGMENTATIONS = ("paper", "none")
"""The augmentations of training images: the papers' for this data set, or none."""

_GROUP = "potluck.datasets"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # Path reduces two slashes to one; a single letter would be a drive


def list_datasets(pattern: str = "*") -> list[str]:
    """Names of the data sets that a shell-style pattern selects, without importing them."""
    return matching(sorted({*module_names(__name__), *plugins(_GROUP)}), pattern)


def describe(name_or_path: str | Path, task: Task | None = None) -> Description:
    """The description of a data set, without reading the inputs.

    Args:
        name_or_path: as for `load`.
        task: as for `load`; for another task than their own, some data must be read.

    Raises:
        ConfigError: no data set has this name.
        DataError: the path leads to nothing that can be read.
    """
    return _source(name_or_path, task).describe()


def load(name_or_path: str | Path, *, augmentation: str = "paper", task: Task | None = None) -> Dataset:
    """A data set by name, or from a folder of images, an `.npz` file, or a function of a Python file.

    A name takes precedence over a path; write `./digits` for a folder called digits.

    Args:
        name_or_path: one of `list_datasets()`, or a path. A folder holds `train/<class>/<image>` and
            `test/<class>/<image>`; an `.npz` file holds the arrays x_train, y_train, x_test, y_test, and may name its
            classes in an array of text, `classes`. `FILE.py:FUNCTION` is called without arguments; it returns a dict
            of the same arrays, a `Dataset`, or two map-style torch data sets, for training and for tests.
        augmentation: "paper" augments training images as the papers do; "none" does not augment. Normalisation and size
            are the same for both.
        task: what the targets mean; by default the data set's task, or a classification.

    Raises:
        ConfigError: no data set has this name, or the augmentation is neither.
        DataError: the data are missing, unreachable or invalid, or do not suit the task.
    """
    if augmentation not in AUGMENTATIONS:
        raise ConfigError(f"augmentation: expected 'paper' or 'none', found {augmentation!r}")
    return _source(name_or_path, task).load(augmentation)


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


def _source(name_or_path: str | Path, task: Task | None) -> Source:
    """The source of a data set, for a task if one is named."""
    source = _found(name_or_path)
    if task is None:
        return source
    if isinstance(source, NpzSource | ArraySource):
        return replace(source, task=task)
    return _Meant(replace(source, task=task) if isinstance(source, FunctionSource) else source, task)


def _found(name_or_path: str | Path) -> Source:
    name = str(name_or_path)
    if name in (own := given(_GROUP)):
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
    if is_folder:
        return FolderSource(path)
    if is_file:
        return NpzSource(path)
    if _URL.match(name):
        raise DataError(f"{name}: an address on the web; download the data, and give the path of the folder or file")
    if isinstance(name_or_path, Path) or path.suffix or "/" in name:
        raise DataError(f"{path}: no such file or folder; expected a folder of images, an .npz file or a name")
    raise unknown("data set", name, list_datasets(), "potluck list datasets")
