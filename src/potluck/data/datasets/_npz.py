"""Your own data from disk: an `.npz` file of arrays."""

import math
import zipfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch

from potluck.core.ground.errors import DataError
from potluck.core.ground.machine import check_fits
from potluck.core.requests.examples import Examples
from potluck.core.tasks.named import CLASSIFICATION
from potluck.core.tasks.task import Task
from potluck.data.dataset import Dataset, Description
from potluck.data.datasets._arrays import INPUTS, NAMES, OWNERS, TARGETS, Arrays, check_names, input_names
from potluck.data.transforms import plain


@dataclass(frozen=True)
class NpzSource:
    """An `.npz` file with the arrays x_train, y_train, x_test and y_test, and what else `_arrays` knows.

    Targets are integer labels, or of the form that the task requires; inputs of tasks by position may be integer
    tokens.
    """

    path: Path
    task: Task = CLASSIFICATION

    def describe(self) -> Description:
        """Reads the arrays' headers, targets and names; also inputs if they are tokens."""
        headers, arrays = _headers(self.path), self._arrays
        train = input_names(headers, INPUTS[0])
        samples = {name: np.zeros((1, *headers[name][0][1:]), headers[name][1]) for name in train}
        stored = arrays.inputs_of(samples, INPUTS[0])
        sample = Examples(stored, torch.zeros(1), plain(stored))
        read = (TARGETS[0], NAMES, *(train if self.task.by_position else ()))
        counted = arrays.counted(_read_arrays(self.path, read))
        return Description(self.path.stem, sample.input_shape, *counted, task=self.task)

    def load(self, augmentation: str) -> Dataset:
        """All arrays; classes are those named, or 0 to the largest training label. They are not augmented."""
        return self._arrays.dataset(_read_arrays(self.path, _headers(self.path)))

    @property
    def _arrays(self) -> Arrays:
        return Arrays(self.path.stem, str(self.path), self.task)


def _headers(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and type of every array, unread; checks that they fit in memory and that the file has their bytes."""
    with _opened_archive(path) as archive:
        found = {name.removesuffix(".npy"): archive.getinfo(name) for name in archive.namelist()}
        inputs = [name for part in INPUTS for name in input_names(found, part)]
        check_names(found, str(path), strict=False)
        headers: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        for name in [name for name in found if name in (*inputs, *TARGETS, *OWNERS, NAMES)]:
            with archive.open(found[name]) as file:
                shape, kind = _header_of(file)
                held = found[name].file_size - file.tell()
            if not shape:
                raise DataError(f"{path}: {name} is a single value; expected an array with a row an example")
            if kind.hasobject:
                raise _no_archive(path)
            if (claimed := math.prod(shape) * kind.itemsize) != held:
                raise DataError(
                    f"{path}: {name} says that it is {kind} of shape {shape}, {claimed:,} bytes, and holds {held:,}; "
                    "write it again with numpy.savez"
                )
            headers[name] = shape, kind
    for name in input_names(headers, INPUTS[0]):
        other = name.replace(*INPUTS, 1)
        kinds = [headers[one][1] for one in (name, other) if one in headers]
        if len({np.issubdtype(kind, np.floating) for kind in kinds}) > 1:
            raise DataError(f"{path}: {name} is {kinds[0]} but {other} {kinds[1]}; store both in one type")
    needed = sum(math.prod(shape) * kind.itemsize for shape, kind in headers.values())
    check_fits(needed, f"{path}: its arrays", "make them smaller, or use fewer examples", DataError)
    return headers


def _header_of(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of a stored array, whose first value is then next in the file."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(file)
    return shape, kind


def _read_arrays(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """The arrays of an archive, of those named, that it contains; never unpickles."""
    # Opened here because numpy leaves a file open that is not an archive.
    with _opened_archive(path), path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in names if name in archive}


@contextmanager
def _opened_archive(path: Path) -> Generator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (DataError, MemoryError):
        raise
    except Exception as error:  # any error that damage causes in zipfile, zlib and numpy
        raise _no_archive(path) from error


def _no_archive(path: Path) -> DataError:
    return DataError(f"{path}: not an .npz file of plain arrays; write one with numpy.savez")
