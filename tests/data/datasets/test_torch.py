from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from potluck.core.ground.errors import DataError
from potluck.data.datasets import from_torch
from potluck.data.transforms import Normalise, Pipeline

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
LABELS = [0, 2, 1, 0]
CHANNELS_FIRST = torch.from_numpy(PIXELS.transpose(0, 3, 1, 2).copy())


def items(inputs: Any, labels: Any = LABELS) -> list[tuple[Any, Any]]:
    """A list is a map-style data set."""
    return list(zip(inputs, labels, strict=True))


@pytest.mark.parametrize(
    "inputs",
    [list(PIXELS), [Image.fromarray(pixels) for pixels in PIXELS], list(CHANNELS_FIRST)],
    ids=["arrays", "PIL", "tensors"],
)
def test_images(inputs: list[Any]) -> None:
    mine = from_torch(items(inputs), items(inputs[:2], LABELS[:2]), name="mine")
    assert torch.equal(mine.train_inputs, CHANNELS_FIRST)
    assert mine.train_targets.tolist() == LABELS
    assert (mine.name, mine.num_classes, mine.input_shape) == ("mine", 3, (3, 6, 5))
    assert mine.test.batch(torch.tensor([0]))[0].max() <= 1


def test_tensors_are_channels_first_whatever_their_sizes() -> None:
    images = torch.zeros(4, 2, 5, 3, dtype=torch.uint8)
    assert from_torch(items(images), items(images)).input_shape == (2, 5, 3)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA"])
def test_other_pil_modes(mode: str) -> None:
    images = [Image.fromarray(pixels).convert(mode) for pixels in PIXELS]
    assert from_torch(items(images), items(images)).input_shape == ((1, 6, 5) if mode == "L" else (3, 6, 5))


def test_a_torch_data_set_of_features() -> None:
    features, targets = torch.randn(4, 7, dtype=torch.float64), torch.tensor(LABELS)
    data = TensorDataset(features, targets)
    mine = from_torch(data, data, num_classes=5)
    assert mine.num_classes == 5
    assert mine.preprocess is None
    torch.testing.assert_close(mine.train_inputs, features.float())
    assert torch.equal(mine.train_targets, targets)


def test_labels_that_begin_with_1_make_no_class_more() -> None:
    mine = items(PIXELS, [1, 2, 3, 1])
    with pytest.raises(DataError, match=r"mine: training part: the smallest label is 1, .* give num_classes"):
        from_torch(mine, mine, name="mine")
    assert from_torch(mine, mine, num_classes=4).num_classes == 4


def test_own_preprocessing() -> None:
    mine = from_torch(items(PIXELS), items(PIXELS), preprocess=Pipeline((Normalise((0.5,), (0.5,)),)))
    torch.testing.assert_close(mine.train.batch(torch.arange(4))[0], CHANNELS_FIRST / 127.5 - 1)


@pytest.mark.parametrize(
    ("train", "num_classes", "message"),
    [
        ([], None, "custom: training part: no examples"),
        (items([PIXELS[0], PIXELS[1, :4]], [0, 1]), None, r"different shapes, \(4, 5, 3\) and \(6, 5, 3\)"),
        (items(PIXELS, [0, 1, 2, 3]), 3, "training part: label 3; expected labels from 0 to 2"),
        (items(PIXELS, [0, 1, 2, -3]), None, "training part: label -3"),
        (items(torch.zeros(4, 7, dtype=torch.int64)), None, "found int64; convert them"),
        (items(PIXELS[:1], [0]), None, "test part: label 2; expected labels from 0 to 0"),
    ],
)
def test_errors(train: list[tuple[Any, Any]], num_classes: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_torch(train, items(PIXELS), num_classes)
