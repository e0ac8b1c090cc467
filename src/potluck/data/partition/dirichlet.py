"""Each class is divided among the clients in proportions drawn from a Dirichlet distribution.

With `capped` this is the scheme of NIID-Bench, FedML, MOON, InCo and DepthFL: classes are dealt in ascending
order, and a client that already holds its equal share of all examples gets nothing of the classes that
follow. That makes sizes more even and depends on the order of the classes, so it is not a Dirichlet sample;
`capped=False` is one, apart from the minimum size. Either way all examples are given out, in unequal sizes.

Proportions are drawn again until every client has `min_examples`. The papers' codes ask for 10 (NIID-Bench,
InCo, DepthFL), 50 (FeDepth) or 2 (FedORION's strongest skew).
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import Tensor

from potluck.core.errors import DataError
from potluck.core.fields import Checked, above, at_least
from potluck.core.rng import Key
from potluck.data.partition._division import check_enough, deal, members_by_class

TRIES = 10_000
"""Draws before giving up: some three seconds for ten classes and a hundred clients."""


@dataclass(frozen=True)
class Dirichlet(Checked):
    """Label skew by Dirichlet proportions.

    Attributes:
        alpha: concentration; small is skewed (0.1), large is nearly even (100).
        min_examples: least size of a client.
        capped: whether clients that hold their equal share stop receiving.
    """

    alpha: Annotated[float, above(0)] = 0.5
    min_examples: Annotated[int, at_least(1)] = 10
    capped: bool = True

    def __call__(self, targets: Tensor, clients: int, key: Key) -> list[Tensor]:
        """One part a client; together they cover all examples."""
        check_enough(len(targets), clients, self.min_examples)
        rng = np.random.default_rng(key.seed)
        members = members_by_class(targets)
        class_sizes = np.array([len(indices) for indices in members])
        for _ in range(TRIES):
            # Only sizes are tried again: which examples fill them is independent of them, and drawn once.
            sizes = self._draw_sizes(class_sizes, clients, rng)
            if sizes.sum(axis=0).min() >= self.min_examples:
                return deal(members, sizes, rng)
        raise DataError(
            f"none of {TRIES} draws gave each of {clients} clients at least {self.min_examples} of "
            f"{len(targets)} examples with alpha {self.alpha}; "
            "raise alpha, lower min_examples or ask for fewer clients"
        )

    def _draw_sizes(self, class_sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """How many of each class each client gets, (classes, clients)."""
        shares = rng.dirichlet(np.full(clients, self.alpha), size=len(class_sizes))
        if not self.capped:
            return _cut(shares, class_sizes)
        sizes = np.zeros(shares.shape, dtype=np.int64)
        held = np.zeros(clients, dtype=np.int64)
        for row, share in enumerate(shares):
            open_share = np.where(held * clients < class_sizes.sum(), share, 0.0)
            if open_share.sum() == 0:  # every client with a share is full: the smallest take the class evenly
                open_share = (held == held.min()).astype(float)
            sizes[row] = _cut(open_share / open_share.sum(), class_sizes[row])
            held += sizes[row]
        return sizes


def _cut(shares: np.ndarray, class_sizes: np.ndarray) -> np.ndarray:
    """Whole numbers near shares * class size, (..., clients): rounded down, the last takes the rest."""
    ends = np.floor(np.cumsum(shares, axis=-1) * np.expand_dims(class_sizes, -1)).astype(np.int64)
    ends[..., -1] = class_sizes
    return np.diff(ends, axis=-1, prepend=0)
