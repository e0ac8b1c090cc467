"""Features in two dimensions, and how far apart their groups lie."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERPLEXITY, ITERATIONS = 30.0, 1000
_BEGUN = 1e-4  # the spread at the beginning, so that no point is far from its neighbours


def principal(features: NDArray[Any]) -> NDArray[np.float64]:
    """Features (n, width) along the two directions in which they vary most (n, 2); 0 in those that there are not."""
    centred = features.astype(np.float64) - features.astype(np.float64).mean(0)
    left, sizes, right = np.linalg.svd(centred, full_matrices=False)
    signs = np.sign(right[np.arange(len(right)), np.abs(right).argmax(1)])  # else a direction could point either way
    found = np.zeros((len(centred), 2))
    kept = min(2, len(sizes))
    found[:, :kept] = (left * sizes * signs)[:, :kept]
    return found


def neighbours(features: NDArray[Any]) -> NDArray[np.float64]:
    """Features (n, width) in two dimensions that keep neighbours together: t-SNE, begun with principal components.

    (Van der Maaten and Hinton 2008.) The perplexity is 30, or a third of the points where these are few. Features that
    are all equal stay so.
    """
    from sklearn.manifold import TSNE  # takes half a second

    start = principal(features)
    if not (spread := start[:, 0].std()):
        return start
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    begun = (start / spread * _BEGUN).astype(np.float32)
    model = TSNE(perplexity=perplexity, init=begun, learning_rate="auto", max_iter=ITERATIONS, random_state=0)
    return np.asarray(model.fit_transform(features.astype(np.float64)), dtype=np.float64)


def silhouette(features: NDArray[Any], labels: Sequence[int]) -> float | None:
    """Mean silhouette of groups (Rousseeuw 1987), from -1 to 1: about 0 of groups that are mixed.

    None where there is one group, or each point is one.
    """
    from sklearn.metrics import silhouette_score

    if not 1 < len(set(labels)) < len(labels):
        return None
    return float(silhouette_score(features.astype(np.float64), np.asarray(labels)))
