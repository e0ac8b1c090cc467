"""Every client holds a random sample of nearly equal size.

All examples are given out; sizes differ by at most one. (HeteroFL drops the remainder instead.)
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from potluck.core.ground.rng import Key
from potluck.data.partition._division import check_enough, sorted_indices


@dataclass(frozen=True)
class IID:
    """Shuffle and cut into nearly equal parts."""

    by_label: ClassVar[bool] = False

    def __call__(self, targets: Tensor, clients: int, key: Key) -> list[Tensor]:
        """One part for each client; together they cover all examples."""
        check_enough(len(targets), clients)
        order = np.random.default_rng(key.seed).permutation(len(targets))
        return [sorted_indices(part) for part in np.array_split(order, clients)]
