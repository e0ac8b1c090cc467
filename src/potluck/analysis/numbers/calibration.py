"""How well the confidence of predictions agrees with how often they are right."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 15
"""Bins of equal width, closed to the left; a confidence of 1 is in the last."""


@dataclass(frozen=True)
class Reliability:
    """Of the predictions for some examples.

    Attributes:
        examples: how many.
        accuracy: the share that is right.
        confidence: mean probability of the predicted class.
        ece: expected calibration error: mean over bins of |accuracy - confidence|, by their examples.
        brier: mean over examples of the squared distance between the probabilities and the actual class, 0 to 2.
        counts: of each bin its examples; `hits` how many of them are right, `sure` the sum of their confidences.
    """

    examples: int
    accuracy: float
    confidence: float
    ece: float
    brier: float
    counts: tuple[int, ...]
    hits: tuple[int, ...]
    sure: tuple[float, ...]


def calibration(probabilities: NDArray[Any], labels: NDArray[Any], bins: int = BINS) -> Reliability:
    """Calibration of the predicted class, and the Brier score of all.

    Args:
        probabilities: (n, classes), each row with the sum 1; at least one row.
        labels: (n,), the actual classes.
        bins: of equal width.
    """
    shares = probabilities.astype(np.float64)
    predicted = shares.argmax(1)
    confidence, right = shares[np.arange(len(shares)), predicted], predicted == labels
    place = np.clip((confidence * bins).astype(int), 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    hits = np.bincount(place, right, minlength=bins)
    sure = np.bincount(place, confidence, minlength=bins)
    actual = np.zeros_like(shares)
    actual[np.arange(len(shares)), labels] = 1.0
    return Reliability(
        examples=len(shares),
        accuracy=float(right.mean()),
        confidence=float(confidence.mean()),
        ece=float(np.abs(hits - sure).sum() / len(shares)),
        brier=float(((shares - actual) ** 2).sum(1).mean()),
        counts=tuple(int(count) for count in counts),
        hits=tuple(int(count) for count in hits),
        sure=tuple(float(total) for total in sure),
    )
