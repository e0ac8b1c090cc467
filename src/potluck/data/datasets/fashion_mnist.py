"""Fashion-MNIST: 6,000 images for training and 1,000 for testing a class, ten classes (Xiao et al., 2017).

Stored as 1 x 28 x 28. As in InCo's code, which the FedIN family follows, images are enlarged to 32 x 32,
scaled to 0 .. 1 without further normalisation (mean 0.2860 and deviation 0.3530 are not used), and not
augmented.
"""

from potluck.data.datasets._hub import HubSource
from potluck.data.transforms import Normalise, Pipeline, Resize

_SOURCE = HubSource(
    name="fashion_mnist",
    repository="zalando-datasets/fashion_mnist",
    configuration="fashion_mnist",
    image_shape=(1, 28, 28),
    num_classes=10,
    preprocess=Pipeline(prepare=(Normalise(), Resize(32))),
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
)
describe, load = _SOURCE.describe, _SOURCE.load
