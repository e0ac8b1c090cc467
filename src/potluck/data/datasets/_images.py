"""Conversion of images to uint8 tensors (n, channels, height, width)."""

import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from potluck.core.ground.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

CHANNELS = (1, 3, 4)


@contextmanager
def opened(source: Path | IO[bytes], where: str) -> Generator["Image"]:
    """An image, opened but not decoded yet.

    Raises:
        DataError: it cannot be read, or has more pixels than PIL's limit; `where` opens the message.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(source) as image:
                yield image
    except (DataError, MemoryError):
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"{where}: more than {Image.MAX_IMAGE_PIXELS:,} pixels; scale it down") from error
    except Exception as error:  # any error that damage causes in PIL's decoders
        raise DataError(f"{where}: cannot be read as an image; replace or remove it") from error


def stacked(arrays: Iterable[np.ndarray], where: str) -> np.ndarray:
    """Arrays of the same shape and type, one for each example, stacked.

    Raises:
        DataError: shapes differ, or there is none; `where` opens the message.
    """
    arrays = list(arrays)
    if not arrays:
        raise DataError(f"{where}: no examples; give at least one")
    check_one_shape([array.shape for array in arrays], where)
    return np.stack(arrays)


def check_one_shape(shapes: Sequence[tuple[int, ...]], where: str) -> None:
    """Check that all shapes are equal; `where` opens the DataError's message."""
    found = sorted(set(shapes))
    if len(found) > 1:
        raise DataError(f"{where}: inputs of different shapes, {found[0]} and {found[-1]}; bring all to one shape")


def as_inputs(array: np.ndarray, where: str, otherwise: str = "") -> Tensor:
    """Bytes as images (n, channels, height, width), floats as float32 features of the shape they have.

    Byte arrays are (n, height, width), or have their channels last if the last axis is 1, 3 or 4 long, or
    else second.

    Raises:
        DataError: another type or number of axes; `where` opens the message, and `otherwise` is more advice.
    """
    if np.issubdtype(array.dtype, np.floating):
        with np.errstate(over="ignore"):  # too large for float32 becomes infinite, which is refused later
            return torch.from_numpy(array.astype(np.float32))
    if array.dtype != np.uint8:
        raise DataError(
            f"{where}: expected uint8 images or float features, found {array.dtype}; convert them{otherwise}"
        )
    if array.ndim not in (3, 4):
        raise DataError(
            f"{where}: expected uint8 images (n, height, width[, channels]), found shape {array.shape}; "
            "give features as floats"
        )
    if array.ndim == 3:
        array = array[:, None]
    elif array.shape[3] in CHANNELS:
        array = array.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(array))


def as_targets(labels: np.ndarray, where: str) -> Tensor:
    """Integer labels (n,) or (n, 1) as int64 (n,).

    Raises:
        DataError: the labels are not integers; `where` opens the message.
    """
    if not np.issubdtype(labels.dtype, np.integer):
        other = (
            "; for numbers to predict, name the task: federation.task = 'regression'"
            if labels.dtype.kind == "f"
            else ""
        )
        raise DataError(
            f"{where}: expected whole-number labels, found {labels.dtype}; number the classes from 0{other}"
        )
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    return torch.from_numpy(labels.astype(np.int64))


def classes_in(targets: Tensor, where: str, otherwise: str) -> int:
    """How many classes the training labels (n,) stand for, from 0 to the largest one.

    Raises:
        DataError: none is 0. Labels counted from 1 would otherwise make a class that no example has; `otherwise` says
            how to name one that is meant.
    """
    if (smallest := int(targets.min())) > 0:
        raise DataError(
            f"{where}: the smallest label is {smallest}, but classes are counted from 0; subtract {smallest} from all"
            f" labels, or, if class 0 has no examples, {otherwise}"
        )
    return max(int(targets.max()), 0) + 1  # who loads labels that are all negative is told so later
