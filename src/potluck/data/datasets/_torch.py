"""Your own data from any map-style torch data set."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from potluck.core.ground.errors import DataError
from potluck.core.requests.examples import Preprocess
from potluck.data.dataset import Dataset
from potluck.data.datasets._images import as_inputs, classes_in, stacked
from potluck.data.transforms import plain


class MapStyle(Protocol):
    """What torch calls a map-style data set: items (input, label) by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def from_torch(
    train: MapStyle,
    test: MapStyle,
    num_classes: int | None = None,
    name: str = "custom",
    preprocess: Preprocess | None = None,
) -> Dataset:
    """A Potluck data set from two map-style torch data sets, read into memory once.

    Args:
        train: items (input, label). An input is a PIL image, an array (height, width[, channels]) of bytes, a
            tensor (channels, height, width) of bytes, or float features of any one shape. A random transform
            inside the data set is drawn only once: leave it out, or give it as `preprocess`.
        test: as `train`.
        num_classes: by default the largest training label plus one.
        name: the name in runs and records.
        preprocess: by default images are scaled to 0 .. 1 and features unchanged.

    Raises:
        DataError: there are no items, inputs differ in shape or are of another type, or a label is not a class; or
            labels begin with 1 and `num_classes` is not given.
    """
    train_inputs, train_targets = _read(train, f"{name}: training part")
    test_inputs, test_targets = _read(test, f"{name}: test part")
    if num_classes is None:
        num_classes = classes_in(train_targets, f"{name}: training part", "give num_classes")
    return Dataset(
        name=name,
        train_inputs=train_inputs,
        train_targets=train_targets,
        test_inputs=test_inputs,
        test_targets=test_targets,
        num_classes=num_classes,
        preprocess=plain(train_inputs) if preprocess is None else preprocess,
    )


def _read(items: MapStyle, where: str) -> tuple[Tensor, Tensor]:
    """Inputs (n, ...) and targets (n,) of all items."""
    pairs = [_pair(items[position], f"{where}: item {position}") for position in range(len(items))]
    labels = torch.tensor([label for _, label in pairs], dtype=torch.int64)
    inputs = [value for value, _ in pairs]
    if inputs and all(isinstance(value, Tensor) for value in inputs):
        return _from_tensors(inputs, where), labels
    return as_inputs(stacked([_as_array(value) for value in inputs], where), where), labels


def _pair(item: Any, where: str) -> tuple[Any, int]:
    """The input and the label of an item.

    Raises:
        DataError: it is no such pair, or its label is no whole number.
    """
    if not isinstance(item, tuple | list) or len(item) != 2:
        found = f"{len(item)} values" if isinstance(item, tuple | list) else type(item).__name__
        named = f" with {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
        raise DataError(f"{where}: found {found}{named}; expected a pair (input, label)")
    value, label = item
    try:
        number = int(label)
        whole = bool(number == label)
    except (TypeError, ValueError, RuntimeError):
        number, whole = 0, False
    if not whole:
        raise DataError(f"{where}: found the label {label!r}; expected a whole number: number the classes from 0")
    return value, number


def _from_tensors(inputs: list[Tensor], where: str) -> Tensor:
    """Tensors are channels first, unlike arrays, so images (n, channels, height, width) stay as they are."""
    images = torch.from_numpy(stacked([value.numpy() for value in inputs], where))
    is_image_batch = images.dtype == torch.uint8 and images.dim() == 4
    return images if is_image_batch else as_inputs(images.numpy(), where)


def _as_array(value: Any) -> np.ndarray:
    from PIL import Image

    if isinstance(value, Image.Image) and value.mode not in ("L", "RGB"):
        value = value.convert("RGB")
    return np.asarray(value)
