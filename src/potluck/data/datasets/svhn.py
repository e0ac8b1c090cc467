"""SVHN, cropped house numbers: 73,257 for training and 26,032 for testing, 3 x 32 x 32 (Netzer et al., 2011).

The digit 0 has label 0 (10 in the original files). The 531,131 extra images are not used. InCo's code, which
the FedIN family follows, scales pixels to -1 .. 1 (the true mean is 0.4377, 0.4438, 0.4728 and the
deviation 0.1980, 0.2010, 0.1970) and cuts out a square of 16; it neither crops nor flips, since a mirrored digit is a
different symbol.
"""

from potluck.data.datasets._hub import HubSource
from potluck.data.transforms import Cutout, Normalise, Pipeline

_SOURCE = HubSource(
    name="svhn",
    repository="ufldl-stanford/svhn",
    configuration="cropped_digits",
    image_shape=(3, 32, 32),
    num_classes=10,
    preprocess=Pipeline(prepare=(Normalise(mean=(0.5,), std=(0.5,)),), after=(Cutout(),)),
)
describe, load = _SOURCE.describe, _SOURCE.load
