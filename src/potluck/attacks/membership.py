"""Membership inference: does a model treat an example as one that it was trained on?

Yeom, Giacomelli, Fredrikson, Jha. Privacy risk in machine learning. CSF 2018. https://arxiv.org/abs/1709.01604: an
example with a small loss is taken for a member. The area under the curve is the probability that a member has a smaller
loss than a non-member; its interval is DeLong's (DeLong, DeLong, Clarke-Pearson. Biometrics 1988).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata

_NORMAL = 1.959963984540054  # the quantile of 97.5 %


@dataclass(frozen=True)
class Area:
    """The area under the curve of a score that should be larger for members.

    Attributes:
        value: 0.5 if members cannot be told, 1 if all can.
        error: its standard error.
        members: how many there were, and `others` who are none.
    """

    value: float
    error: float
    members: int
    others: int

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 % confidence, within [0, 1]."""
        return max(0.0, self.value - _NORMAL * self.error), min(1.0, self.value + _NORMAL * self.error)


def area(members: ArrayLike, others: ArrayLike) -> Area:
    """The area for scores of members and of others; ties count half.

    Raises:
        ValueError: there are fewer than two of either.
    """
    inside, outside = np.asarray(members, dtype=float), np.asarray(others, dtype=float)
    m, n = len(inside), len(outside)
    if min(m, n) < 2:
        raise ValueError(f"found {m} members and {n} others; expected at least two of each")
    together = rankdata(np.concatenate([inside, outside]))
    above = (together[:m] - rankdata(inside)) / n  # of each member, the share of others below it
    below = 1 - (together[m:] - rankdata(outside)) / m
    variance = float(above.var(ddof=1)) / m + float(below.var(ddof=1)) / n
    return Area(float(above.mean()), math.sqrt(variance), m, n)


def mean_area(areas: Sequence[Area]) -> Area:
    """The mean over clients, whose examples are independent of one another's."""
    return Area(
        float(np.mean([one.value for one in areas])),
        math.sqrt(sum(one.error**2 for one in areas)) / len(areas),
        sum(one.members for one in areas),
        sum(one.others for one in areas),
    )
