"""Handwritten digits that come with scikit-learn: 1,797 images of 8 x 8 pixels (Alpaydin and Kaynak, 1998).

Pixels are kept exactly as they are, whole numbers from 0 to 16, and divided by 16 when prepared. There is no
official test part: a stratified fifth is held out by a fixed draw that does not depend on a run's seed.
"""

import torch

from potluck.core.ground.rng import fold_in
from potluck.data.dataset import Dataset, Description
from potluck.data.federate import split_validation
from potluck.data.transforms import Normalise, Pipeline

_TEST_FRACTION = 0.2
_TEST_DRAW = fold_in(0, "digits", "test")
_PREPROCESS = Pipeline(prepare=(Normalise(mean=(0.306,), std=(0.377,), largest=16.0),))


def describe() -> Description:
    """The description, without reading any data."""
    return Description("digits", input_shape=(1, 8, 8), num_classes=10)


def load(augmentation: str) -> Dataset:
    """Images 1 x 8 x 8. No paper uses this data set, so they are not augmented."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.as_tensor(pixels).to(torch.uint8).view(-1, 1, 8, 8)
    targets = torch.as_tensor(labels).to(torch.int64)
    train, test = split_validation(torch.arange(len(targets)), targets, _TEST_FRACTION, _TEST_DRAW)
    return Dataset(
        name="digits",
        train_inputs=inputs[train],
        train_targets=targets[train],
        test_inputs=inputs[test],
        test_targets=targets[test],
        num_classes=10,
        preprocess=_PREPROCESS,
    )
