"""The real images, where POTLUCK_DATA holds them; decoded once into the user's own cache."""

import os
from pathlib import Path

import pytest
import torch

from potluck.data.dataset import Dataset
from potluck.data.datasets import describe, load

pytestmark = pytest.mark.slow


def load_real(name: str, repository: str) -> Dataset:
    folder = os.environ.get("POTLUCK_DATA")
    if not folder or not (Path(folder) / repository).is_dir():
        pytest.skip(f"POTLUCK_DATA names no folder that holds {repository}")
    return load(name)


def channel_moments(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each channel, from counts of the 256 brightnesses."""
    counts = torch.stack([images[:, channel].flatten().bincount(minlength=256) for channel in range(images.shape[1])])
    level = torch.arange(256, dtype=torch.float64) / 255
    share = counts / counts.sum(1, keepdim=True)
    mean = (share * level).sum(1)
    return mean, ((share * level**2).sum(1) - mean**2).sqrt()


def test_mnist() -> None:
    mnist = load_real("mnist", "ylecun/mnist")
    assert mnist.train_inputs.shape == (60_000, 1, 28, 28)
    assert mnist.test_inputs.shape == (10_000, 1, 28, 28)
    expected = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.train_targets.bincount().tolist() == expected
    assert mnist.description == describe("mnist")
    mean, std = channel_moments(mnist.train_inputs)
    torch.testing.assert_close(mean, torch.tensor([0.1307], dtype=torch.float64), atol=1e-4, rtol=0)
    torch.testing.assert_close(std, torch.tensor([0.3081], dtype=torch.float64), atol=1e-4, rtol=0)


def test_cifar10() -> None:
    cifar = load_real("cifar10", "uoft-cs/cifar10")
    assert cifar.train_inputs.shape == (50_000, 3, 32, 32)
    assert cifar.train_inputs.dtype == torch.uint8
    assert cifar.train_targets.bincount().tolist() == [5000] * 10
    assert cifar.test_targets.bincount().tolist() == [1000] * 10
    mean, _ = channel_moments(cifar.train_inputs)
    expected = torch.tensor([0.4914, 0.4822, 0.4465], dtype=torch.float64)
    torch.testing.assert_close(mean, expected, atol=1e-3, rtol=0)


def test_tiny_imagenet() -> None:
    tiny = load_real("tiny_imagenet", "zh-plus/tiny-imagenet")
    assert tiny.train_inputs.shape[1:] == tiny.test_inputs.shape[1:] == (3, 64, 64)
    assert len(tiny.train_targets.unique()) == len(tiny.test_targets.unique()) == tiny.num_classes == 200
    # The full data set has 500 and 50 images a class, a sample of it fewer, but in balance.
    assert len(set(tiny.train_targets.bincount().tolist())) == 1
    assert len(set(tiny.test_targets.bincount().tolist())) == 1
    grey = (tiny.train_inputs[:, 0] == tiny.train_inputs[:, 1]).flatten(1).all(1)
    assert 0 < grey.sum() < len(grey) / 20
