"""Clients of exactly equal size, each with its own Dirichlet mixture of classes (FeDepth's `balanced-dir`).

One client after another draws floor(n / clients) of the examples that are left, without replacement, each
weighted by the client's preference for its class. Late clients get the remaining examples, so their mixtures deviate
from the drawn ones. The remainder, fewer examples than clients, is left out.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import Tensor

from potluck.core.ground.fields import Checked, above
from potluck.core.ground.rng import Key
from potluck.data.partition._division import check_enough, sorted_indices

_LEAST_WEIGHT = 1e-12  # a client whose classes are used up still gets its number, from other classes


@dataclass(frozen=True)
class BalancedDirichlet(Checked):
    """Label skew without size skew.

    Attributes:
        alpha: concentration of a client's mixture; small means few classes.
    """

    alpha: Annotated[float, above(0)] = 0.5

    def __call__(self, targets: Tensor, clients: int, key: Key) -> list[Tensor]:
        """One part for each client, all of the same size."""
        check_enough(len(targets), clients)
        rng = np.random.default_rng(key.seed)
        classes, label = np.unique(targets.numpy(), return_inverse=True)
        left = np.arange(len(targets))
        size = len(targets) // clients
        parts: list[Tensor] = []
        for _ in range(clients):
            preference = rng.dirichlet(np.full(len(classes), self.alpha)) + _LEAST_WEIGHT
            # Exponential clocks with rates equal to the weights: the first to ring are a weighted draw
            # without replacement, at the cost of one pass.
            clocks = rng.exponential(size=len(left)) / preference[label[left]]
            order = np.argpartition(clocks, size - 1)
            parts.append(sorted_indices(left[order[:size]]))
            left = left[order[size:]]
        return parts
