"""CINIC-10: CIFAR-10's ten classes from CIFAR-10 and ImageNet, 3 x 32 x 32 (Darlow et al., 2018).

Of its three splits of 90,000 images the papers train on `train` and test on `test`. They contain all of
CIFAR-10, test images too: never use CINIC-10 as public data for, or before, a model that is evaluated on
CIFAR-10.

The papers state only that images are flipped; cropping and cutting out are those of InCo's code
for CIFAR-10. For CINIC-10 that code flips test images at random as well; here test images stay as they are.
"""

from potluck.data.datasets._hub import HubSource
from potluck.data.transforms import Cutout, Normalise, Pipeline, RandomCrop, RandomFlip

_MEAN = (0.47889522, 0.47227842, 0.43047404)
_STD = (0.24205776, 0.23828046, 0.25874835)

_SOURCE = HubSource(
    name="cinic10",
    repository="flwrlabs/cinic10",
    configuration=None,
    image_shape=(3, 32, 32),
    num_classes=10,
    preprocess=Pipeline(
        prepare=(Normalise(_MEAN, _STD),),
        before=(RandomCrop(), RandomFlip()),
        after=(Cutout(),),
    ),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)
describe, load = _SOURCE.describe, _SOURCE.load
