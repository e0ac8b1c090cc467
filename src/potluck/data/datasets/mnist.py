"""MNIST: handwritten digits, 60,000 for training and 10,000 for testing, 1 x 28 x 28 (LeCun et al., 1998).

The papers normalise it and augment nothing.
"""

from potluck.data.datasets._hub import HubSource
from potluck.data.transforms import Normalise, Pipeline

_SOURCE = HubSource(
    name="mnist",
    repository="ylecun/mnist",
    configuration="mnist",
    image_shape=(1, 28, 28),
    num_classes=10,
    preprocess=Pipeline(prepare=(Normalise(mean=(0.1307,), std=(0.3081,)),)),
)
describe, load = _SOURCE.describe, _SOURCE.load
