"""Your own data from disk: a folder of images or an `.npz` file."""

import math
import unicodedata
import zipfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from potluck.core.ground.errors import DataError
from potluck.core.ground.machine import check_fits
from potluck.core.tasks.named import CLASSIFICATION
from potluck.core.tasks.task import Task
from potluck.data.dataset import Dataset, Description
from potluck.data.datasets._images import as_inputs, as_targets, check_one_shape, classes_in, opened, plain, stacked

_LAYOUT = "expected train/<class>/<image> and test/<class>/<image>"
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
NAMES = "classes"


@dataclass(frozen=True)
class FolderSource:
    """A folder with `train` and `test`, in each a folder of images a class; classes are sorted by name."""

    path: Path

    def describe(self) -> Description:
        """Reads the folder's listing and one image."""
        file, _ = _list_images(self.path, "train")[0]
        mode, _ = _header(file)
        image = stacked([_read_image(file, mode)], str(self.path))
        names = _names(self.path)
        return Description(self.path.resolve().name, tuple(as_inputs(image, "").shape[1:]), len(names), names)

    def load(self, augmentation: str) -> Dataset:
        """All images; grey if all are, else RGB. They are not augmented."""
        parts = [_list_images(self.path, part) for part in ("train", "test")]
        headers = [[_header(file) for file, _ in files] for files in parts]
        mode = "RGB" if any(mode == "RGB" for part in headers for mode, _ in part) else "L"
        shapes = [[size if mode == "L" else (*size, 3) for _, size in part] for part in headers]
        for part, found in zip(("train", "test"), shapes, strict=True):
            check_one_shape(found, f"{self.path}/{part}")
        needed = sum(len(found) * math.prod(found[0]) for found in shapes)
        check_fits(needed, f"{self.path}: its images", "scale them down, or use fewer", DataError)
        train_inputs, train_targets = _read_images(parts[0], mode, f"{self.path}/train")
        test_inputs, test_targets = _read_images(parts[1], mode, f"{self.path}/test")
        names = _names(self.path)
        return Dataset(
            name=self.path.resolve().name,
            train_inputs=train_inputs,
            train_targets=train_targets,
            test_inputs=test_inputs,
            test_targets=test_targets,
            num_classes=len(names),
            preprocess=plain(train_inputs),
            classes=names,
        )


@dataclass(frozen=True)
class NpzSource:
    """An `.npz` file with the arrays x_train, y_train, x_test and y_test, and optionally `classes`, their names.

    Targets are integer labels, or of the form that the task requires; inputs of tasks by position may be integer
    tokens.
    """

    path: Path
    task: Task = CLASSIFICATION

    def describe(self) -> Description:
        """Reads the arrays' headers, targets and names; also inputs if they are tokens."""
        shape, kind = _headers(self.path)["x_train"]
        sample = self._inputs(np.zeros((1, *shape[1:]), kind), "x_train")
        names = ("y_train", NAMES, *(("x_train",) if self.task.by_position else ()))
        counted = self._counted(_read_arrays(self.path, names))
        return Description(self.path.stem, tuple(sample.shape[1:]), *counted, task=self.task)

    def load(self, augmentation: str) -> Dataset:
        """All arrays; classes are those named, or 0 to the largest training label. They are not augmented."""
        _headers(self.path)
        return self.dataset_of(_read_arrays(self.path, (*ARRAYS, NAMES)))

    def dataset_of(self, arrays: Mapping[str, np.ndarray]) -> Dataset:
        """The data set that these arrays make."""
        num_classes, names = self._counted(arrays)
        train_inputs = self._inputs(arrays["x_train"], "x_train")
        return Dataset(
            name=self.path.stem,
            train_inputs=train_inputs,
            train_targets=self._targets(arrays["y_train"], "y_train"),
            test_inputs=self._inputs(arrays["x_test"], "x_test"),
            test_targets=self._targets(arrays["y_test"], "y_test"),
            num_classes=num_classes,
            preprocess=plain(train_inputs),
            classes=names,
            task=self.task,
        )

    def _inputs(self, array: np.ndarray, name: str) -> Tensor:
        """Tokens unchanged if the task may have them; else images or features."""
        if self.task.by_position and np.issubdtype(array.dtype, np.integer):
            return torch.from_numpy(array.astype(np.int64))
        return as_inputs(array, f"{self.path}: {name}")

    def _targets(self, array: np.ndarray, name: str) -> Tensor:
        """Targets in the task's type; whether they are valid is checked later."""
        where = f"{self.path}: {name}"
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

    def _counted(self, arrays: Mapping[str, np.ndarray]) -> tuple[int, tuple[str, ...] | None]:
        """The width of an output, and the classes' names, if any."""
        if self.task.has_classes or NAMES in arrays:
            return _counted(arrays, self.path)
        targets = self._targets(arrays["y_train"], "y_train")
        if len(targets) == 0:
            raise DataError(f"{self.path}: training part: no examples; give at least one")
        if wrong := self.task.form_fault(targets):
            raise DataError(f"{self.path}: y_train: they {wrong}; {self.task.name} expects {self.task.targets_for()}")
        width = self.task.width_for(targets)
        tokens = self.task.name == "next_token" and arrays["x_train"].dtype.kind in "iu"
        return (max(width, int(arrays["x_train"].max()) + 1) if tokens else width), None


def _headers(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and type of every array, unread; checks that they fit in memory and that the file has their bytes."""
    with _opened_archive(path) as archive:
        found = {name.removesuffix(".npy"): archive.getinfo(name) for name in archive.namelist()}
        missing = [name for name in ARRAYS if name not in found]
        if missing:
            expected, names = ", ".join(ARRAYS), ", ".join(found) or "nothing"
            raise DataError(f"{path}: no array {', '.join(missing)}; expected {expected}, found {names}")
        headers: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        for name in (*ARRAYS, *({NAMES} & found.keys())):
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
    kinds = [headers[name][1] for name in ("x_train", "x_test")]
    if len({np.issubdtype(kind, np.floating) for kind in kinds}) > 1:
        raise DataError(f"{path}: x_train is {kinds[0]} but x_test {kinds[1]}; store both in one type")
    needed = sum(math.prod(shape) * kind.itemsize for shape, kind in headers.values())
    check_fits(needed, f"{path}: its arrays", "make them smaller, or use fewer examples", DataError)
    return headers


def _header_of(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of a stored array, whose first value is then next in the file."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(file)
    return shape, kind


def _read_arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
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


def _counted(arrays: Mapping[str, np.ndarray], path: Path) -> tuple[int, tuple[str, ...] | None]:
    """The number of classes, and their names, if any."""
    if NAMES in arrays:
        names = arrays[NAMES]
        if names.ndim != 1 or names.dtype.kind != "U":
            raise DataError(f"{path}: {NAMES}: expected text of shape (classes,), found {names.dtype} {names.shape}")
        return len(names), tuple(unicodedata.normalize("NFC", str(name)) for name in names)
    targets = as_targets(arrays["y_train"], f"{path}: y_train")
    if len(targets) == 0:
        raise DataError(f"{path}: training part: no examples; give at least one")
    return classes_in(targets, f"{path}: y_train", f"name all classes in an array {NAMES!r}"), None


def _class_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _names(path: Path) -> tuple[str, ...]:
    """The classes' names in one Unicode form, since file systems differ in theirs."""
    return tuple(unicodedata.normalize("NFC", name) for name in _class_names(path / "train"))


def _list_images(path: Path, part: str) -> list[tuple[Path, int]]:
    """Image files of one part and the class of each, sorted by class and file name."""
    if not (path / part).is_dir():
        names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
        shown = ", ".join([*names[:3], "..."] if len(names) > 4 else names) or "nothing"
        raise DataError(f"{path}: no folder {part}; {_LAYOUT}, found {shown}")
    number = {name: position for position, name in enumerate(_class_names(path / "train"))}
    found: list[tuple[Path, int]] = []
    for name in _class_names(path / part):
        if name not in number:
            raise DataError(f"{path / part / name}: a class without training images; put some in {path}/train/{name}")
        files = sorted(file for file in (path / part / name).iterdir() if file.suffix.lower() in _SUFFIXES)
        if not files:
            raise DataError(f"{path / part / name}: no images; add some or remove the folder")
        found += [(file, number[name]) for file in files]
    if not found:
        raise DataError(f"{path / part}: no images; {_LAYOUT}")
    return found


def _header(file: Path) -> tuple[str, tuple[int, int]]:
    """An image's mode, "L" (grey) or "RGB", and (height, width), from its header alone."""
    with opened(file, str(file)) as image:
        return "L" if image.mode in ("1", "L") else "RGB", (image.height, image.width)


def _read_images(files: list[tuple[Path, int]], mode: str, where: str) -> tuple[Tensor, Tensor]:
    """Images (n, channels, height, width) and targets (n,)."""
    images = stacked((_read_image(file, mode) for file, _ in files), where)
    return as_inputs(images, where), as_targets(np.array([label for _, label in files]), where)


def _read_image(file: Path, mode: str) -> np.ndarray:
    with opened(file, str(file)) as image:
        return np.asarray(image.convert(mode))
