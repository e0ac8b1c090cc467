"""CIFAR-100, fine labels: 500 for training and 100 for testing in each of 100 classes (Krizhevsky, 2009).

Images are 3 x 32 x 32. FeDepth crops (padding 4), flips and normalises; the other papers do not specify it.
"""

from potluck.data.datasets._hub import HubSource
from potluck.data.transforms import Normalise, Pipeline, RandomCrop, RandomFlip

_SOURCE = HubSource(
    name="cifar100",
    repository="uoft-cs/cifar100",
    configuration="cifar100",
    image_shape=(3, 32, 32),
    num_classes=100,
    preprocess=Pipeline(
        prepare=(Normalise(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),),
        before=(RandomCrop(), RandomFlip()),
    ),
    image="img",
    label="fine_label",
)
describe, load = _SOURCE.describe, _SOURCE.load
