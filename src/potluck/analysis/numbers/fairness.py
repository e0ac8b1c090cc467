"""How evenly a metric is spread over clients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

TENTH = 0.1


@dataclass(frozen=True)
class Fairness:
    """Of one value for each client.

    Attributes:
        mean: over clients.
        spread: standard deviation over clients.
        worst: the worst client's value.
        worst_tenth: mean over the worst tenth of the clients, rounded up: of ten clients the worst one.
        gini: mean difference between two clients over twice the mean: 0 if all are equal; None if a value is negative
            or all are 0.
    """

    mean: float
    spread: float
    worst: float
    worst_tenth: float
    gini: float | None


def fairness(values: Sequence[float], *, higher_is_better: bool = True) -> Fairness:
    """Fairness of the clients' values, of which there is at least one."""
    ranked = sorted(values, reverse=not higher_is_better)
    mean, tenth = fmean(ranked), math.ceil(len(ranked) * TENTH)
    return Fairness(mean, pstdev(ranked), ranked[0], fmean(ranked[:tenth]), _gini(values))


def _gini(values: Sequence[float]) -> float | None:
    """By the rank of each value in ascending order."""
    if min(values) < 0 or not sum(values):
        return None
    count = len(values)
    return sum((2 * rank - count - 1) * value for rank, value in enumerate(sorted(values), 1)) / (count * sum(values))
