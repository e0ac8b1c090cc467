"""A recipe on digits, and a hub in which every data set is a few images of noise."""

import importlib
import io

import numpy as np
import pytest
from PIL import Image

from potluck.data.datasets import list_datasets
from potluck.data.datasets._hub import HubSource

TRAIN, TEST = 400, 50


@pytest.fixture(scope="session")
def hub_of_noise(tmp_path_factory):
    """A folder in the hub's layout with every data set of the hub: images of noise, with every label that fits in."""
    folder, rng = tmp_path_factory.mktemp("hub"), np.random.default_rng(0)
    for name in list_datasets():
        source = getattr(importlib.import_module(f"potluck.data.datasets.{name}"), "_SOURCE", None)
        if isinstance(source, HubSource):
            for split, count in (("train", TRAIN), (source.test_split, TEST)):
                write(folder, source, split, rng, count)
    return folder


def write(folder, source, split, rng, count):
    """Write one split of a data set."""
    import pyarrow
    from pyarrow import parquet

    channels, height, width = source.image_shape
    shape = (height, width, 3) if channels == 3 else (height, width)
    rows = [{"bytes": png(rng.integers(0, 256, shape, dtype=np.uint8)), "path": None} for _ in range(count)]
    images = pyarrow.array(rows, pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    labels = pyarrow.array([index % source.num_classes for index in range(count)], pyarrow.int64())
    place = folder / source.repository / (source.configuration or "data") / f"{split}-00000-of-00001.parquet"
    place.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({source.image: images, source.label: labels}), place)


def png(pixels):
    """An image as PNG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
