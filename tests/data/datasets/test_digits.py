import numpy as np
import torch
from sklearn.datasets import load_digits

from potluck.core.ground.rng import fold_in
from potluck.data.datasets import describe, load


def test_pixels_are_those_of_scikit_learn() -> None:
    digits = load("digits")
    stored = {image.tobytes() for image in load_digits().images.astype(np.uint8)}
    loaded = torch.cat([digits.train_inputs, digits.test_inputs])
    assert loaded.dtype == torch.uint8
    assert loaded.shape == (1797, 1, 8, 8)
    assert loaded.max() == 16
    assert {image.numpy().tobytes() for image in loaded} == stored


def test_a_stratified_fifth_is_held_out() -> None:
    digits = load("digits")
    train, test = digits.train_targets.bincount(), digits.test_targets.bincount()
    assert (train + test).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert test.sum() == 359
    assert (test - 0.2 * (train + test)).abs().max() < 1


def test_the_held_out_part_never_changes() -> None:
    # The checksum as first recorded: results stay comparable only as long as it holds.
    assert load("digits").checksum == "8411f97daedf17e163f62b4a32dc66b7"


def test_prepared_inputs_are_standardised() -> None:
    digits = load("digits", augmentation="none")
    assert digits.description == describe("digits")
    inputs, _, _ = digits.train.batch(torch.arange(len(digits.train)))
    assert abs(inputs.mean()) < 0.005
    assert abs(inputs.std() - 1) < 0.005
    augmented, _, _ = digits.train.batch(torch.arange(4), fold_in(0))
    assert torch.equal(augmented, inputs[:4])
