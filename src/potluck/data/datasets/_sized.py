"""Images made smaller or larger than a data set has them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from potluck.core.ground.errors import ConfigError, DataError
from potluck.core.ground.fields import Checked, at_least
from potluck.core.ground.inputs import InputShape, first_of, one_shape, shape_of, shown
from potluck.core.requests.examples import Preprocess
from potluck.data.dataset import Dataset, Description, Source
from potluck.data.transforms import Pipeline, Resize, Then, shrunk


@dataclass(frozen=True, eq=False)
class SizedSource(Checked):
    """A source whose images are made `size` x `size`.

    Smaller images take the place of the stored ones, once for all rounds. Larger ones are made of each batch, so that
    what is stored stays small; crops are then of the stored images, and cut-outs of the larger ones.
    """

    source: Source
    size: Annotated[int, at_least(1)]

    def describe(self) -> Description:
        """The source's own, with the other size."""
        found = self.source.describe()
        check_images("image_size", found.name, found.input_shape)
        channels, *_ = one_shape(found.input_shape)
        return replace(found, input_shape=(channels, self.size, self.size))

    def load(self, augmentation: str) -> Dataset:
        """The source's own, with the other size.

        Raises:
            ConfigError: its inputs are no images.
            DataError: its preprocessing, which is none of Potluck's, gives images another size.
        """
        dataset = self.source.load(augmentation)
        check_images("image_size", dataset.name, shape_of(dataset.train_inputs), dataset.input_shape)
        train, test = self._shrunk(first_of(dataset.train_inputs)), self._shrunk(first_of(dataset.test_inputs))
        preprocess = self._prepared(dataset.preprocess, min(train.shape[-2:]))
        found = replace(dataset, train_inputs=train, test_inputs=test, preprocess=preprocess)
        if one_shape(found.input_shape)[1:] != (self.size, self.size):
            raise DataError(
                f"federation.image_size: {found.name} has a preprocessing of its own, which makes inputs of shape"
                f" {found.input_shape} of images of {self.size} x {self.size}; leave the size to one of them"
            )
        return found

    def _shrunk(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        if max(height, width) <= self.size:
            return images
        return shrunk(images, min(height, self.size), min(width, self.size))

    def _prepared(self, own: Preprocess | None, stored: int) -> Preprocess | None:
        """The preprocessing of images whose shorter side is `stored`, at most `size`, which makes them as large."""
        enlarge = self.size if stored < self.size else None
        if own is None or isinstance(own, Pipeline):
            return (own or Pipeline(())).sized(enlarge)
        return own if enlarge is None else Then(own, Resize(enlarge))


def check_images(key: str, name: str, *shapes: InputShape) -> None:
    """Check that inputs of these shapes, as stored and as prepared, are images, for a setting of the federation.

    Raises:
        ConfigError: they are not.
    """
    for shape in shapes:
        if isinstance(shape, Mapping):
            raise ConfigError(f"federation.{key}: {name} has named inputs, {shown(shape)}; leave it out")
        if len(shape) != 3:
            raise ConfigError(
                f"federation.{key}: {name} has no images, its inputs have shape {tuple(shape)}; leave it out"
            )
