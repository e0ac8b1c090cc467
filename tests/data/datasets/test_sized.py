"""`image_size`: images smaller by a box filter, once; larger bilinearly, batch by batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from potluck.core.ground.errors import ConfigError, DataError
from potluck.core.ground.rng import fold_in
from potluck.data.dataset import Dataset
from potluck.data.datasets import HeldSource, describe, load
from potluck.data.datasets._sized import SizedSource

ALL = torch.arange(12)
MEAN = torch.tensor((0.4914, 0.4822, 0.4465)).view(3, 1, 1)
STD = torch.tensor((0.2470, 0.2435, 0.2616)).view(3, 1, 1)


def batch(dataset: Dataset, augment: bool = False) -> Tensor:
    return dataset.train.batch(ALL, fold_in(0) if augment else None).inputs


@pytest.mark.usefixtures("hub")
def test_cifar10_at_half_its_size_is_the_mean_of_blocks_and_is_stored_so() -> None:
    whole, half = load("cifar10"), load("cifar10", image_size=16)
    for before, after in ((whole.train_inputs, half.train_inputs), (whole.test_inputs, half.test_inputs)):
        means = before.double().reshape(-1, 3, 16, 2, 16, 2).mean((3, 5))
        assert torch.equal(after, means.round().to(torch.uint8))
    torch.testing.assert_close(batch(half), (half.train_inputs / 255 - MEAN) / STD)
    assert half.description == describe("cifar10", image_size=16)
    assert half.input_shape == (3, 16, 16)
    assert half.checksum != whole.checksum


@pytest.mark.usefixtures("hub")
def test_larger_images_are_made_of_each_batch_and_stay_small_in_memory() -> None:
    whole, large = load("cifar10", augmentation="none"), load("cifar10", augmentation="none", image_size=224)
    expected = functional.interpolate(batch(whole), size=(224, 224), mode="bilinear")
    torch.testing.assert_close(batch(large), expected)
    assert torch.equal(large.train_inputs, whole.train_inputs)
    assert large.description == describe("cifar10", image_size=224)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("size", [16, 64])
def test_augmentation_is_as_large_as_the_images(size: int) -> None:
    """A crop moves them by an eighth at most, a cut-out covers a square of half their side."""
    sized = load("cifar10", image_size=size, augmentation=["cutout"])
    shown = (batch(sized, augment=True) == 0).all(1)
    assert int(shown.sum((1, 2)).max()) > (size // 2) ** 2 / 2
    assert int(shown.any(1).sum(1).max()) == int(shown.any(2).sum(1).max()) == size // 2
    cropped = load("cifar10", image_size=size, augmentation=["crop"])
    black = torch.isclose(batch(cropped, augment=True), (0 - MEAN) / STD).all(1)
    rows = black.all(2).sum(1)
    assert size // 16 < int(rows.max()) <= size // 8


def test_fashion_mnist_is_enlarged_from_its_own_pixels_once() -> None:
    """Its usual enlargement to 32 makes way for the one that is asked for."""
    assert [describe("fashion_mnist", image_size=size).input_shape[1] for size in (14, 28, 32, 64)] == [14, 28, 32, 64]


@pytest.mark.usefixtures("cache")
def test_images_of_ones_own_have_any_size(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 20, 40, 3), dtype=np.uint8)
    path, labels = tmp_path / "own.npz", np.arange(6) % 2
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    found = load(path, image_size=20)
    means = images.reshape(6, 20, 20, 2, 3).mean(3).round().astype(np.uint8)
    assert torch.equal(found.test_inputs, torch.from_numpy(means).permute(0, 3, 1, 2))
    mixed = load(path, image_size=32)  # longer than one side, shorter than the other
    assert mixed.train_inputs.shape == (6, 3, 20, 32)
    assert mixed.input_shape == describe(path, image_size=32).input_shape == (3, 32, 32)


def held(preprocess, side: int = 8) -> SizedSource:
    images = torch.rand(6, 1, 8, 8, generator=fold_in(0).generator())
    labels = torch.arange(6) % 2
    return SizedSource(HeldSource(Dataset("held", images, labels, images, labels, 2, preprocess)), side)


def test_a_preprocessing_of_ones_own_keeps_its_augmentation_and_is_enlarged() -> None:
    def noisy(inputs: Tensor, rng: torch.Generator | None) -> Tensor:
        return inputs if rng is None else inputs + torch.randn(inputs.shape, generator=rng)

    large = held(noisy, 16).load("standard")
    expected = noisy(large.train_inputs, fold_in(0).generator())
    found = large.train.batch(torch.arange(6), fold_in(0)).inputs
    torch.testing.assert_close(found, functional.interpolate(expected, size=(16, 16), mode="bilinear"))


def test_a_preprocessing_that_decides_on_the_size_itself_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"^federation.image_size: held has a preprocessing .* shape \(1, 5, 5\) of .* 4 x 4"
    ):
        held(lambda inputs, rng: torch.zeros(len(inputs), 1, 5, 5), 4).load("standard")
    with pytest.raises(ConfigError, match=r"image_size: held has no images, its inputs have shape \(64,\)"):
        held(lambda inputs, rng: inputs.flatten(1), 4).load("standard")
