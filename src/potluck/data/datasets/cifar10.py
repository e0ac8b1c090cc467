"""CIFAR-10: photographs, 5,000 for training and 1,000 for testing in each of ten classes (Krizhevsky, 2009).

Images are 3 x 32 x 32, cropped (padding 4) and flipped, as is usual; no paper states more. The code of InCo, by FedIN's
first author, also cuts out a square of 16, which is `federation.augmentation = ["crop", "flip", "cutout"]`. The
deviations are those of all pixels; some codes use (0.2023, 0.1994, 0.2010), the mean of each image's
own deviation.
"""

from potluck.data.datasets._hub import HubSource
from potluck.data.transforms import Normalise, Pipeline, RandomCrop, RandomFlip

_SOURCE = HubSource(
    name="cifar10",
    repository="uoft-cs/cifar10",
    configuration="plain_text",
    image_shape=(3, 32, 32),
    num_classes=10,
    preprocess=Pipeline(
        prepare=(Normalise(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),),
        before=(RandomCrop(), RandomFlip()),
    ),
    image="img",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)
describe, load = _SOURCE.describe, _SOURCE.load
