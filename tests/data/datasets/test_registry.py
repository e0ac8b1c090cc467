import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from potluck.core.ground.errors import ConfigError, DataError
from potluck.data import datasets
from potluck.data.dataset import Dataset, Description

NAMES = ["cifar10", "cifar100", "cinic10", "digits", "fashion_mnist", "mnist", "mnist1d", "svhn", "tiny_imagenet"]


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
        ("mnist1d", (40,), 10),
        ("svhn", (3, 32, 32), 10),
        ("tiny_imagenet", (3, 64, 64), 200),
    ],
)
def test_descriptions(name: str, shape: tuple[int, ...], classes: int) -> None:
    found = datasets.describe(name)
    assert (found.name, found.input_shape, found.num_classes) == (name, shape, classes)


@pytest.mark.parametrize("name", ["cifar10", "cinic10", "fashion_mnist"])
def test_classes_that_have_names_are_named(name: str) -> None:
    assert datasets.describe(name).class_names[1] == {"fashion_mnist": "Trouser"}.get(name, "automobile")


@pytest.mark.slow
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


@pytest.mark.parametrize("address", ["https://example.org/pets.npz", "s3://bucket/pets", "https:/example.org/pets.npz"])
def test_an_address_on_the_web_is_no_path(address: str) -> None:
    for place in (address, Path(address)):
        with pytest.raises(DataError, match="an address on the web; download the data, and give the path"):
            datasets.load(place)


@pytest.mark.parametrize("path", ["x" * 5000, f"{'x' * 300}/pets.npz"])
def test_a_path_that_no_file_can_have(path: str) -> None:
    with pytest.raises((DataError, ConfigError)) as caught:
        datasets.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("unknown", ["autoaugment", [], ["crop", "mixup"], ["flip", "crop"], ["flip", "flip"]])
def test_unknown_augmentation(unknown: str | list[str]) -> None:
    expected = (
        r"augmentation: expected 'standard', 'none', or a list of steps .* such as \[\"crop\", \"flip\", \"cutout\"\]"
    )
    with pytest.raises(ConfigError, match=f"^{expected}, found {re.escape(repr(unknown))}$"):
        datasets.load("digits", augmentation=unknown)


def test_the_augmentation_of_earlier_versions_is_answered_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"'paper' is called 'standard' now, .*: \[\"crop\", \"flip\", \"cutout\"\]$"):
        datasets.load("digits", augmentation="paper")


@pytest.mark.parametrize("key", ["augmentation", "image_size"])
def test_what_only_images_have_is_refused_for_other_inputs(key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^federation.{key}: mnist1d has no images, .* shape \(40,\); leave it out$"
    ):
        _ = (
            datasets.load("mnist1d", augmentation=["flip"])
            if key == "augmentation"
            else datasets.describe("mnist1d", image_size=16)
        )


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
    assert datasets.load("zeros").name == "zeros-standard"
