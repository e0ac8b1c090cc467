"""How alike two representations of the same examples are: linear CKA and canonical correlations.

A representation is an array (n, ...), one row of activations for each example; the two may have different widths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

BATCH = 256
"""Examples of a mini-batch, of which the unbiased CKA is a mean."""
_AT_ONCE = 8192  # columns, so that maps of many positions are never in memory in double precision
_LEAST = 4  # examples for which the unbiased estimate is defined
_RANK = 1e-6  # a direction with a smaller share of the largest singular value is rounding
_ROUNDING = 1e-12  # of a sum of shares


@dataclass(frozen=True)
class Canonical:
    """Canonical correlations of two representations, as single numbers.

    Attributes:
        mean: of the correlations, as many as the smaller one has directions.
        squared: mean of their squares (R²).
        weighted: mean with the weight of each direction in the one that has fewer, at a tie the first: PWCCA
            (Morcos et al. 2018).
    """

    mean: float
    squared: float
    weighted: float


def gram(features: NDArray[Any]) -> Matrix:
    """Inner products (n, n) of the rows of activations (n, ...), each column less its mean."""
    flat = features.reshape(len(features), -1)
    found = np.zeros((len(flat), len(flat)))
    for start in range(0, flat.shape[1], _AT_ONCE):
        some = flat[:, start : start + _AT_ONCE].astype(np.float64)
        some -= some.mean(0)
        found += some @ some.T
    return found


def cka(grams: Sequence[Matrix]) -> Matrix:
    """The linear CKA of each with each (m, m), exact over all examples (Kornblith et al. 2019, eq. 4 in Gram form)."""
    return _ratio(_products([one.ravel() for one in grams]))


def unbiased_cka(grams: Sequence[Matrix], batch: int = BATCH) -> Matrix:
    """The linear CKA of each with each (m, m), without the bias that grows with the width.

    HSIC₁ (Song et al. 2012) is averaged over mini-batches, of each pair and of each representation with itself, before
    the ratio is formed (Nguyen et al. 2021). It may be slightly negative.

    Args:
        grams: of all examples; a mini-batch is a block on the diagonal, since HSIC₁ does not depend on what is
            subtracted from columns.
        batch: examples of a mini-batch at most; all have nearly equally many.

    Raises:
        ValueError: there are fewer examples than four.
    """
    examples = len(grams[0])
    if examples < _LEAST:
        raise ValueError(f"unbiased CKA: expected at least {_LEAST} examples, found {examples}")
    parts = np.array_split(np.arange(examples), max(1, min(math.ceil(examples / batch), examples // _LEAST)))
    products = [_products([_u_centred(one[np.ix_(rows, rows)]) for one in grams]) / _pairs(len(rows)) for rows in parts]
    return _ratio(np.mean(products, axis=0))


@dataclass(frozen=True)
class Directions:
    """Where one representation varies, for its canonical correlations with others.

    Attributes:
        centred: the representation (n, width), each column less its mean.
        basis: orthonormal columns (n, k) that span its largest directions.
    """

    centred: Matrix
    basis: Matrix

    @property
    def count(self) -> int:
        """How many directions there are."""
        return self.basis.shape[1]


def directions(features: NDArray[Any], kept: float = 1.0) -> Directions:
    """The directions of a representation (n, width).

    Args:
        features: of the examples.
        kept: share of the variance that is kept, in its largest directions; 0.99 is SVCCA (Raghu et al. 2017).
    """
    centred = features.reshape(len(features), -1).astype(np.float64)
    centred -= centred.mean(0)
    basis, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    least = np.finfo(np.float64).tiny
    real = sizes > _RANK * max(float(sizes[0]), least)
    shares = np.cumsum(sizes**2) / max(float((sizes**2).sum()), least)
    count = min(int(real.sum()), int(np.searchsorted(shares, kept - _ROUNDING)) + 1)
    return Directions(centred, basis[:, :count])


def canonical(one: Directions, other: Directions) -> Canonical | None:
    """Canonical correlations of two representations of the same examples, or None where any two would be alike.

    That is where they have as many directions together as there are examples, or one does not vary.
    """
    if not min(one.count, other.count) or one.count + other.count >= len(one.basis):
        return None
    left, found, right = np.linalg.svd(one.basis.T @ other.basis, full_matrices=False)
    found = np.clip(found, 0.0, 1.0)
    fewer, mixed = (one, left) if one.count <= other.count else (other, right.T)
    weights = np.abs((fewer.basis @ mixed).T @ fewer.centred).sum(1)
    return Canonical(float(found.mean()), float((found**2).mean()), float(weights @ found / weights.sum()))


def _products(rows: Sequence[Matrix]) -> Matrix:
    stacked = np.stack([row.ravel() for row in rows])
    return stacked @ stacked.T


def _ratio(products: Matrix) -> Matrix:
    """Each with each over the roots of each with itself; NaN for what does not vary."""
    own = np.diag(products)
    norms = np.sqrt(np.where(own > 0, own, np.nan))
    return products / np.outer(norms, norms)


def _pairs(examples: int) -> int:
    return examples * (examples - 3)


def _u_centred(gram_matrix: Matrix) -> Matrix:
    """The matrix without its diagonal, less means of rows and columns, such that HSIC₁ is an inner product of two.

    (Székely and Rizzo 2014, eq. 2.4.)
    """
    n = len(gram_matrix)
    found = gram_matrix - np.diag(np.diag(gram_matrix))
    rows = found.sum(0) / (n - 2)
    found = found - rows[:, None] - rows[None, :] + found.sum() / ((n - 1) * (n - 2))
    np.fill_diagonal(found, 0.0)
    return found
