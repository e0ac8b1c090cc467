"""Your own data from disk: a folder of images."""

import math
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from potluck.core.ground.errors import DataError
from potluck.core.ground.machine import check_fits
from potluck.data.dataset import Dataset, Description
from potluck.data.datasets._images import as_inputs, as_targets, check_one_shape, opened, stacked
from potluck.data.transforms import plain

_LAYOUT = "expected train/<class>/<image> and test/<class>/<image>"
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


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
