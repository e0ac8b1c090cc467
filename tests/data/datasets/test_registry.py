import subprocess
import sys
from pathlib import Path

import pytest
import torch

from potluck.core.errors import ConfigError, DataError
from potluck.data import datasets
from potluck.data.dataset import Dataset, Description

NAMES = ["cifar10", "cifar100", "cinic10", "digits", "fashion_mnist", "mnist", "svhn", "tiny_imagenet"]


def test_listing() -> None:
    assert datasets.list_datasets() == NAMES
    assert datasets.list_datasets("cifar*") == ["cifar10", "cifar100"]


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("cifar10", (3, 32, 32), 10),
        ("cifar100", (3, 32, 32), 100),
        ("cinic10", (3, 32, 32), 10),
        ("digits", (1, 8, 8), 10),
        ("fashion_mnist", (1, 32, 32), 10),
        ("mnist", (1, 28, 28), 10),
        ("svhn", (3, 32, 32), 10),
        ("tiny_imagenet", (3, 64, 64), 200),
    ],
)
def test_descriptions(name: str, shape: tuple[int, ...], classes: int) -> None:
    assert datasets.describe(name) == Description(name, shape, classes)


def test_describing_imports_nothing_heavy() -> None:
    code = (
        "import sys; from potluck.data import datasets; "
        "[datasets.describe(name) for name in datasets.list_datasets()]; "
        "print([m for m in ('datasets', 'sklearn', 'PIL', 'pyarrow', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'cifar'; nearest: cifar10, .*all: potluck list datasets"):
        datasets.load("cifar")


@pytest.mark.parametrize("path", ["missing.npz", "some/folder", Path("digits")])
def test_missing_path(path: str | Path) -> None:
    with pytest.raises(DataError, match=f"^{path}: no such file or folder; expected"):
        datasets.load(path)


def test_unknown_augmentation() -> None:
    with pytest.raises(ConfigError, match="augmentation: expected 'paper' or 'none', found 'autoaugment'"):
        datasets.load("digits", augmentation="autoaugment")


def test_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)

    class Zeros:
        @staticmethod
        def describe() -> Description:
            return Description("zeros", (3,), 1)

        @staticmethod
        def load(augmentation: str) -> Dataset:
            return Dataset(f"zeros-{augmentation}", *zeros, *zeros, num_classes=1)

    class Point:
        load = staticmethod(lambda: Zeros)

    monkeypatch.setattr("potluck.data.datasets.plugins", {"potluck.datasets": {"zeros": Point}}.__getitem__)
    assert datasets.list_datasets("z*") == ["zeros"]
    assert datasets.describe("zeros").input_shape == (3,)
    assert datasets.load("zeros").name == "zeros-paper"
