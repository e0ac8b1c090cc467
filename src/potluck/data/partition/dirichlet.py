"""Each class is divided among the clients in proportions drawn from a Dirichlet distribution.

With `capped` this is the scheme of NIID-Bench, FedML, MOON, InCo and DepthFL: classes are dealt in ascending
order, and a client that already holds its equal share of all examples gets nothing of the classes that
follow. That makes sizes more even and depends on the order of the classes, so it is not a Dirichlet sample;
`capped=False` is one, apart from the minimum size. Either way all examples are given out, in unequal sizes.

Proportions are drawn again until every client has `min_examples`, as in the papers' codes, which ask for 10
(NIID-Bench, InCo, DepthFL) or 50 (FeDepth).

Departure: those codes draw without end if hardly any draw gives every client its minimum (thirty clients at an alpha of
0.01, say). Here, after `TRIES` draws, the one that lacks the fewest examples is completed: each client below its
minimum takes what it lacks from the client that then holds most, of the class that this one holds most of.
"""

import logging
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import Tensor

from potluck.core.ground.fields import Checked, above, at_least
from potluck.core.ground.rng import Key
from potluck.data.partition._division import check_enough, deal, members_by_class

TRIES = 10_000
"""The most draws before one is completed: some three seconds for ten classes and a hundred clients."""

_SHARES = (
    100_000_000  # the most numbers of all draws together: a thousand draws for a hundred classes and a thousand clients
)
_AT_ONCE = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dirichlet(Checked):
    """Label skew by Dirichlet proportions.

    Attributes:
        alpha: concentration; small is skewed (0.1), large is nearly even (100).
        min_examples: the least number of examples of a client.
        capped: whether clients that hold their equal share stop receiving.
    """

    alpha: Annotated[float, above(0)] = 0.5
    min_examples: Annotated[int, at_least(1)] = 10
    capped: bool = True

    def __call__(self, targets: Tensor, clients: int, key: Key) -> list[Tensor]:
        """One part for each client; together they cover all examples."""
        check_enough(len(targets), clients, self.min_examples)
        rng = np.random.default_rng(key.seed)
        members = members_by_class(targets)
        class_sizes = np.array([len(indices) for indices in members])
        return deal(members, self._enough_for_all(class_sizes, clients, rng), rng)

    def _enough_for_all(self, class_sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """The number of each class for each client, (classes, clients), at least `min_examples` for each client."""
        tries = max(1, min(TRIES, _SHARES // (len(class_sizes) * clients)))
        nearest, fewest = np.zeros((0, 0)), np.inf
        tried, count = 0, 1
        while tried < tries:
            # Only sizes are drawn repeatedly; the examples that fill them are drawn once, independently.
            before = rng.bit_generator.state
            sizes = self._draw_sizes(class_sizes, clients, rng, count)
            lacking = np.maximum(self.min_examples - sizes.sum(axis=1), 0).sum(axis=1)
            best = int(lacking.argmin())
            if lacking[best] == 0:
                rng.bit_generator.state = before  # so that the generator is where single draws would have left it
                return self._draw_sizes(class_sizes, clients, rng, best + 1)[best]
            if lacking[best] < fewest:
                nearest, fewest = sizes[best], lacking[best]
            tried += count
            count = min(2 * count, _AT_ONCE, tries - tried)
        _log.warning(
            "none of %d Dirichlet draws with alpha %g gave each of %d clients %d examples; the nearest was completed "
            "by moving %d of %d examples",
            *(tries, self.alpha, clients, self.min_examples, fewest, class_sizes.sum()),
        )
        _complete(nearest, self.min_examples)
        return nearest

    def _draw_sizes(self, class_sizes: np.ndarray, clients: int, rng: np.random.Generator, count: int) -> np.ndarray:
        """The number of each class for each client in `count` draws, (count, classes, clients)."""
        shares = rng.dirichlet(np.full(clients, self.alpha), size=(count, len(class_sizes)))
        if not self.capped:
            return _cut(shares, class_sizes)
        sizes = np.zeros(shares.shape, dtype=np.int64)
        held = np.zeros((count, clients), dtype=np.int64)
        for row, class_size in enumerate(class_sizes):
            open_shares = np.where(held * clients < class_sizes.sum(), shares[:, row], 0.0)
            full = open_shares.sum(axis=1) == 0  # if all with a share are, the smallest take the class evenly
            open_shares[full] = held[full] == held[full].min(axis=1, keepdims=True)
            sizes[:, row] = _cut(open_shares / open_shares.sum(axis=1, keepdims=True), class_size)
            held += sizes[:, row]
        return sizes


def _cut(shares: np.ndarray, class_sizes: np.ndarray) -> np.ndarray:
    """Integers near shares * class size, (..., clients): rounded down, the last takes the rest."""
    ends = np.floor(np.cumsum(shares, axis=-1) * np.expand_dims(class_sizes, -1)).astype(np.int64)
    ends[..., -1] = class_sizes
    return np.diff(ends, axis=-1, prepend=0)


def _complete(sizes: np.ndarray, least: int) -> None:
    """Give every client at least `least` examples, in place, by taking from the clients with most.

    It ends if there are `least` for each: while one client lacks some, another has more than `least`.
    """
    held = sizes.sum(axis=0)
    for client in np.flatnonzero(held < least):
        while (lacking := least - held[client]) > 0:
            donor = held.argmax()
            label = sizes[:, donor].argmax()
            moved = min(lacking, held[donor] - least, sizes[label, donor])
            sizes[label, [donor, client]] += (-moved, moved)
            held[[donor, client]] += (-moved, moved)
