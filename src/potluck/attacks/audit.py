"""How little privacy a mechanism can have, as one run of it shows: guesses about many coins.

Steinke, Nasr, Jagielski. Privacy auditing with one (1) training run. NeurIPS 2023. https://arxiv.org/abs/2305.08846.

Each of m canaries enters the mechanism in one of two forms, by a fair coin, and whoever sees the output guesses the
coins that it is surest of. If the mechanism is (epsilon, delta)-private for changing one canary's form, it can guess
only so well (theorem 5.2): the least epsilon that is not refuted is a lower bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binom

SHARES = (1.0, 0.25, 0.1, 0.03)
"""Shares of the canaries that are guessed, the surest ones; which of them is best depends on the mechanism."""

_PRECISION = 1e-4  # of a bound, which is rounded down
_LARGEST = 64.0  # no number of canaries tells an epsilon above from this one


@dataclass(frozen=True)
class EpsilonBound:
    """What the guesses show.

    Attributes:
        lower: no epsilon below this is compatible with them, at this confidence and delta.
        ceiling: what `lower` would be if every guess were right; more canaries raise it.
        canaries: how many coins there were.
        guesses: how many of them were guessed, of the share with the best bound; `right` of these.
        delta: at which the bound is.
        confidence: of the bound.
    """

    lower: float
    ceiling: float
    canaries: int
    guesses: int
    right: int
    delta: float
    confidence: float


def audit(coins: ArrayLike, scores: ArrayLike, delta: float, confidence: float = 0.95) -> EpsilonBound:
    """The lower bound of epsilon that scores for coins show.

    Several numbers of guesses are tried, and the error that is allowed is divided among them, so the best one counts.

    Args:
        coins: (m,), True where a canary was in its first form.
        scores: (m,), above 0 where that is the guess; the further from 0, the surer.
        delta: of the claim.
        confidence: with which the bound holds.

    Raises:
        ValueError: there are no canaries, or not as many scores.
    """
    told, sure = np.asarray(coins, dtype=bool), np.asarray(scores, dtype=float)
    if told.ndim != 1 or told.shape != sure.shape or not len(told):
        raise ValueError(f"coins: found {told.shape} and scores {sure.shape}; expected as many, at least one")
    right = (sure > 0) == told
    order = np.argsort(-np.abs(sure), kind="stable")
    error, tried = (1 - confidence) / len(SHARES), list[EpsilonBound]()
    for count in (max(1, round(share * len(told))) for share in SHARES):
        hits = int(right[order[:count]].sum())
        bounds = [lower_bound(len(told), count, of, delta, error) for of in (hits, count)]
        tried.append(EpsilonBound(bounds[0], bounds[1], len(told), count, hits, delta, confidence))
    best = max(tried, key=lambda one: one.lower)
    most = max(one.ceiling for one in tried)
    return EpsilonBound(best.lower, most, best.canaries, best.guesses, best.right, delta, confidence)


def lower_bound(canaries: int, guesses: int, right: int, delta: float, error: float) -> float:
    """The largest epsilon that so many right guesses refute, with this probability of error at most; 0 if none."""
    low, high = 0.0, _LARGEST
    if probability(canaries, guesses, right, 0.0, delta) > error:
        return 0.0
    while high - low > _PRECISION:
        middle = (low + high) / 2
        refuted = probability(canaries, guesses, right, middle, delta) <= error
        low, high = (middle, high) if refuted else (low, middle)
    return low


def probability(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """At most how probable so many right guesses are under (epsilon, delta)-privacy (theorem 5.2).

    With W the number of right guesses by randomised response, it is P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i.
    """
    share = 1 / (1 + math.exp(-epsilon))
    beyond = float(binom.sf(right - 1, guesses, share))
    if not delta or not right:
        return min(beyond, 1.0)
    steps = np.arange(1, right + 1)
    below = np.cumsum(binom.pmf(right - steps, guesses, share))
    return min(beyond + 2 * canaries * delta * float((below / steps).max()), 1.0)


def forms(count: int, seed: int) -> Sequence[bool]:
    """Fair coins, the same for the same seed."""
    return (np.random.default_rng(seed).random(count) < 0.5).tolist()
