"""Images in rows, as an attack shows them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.analysis.plots.curves import Figure, style

_SIDE, _GAP, _WORDS = 0.55, 0.05, 0.22  # inches: of an image, between two, of the words above a row
_NARROWEST = 2.4  # inches, so that the words have room


def draw_images(rows: Mapping[str, NDArray[Any]]) -> Figure:
    """Rows of images (n, channels, height, width) in [0, 1] under one another, each with its name."""
    from matplotlib.figure import Figure as NewFigure

    step, band = _SIDE + _GAP, _SIDE + _WORDS
    width = max(_NARROWEST, step * max(len(images) for images in rows.values()) + _GAP)
    height = band * len(rows) + _GAP
    with style():
        figure = NewFigure(figsize=(width, height))
        for number, (name, images) in enumerate(rows.items()):
            top = height - band * number
            figure.text(_GAP / width, (top - _WORDS / 2) / height, name, fontsize=7, va="center")
            for place, image in enumerate(images):
                corner = (_GAP + step * place) / width, (top - band) / height
                axes = figure.add_axes((*corner, _SIDE / width, _SIDE / height))
                axes.set_axis_off()
                shown = image[0] if len(image) == 1 else np.moveaxis(image[:3], 0, -1)
                axes.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    return figure
