"""Tiny-ImageNet: 200 classes, 500 images each for training and 50 for testing, 3 x 64 x 64.

The test split has no labels, so the validation split is tested on. The few grey images become RGB. Classes
are numbered by sorted WordNet identifier, as on the hub, which is not the order of `wnids.txt`. FedORION,
which uses this data set, mentions no augmentation and no other size.
"""

from potluck.data.datasets._hub import HubSource
from potluck.data.transforms import Normalise, Pipeline

_SOURCE = HubSource(
    name="tiny_imagenet",
    repository="zh-plus/tiny-imagenet",
    configuration=None,
    image_shape=(3, 64, 64),
    num_classes=200,
    preprocess=Pipeline(prepare=(Normalise(mean=(0.4802, 0.4481, 0.3975), std=(0.2770, 0.2691, 0.2821)),)),
    test_split="valid",
)
describe, load = _SOURCE.describe, _SOURCE.load
