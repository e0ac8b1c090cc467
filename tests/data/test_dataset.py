from dataclasses import replace

import pytest
import torch

from potluck.core.ground.errors import DataError
from potluck.data.dataset import Dataset, Description, arrays_digest
from potluck.data.transforms import Normalise, Pipeline, Resize

IMAGES = torch.arange(6 * 4, dtype=torch.uint8).view(6, 1, 2, 2)
TARGETS = torch.tensor([0, 1, 2, 0, 1, 2])
DATASET = Dataset("toy", IMAGES, TARGETS, IMAGES[:3], TARGETS[:3], 3, Pipeline((Normalise(), Resize(5))))


def test_shape_is_that_of_prepared_inputs() -> None:
    assert DATASET.input_shape == (1, 5, 5)
    assert DATASET.description == Description("toy", (1, 5, 5), 3)
    assert replace(DATASET, preprocess=None).input_shape == (1, 2, 2)


def test_parts_as_examples() -> None:
    inputs, targets, _ = DATASET.train.batch(torch.tensor([5]))
    assert inputs.shape == (1, 1, 5, 5)
    assert targets.tolist() == [2]
    assert len(DATASET.train) == 6
    assert len(DATASET.test) == 3


@pytest.mark.parametrize("field", ["train_inputs", "train_targets", "test_inputs", "test_targets"])
def test_checksum_tells_every_tensor(field: str) -> None:
    changed = getattr(DATASET, field).clone()
    changed[0] = 1
    assert replace(DATASET, name="other").checksum == DATASET.checksum
    assert replace(DATASET, **{field: changed}).checksum != DATASET.checksum


def test_digest_tells_shape_and_type() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    pair = torch.tensor([1, 2])
    digests = [
        arrays_digest(pair),
        arrays_digest(pair.view(1, 2)),
        arrays_digest(pair.int()),
        arrays_digest(pair, empty),
        arrays_digest(empty, pair),
    ]
    assert len(set(digests)) == len(digests)
    assert arrays_digest(torch.arange(6).view(2, 3).T) == arrays_digest(torch.arange(6).view(2, 3).T.contiguous())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_inputs": IMAGES[:0], "train_targets": TARGETS[:0]}, "toy: training part: no examples"),
        ({"train_targets": TARGETS[:5]}, "6 inputs but 5 labels; give each input one label"),
        ({"train_targets": TARGETS.float()}, "found torch.float32"),
        ({"test_targets": torch.tensor([0, 3, 0])}, "toy: test part: label 3; expected labels from 0 to 2"),
        ({"test_targets": torch.tensor([0, -1, 0])}, "label -1"),
        ({"num_classes": 1_000_001}, "toy: 1000001 classes; expected 1 to 1,000,000"),
        ({"num_classes": 0}, "toy: 0 classes; expected 1"),
        ({"classes": ("a", "b")}, "toy: 2 names of classes for 3 classes"),
        ({"classes": ("a", "b", "a")}, "toy: two classes are called 'a'"),
        ({"train_inputs": IMAGES.float()}, "training inputs are torch.float32 but test inputs torch.uint8"),
        ({"train_inputs": IMAGES[:, 0, 0, 0]}, r"toy: training part: inputs of shape \(6,\); expected one row an"),
        ({"test_inputs": IMAGES[:3, :, :1]}, r"shape \(1, 2, 2\) but test inputs \(1, 1, 2\)"),
    ],
)
def test_tensors_that_do_not_fit(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(DATASET, **changes)
