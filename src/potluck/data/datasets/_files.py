"""One's own data from disk: a folder of images or an `.npz` file."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from potluck.core.errors import DataError
from potluck.data.dataset import Dataset, Description
from potluck.data.datasets._images import as_inputs, as_targets, plain, stacked

_LAYOUT = "expected train/<class>/<image> and test/<class>/<image>"
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class FolderSource:
    """A folder with `train` and `test`, in each a folder of images a class; classes are sorted by name."""

    path: Path

    def describe(self) -> Description:
        """Reads the folder's listing and one image."""
        files = _list_images(self.path, "train")
        image = stacked([_read_image(files[0][0], _common_mode([files[0][0]]))], str(self.path))
        return Description(self.path.resolve().name, tuple(as_inputs(image, "").shape[1:]), _num_classes(self.path))

    def load(self, augmentation: str) -> Dataset:
        """All images; grey if every one is, else RGB. There is nothing to augment."""
        train, test = _list_images(self.path, "train"), _list_images(self.path, "test")
        mode = _common_mode([file for file, _ in train + test])
        train_inputs, train_targets = _read_images(train, mode, f"{self.path}/train")
        test_inputs, test_targets = _read_images(test, mode, f"{self.path}/test")
        return Dataset(
            name=self.path.resolve().name,
            train_inputs=train_inputs,
            train_targets=train_targets,
            test_inputs=test_inputs,
            test_targets=test_targets,
            num_classes=_num_classes(self.path),
            preprocess=plain(train_inputs),
        )


@dataclass(frozen=True)
class NpzSource:
    """An `.npz` file with the arrays x_train, y_train, x_test and y_test."""

    path: Path

    def describe(self) -> Description:
        """Reads the whole file."""
        return self.load("none").description

    def load(self, augmentation: str) -> Dataset:
        """All arrays; classes are 0 to the largest training label. There is nothing to augment."""
        arrays = _read_arrays(self.path)
        train_inputs = as_inputs(arrays["x_train"], f"{self.path}: x_train")
        train_targets = as_targets(arrays["y_train"], f"{self.path}: y_train")
        return Dataset(
            name=self.path.stem,
            train_inputs=train_inputs,
            train_targets=train_targets,
            test_inputs=as_inputs(arrays["x_test"], f"{self.path}: x_test"),
            test_targets=as_targets(arrays["y_test"], f"{self.path}: y_test"),
            num_classes=int(train_targets.max()) + 1 if len(train_targets) else 0,
            preprocess=plain(train_inputs),
        )


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The four arrays of an archive; never unpickles."""
    try:
        # Opened here because numpy leaves a file open that turns out to be no archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            missing = [name for name in _ARRAYS if name not in archive]
            if missing:
                found = ", ".join(archive.files) or "nothing"
                raise DataError(f"{path}: no array {', '.join(missing)}; expected {', '.join(_ARRAYS)}, found {found}")
            return {name: archive[name] for name in _ARRAYS}
    except (AttributeError, EOFError, TypeError, ValueError, OSError, zipfile.BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not an .npz file of plain arrays; write one with numpy.savez") from error


def _class_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _num_classes(path: Path) -> int:
    return len(_class_names(path / "train"))


def _list_images(path: Path, part: str) -> list[tuple[Path, int]]:
    """Image files of one part and the class of each, sorted by class and file name."""
    if not (path / part).is_dir():
        raise DataError(f"{path}: no folder {part}; {_LAYOUT}")
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


def _common_mode(files: list[Path]) -> str:
    """The PIL mode that all images are brought to: "L" (grey) if every one is grey, else "RGB"."""
    from PIL import Image

    for file in files:
        try:
            with Image.open(file) as image:  # reads the header only
                if image.mode not in ("1", "L"):
                    return "RGB"
        except OSError as error:
            raise _unreadable(file) from error
    return "L"


def _read_images(files: list[tuple[Path, int]], mode: str, where: str) -> tuple[Tensor, Tensor]:
    """Images (n, channels, height, width) and targets (n,)."""
    images = stacked((_read_image(file, mode) for file, _ in files), where)
    return as_inputs(images, where), as_targets(np.array([label for _, label in files]), where)


def _read_image(file: Path, mode: str) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(file) as image:
            return np.asarray(image.convert(mode))
    except OSError as error:
        raise _unreadable(file) from error


def _unreadable(file: Path) -> DataError:
    return DataError(f"{file}: cannot be read as an image; replace or remove it")
