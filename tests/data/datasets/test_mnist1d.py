import numpy as np
import torch

from potluck.core.ground.rng import fold_in
from potluck.data.datasets import describe, load
from potluck.data.datasets.mnist1d import generate


def test_the_examples_are_those_of_the_published_file() -> None:
    # Of mnist1d_data.pkl (sha256 e95257676e9f...) in the authors' repository, its arrays x, y, x_test and y_test
    # rounded to single precision: 200,000 numbers and 5,000 labels, in order.
    assert load("mnist1d").checksum == "2af9033e295f0c0bbc7aa080c9ff62d7"


def test_double_precision_is_that_of_the_published_file() -> None:
    examples, digits = generate()
    first = [-0.33200567, -0.47191037, -0.77869708, -1.00974083, -0.88235257, 0.10393481]
    np.testing.assert_allclose(examples[0, :6], first, atol=5e-9)
    np.testing.assert_allclose(examples[4000, -4:], [0.41959106, 1.13416264, 0.84632982, 0.34613289], atol=5e-9)
    assert digits[:10].tolist() == [2, 6, 4, 5, 6, 6, 6, 0, 3, 1]
    assert digits[4000:4010].tolist() == [2, 6, 3, 9, 4, 3, 1, 9, 5, 2]


def test_there_are_4000_and_1000_standardised_sequences_of_40_numbers() -> None:
    data = load("mnist1d")
    assert data.description == describe("mnist1d")
    assert data.train_inputs.shape == (4000, 40)
    assert data.test_inputs.shape == (1000, 40)
    assert (data.train_targets.bincount() + data.test_targets.bincount()).tolist() == [500] * 10
    everything = torch.cat([data.train_inputs, data.test_inputs])
    assert abs(everything.mean()) < 1e-6
    assert abs(everything.std(correction=0) - 1) < 1e-6


def test_nothing_is_augmented() -> None:
    train = load("mnist1d", augmentation="standard").train
    assert torch.equal(train.batch(torch.arange(4), fold_in(0))[0], train.batch(torch.arange(4))[0])


def test_drawing_neither_reads_nor_moves_the_global_generator() -> None:
    np.random.seed(3)
    first, _ = generate()
    after = np.random.rand()
    np.random.seed(3)
    assert np.random.rand() == after
    assert np.array_equal(first, generate()[0])
