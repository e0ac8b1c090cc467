"""Arrays called x_train, y_train, x_test and y_test as a data set, wherever they come from.

Inputs are one array, or several with names of their own: `x_train.ids` and `x_test.ids` are the input `ids`. Beside
them may be `classes`, the classes' names, and `owner_train` and `owner_test`, whose each example is.
"""

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.core.ground.errors import DataError, nearest
from potluck.core.ground.inputs import Inputs
from potluck.core.tasks.task import Task
from potluck.data.dataset import Dataset
from potluck.data.datasets._images import as_inputs, as_targets, classes_in
from potluck.data.transforms import plain

INPUTS, TARGETS = ("x_train", "x_test"), ("y_train", "y_test")
ARRAYS = (INPUTS[0], TARGETS[0], INPUTS[1], TARGETS[1])
OWNERS = ("owner_train", "owner_test")
NAMES = "classes"


def flattened(found: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays with inputs that are a mapping by their full names, such as `x_train.ids`."""
    flat = dict[str, Any]()
    for key, value in found.items():
        flat |= {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat


def input_names(arrays: Iterable[str], part: str) -> list[str]:
    """The full names of the inputs of a part, `x_train` or `x_test`: that alone, or those that begin with it."""
    found = list(arrays)
    return [part] if part in found else [name for name in found if name.startswith(f"{part}.")]


def check_names(arrays: Iterable[str], where: str, expected: str = ", ".join(ARRAYS), *, strict: bool = True) -> None:
    """Check that all arrays are there that make a data set, and, if `strict`, none of another name.

    Raises:
        DataError: one is missing, or is none of a data set; `where` opens the message.
    """
    found = list(arrays)
    names = ", ".join(found) or "nothing"
    missing = [name for name in ARRAYS if name not in found and not (name in INPUTS and input_names(found, name))]
    if missing:
        raise DataError(f"{where}: no array {', '.join(missing)}; expected {expected}, found {names}")
    known = {*TARGETS, *OWNERS, NAMES, *(name for part in INPUTS for name in input_names(found, part))}
    if strict and (strange := [name for name in found if name not in known]):
        near = nearest(strange[0], (*ARRAYS, *OWNERS, NAMES), 1)[0]
        raise DataError(f"{where}: unknown array {strange[0]!r}; expected {expected}, found {names}; nearest: {near}")
    if 0 < sum(name in found for name in OWNERS) < len(OWNERS):
        raise DataError(f"{where}: found one of {' and '.join(OWNERS)}; give both or neither")


@dataclass(frozen=True)
class Arrays:
    """How the arrays of one source become tensors.

    Attributes:
        name: of the data set.
        where: opens messages.
        task: what the targets mean.
    """

    name: str
    where: str
    task: Task

    def dataset(self, arrays: Mapping[str, np.ndarray]) -> Dataset:
        """The data set that these arrays make, by their full names; examples are not augmented."""
        num_classes, names = self.counted(arrays)
        train, test = (self.inputs_of(arrays, part) for part in INPUTS)
        owners = [as_targets(arrays[name], f"{self.where}: {name}") for name in OWNERS if name in arrays]
        return Dataset(
            name=self.name,
            train_inputs=train,
            train_targets=self.targets(arrays["y_train"], "y_train"),
            test_inputs=test,
            test_targets=self.targets(arrays["y_test"], "y_test"),
            num_classes=num_classes,
            preprocess=plain(train),
            classes=names,
            task=self.task,
            owners=(owners[0], owners[1]) if owners else None,
        )

    def inputs_of(self, arrays: Mapping[str, np.ndarray], part: str) -> Inputs:
        """The inputs of a part, one tensor or several by name."""
        full = input_names(arrays, part)
        if full == [part]:
            return self._one(arrays[part], part)
        return {name.removeprefix(f"{part}."): self._named(arrays[name], name) for name in full}

    def _one(self, array: np.ndarray, name: str) -> Tensor:
        """Tokens unchanged if the task may have them; else images or features."""
        if self.task.by_position and np.issubdtype(array.dtype, np.integer):
            return torch.from_numpy(array.astype(np.int64))
        return as_inputs(array, f"{self.where}: {name}", " or, if they are tokens, name them: {'ids': ...}")

    def _named(self, array: np.ndarray, name: str) -> Tensor:
        """Whole numbers and yes-or-no as they are, bytes of images and real numbers as without a name.

        A row of one number becomes one of length 1.
        """
        array = array[:, None] if array.ndim == 1 else array
        if array.dtype == np.bool_:
            return torch.from_numpy(array)
        if np.issubdtype(array.dtype, np.integer) and not (array.dtype == np.uint8 and array.ndim > 2):
            return torch.from_numpy(array.astype(np.int64))
        return as_inputs(array, f"{self.where}: {name}")

    def targets(self, array: np.ndarray, name: str) -> Tensor:
        """Targets in the task's type; whether they are valid is checked later."""
        where = f"{self.where}: {name}"
        if self.task.has_labels:
            return as_targets(array, where)
        if array.dtype.kind not in "buif":
            raise DataError(f"{where}: expected {self.task.targets_for()}, found {array.dtype}; convert them")
        if self.task.by_position:
            if array.dtype.kind not in "iu":
                raise DataError(f"{where}: expected whole numbers of shape (n, t), found {array.dtype}; convert them")
            return torch.from_numpy(array.astype(np.int64))
        flat = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 and self.task.name == "regression" else array
        with np.errstate(over="ignore"):
            return torch.from_numpy(flat.astype(np.float32))

    def counted(self, arrays: Mapping[str, np.ndarray]) -> tuple[int, tuple[str, ...] | None]:
        """The width of an output, and the classes' names, if any."""
        if self.task.has_classes or NAMES in arrays:
            return self._classes(arrays)
        targets = self.targets(arrays["y_train"], "y_train")
        if len(targets) == 0:
            raise DataError(f"{self.where}: training part: no examples; give at least one")
        if wrong := self.task.form_fault(targets):
            raise DataError(f"{self.where}: y_train: they {wrong}; {self.task.name} expects {self.task.targets_for()}")
        width = self.task.width_for(targets)
        if self.task.name != "next_token":
            return width, None
        tokens = [arrays[name] for name in input_names(arrays, INPUTS[0])[:1] if arrays[name].dtype.kind in "iu"]
        return max([width, *(int(array.max()) + 1 for array in tokens)]), None

    def _classes(self, arrays: Mapping[str, np.ndarray]) -> tuple[int, tuple[str, ...] | None]:
        if NAMES in arrays:
            names = arrays[NAMES]
            if names.ndim != 1 or names.dtype.kind != "U":
                raise DataError(
                    f"{self.where}: {NAMES}: expected text of shape (classes,), found {names.dtype} {names.shape}"
                )
            return len(names), tuple(unicodedata.normalize("NFC", str(name)) for name in names)
        where = f"{self.where}: y_train"
        targets = as_targets(arrays["y_train"], where)
        if len(targets) == 0:
            raise DataError(f"{self.where}: training part: no examples; give at least one")
        return classes_in(targets, where, f"name all classes in an array {NAMES!r}"), None
