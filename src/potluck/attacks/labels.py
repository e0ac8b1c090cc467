"""Label inference: which classes a client has, and how many examples of each, from what it sends.

A reply may say so itself. Where weights travel, the bias of the last layer tells: a step along the gradient of the
cross-entropy moves it by the share of a class in the batch less the probability that the network gave it (Wainakh,
Ventola, Müßig, Keim, Garcia Cordero, Zimmer, Grube, Kersting, Mühlhäuser. User-level label leakage from gradients in
federated learning. PETS 2022. https://arxiv.org/abs/2105.09369). Where outputs on public examples travel, a client is
the surer of a class the more of it has taught it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

ClassShares = NDArray[np.float64]

PRESENT = 0.1
"""From this multiple of an equal share on, a class is taken for present where shares are inferred."""


@dataclass(frozen=True)
class LabelScore:
    """How well a guess of a client's classes fits.

    Attributes:
        f1: of the classes that are taken for present; 1 if these are all, and no other.
        correlation: of the guessed shares with the true ones, over classes; None where all of either are equal.
        distance: total variation between them: 0 if all counts are right, 1 if nothing is.
    """

    f1: float
    correlation: float | None
    distance: float


def shares_of(evidence: ArrayLike) -> ClassShares:
    """Evidence for each class, larger for more examples, as shares: less its least value if any is negative."""
    found = np.asarray(evidence, dtype=np.float64)
    found = found - min(0.0, float(found.min()))
    total = float(found.sum())
    return found / total if total > 0 else np.full(len(found), 1 / len(found))


def from_bias(change: ArrayLike) -> ClassShares:
    """Shares by how far training moved the last layer's bias of each class: less the least, which stands for none."""
    moved = np.asarray(change, dtype=np.float64)
    return shares_of(moved - moved.min())


def from_outputs(outputs: ArrayLike) -> ClassShares:
    """Shares by the mean probability of each class in outputs (n, classes)."""
    return shares_of(as_probabilities(outputs).mean(0))


def as_probabilities(outputs: ArrayLike) -> ClassShares:
    """Outputs (n, classes) as probabilities: logits by softmax; what is already some stays."""
    found = np.asarray(outputs, dtype=np.float64)
    if not ((found >= 0).all() and np.allclose(found.sum(1), 1, atol=1e-3)):
        found = np.exp(found - found.max(1, keepdims=True))
    return found / found.sum(1, keepdims=True)


def label_score(guess: ClassShares, counts: ArrayLike, *, told: bool = False) -> LabelScore:
    """How well guessed shares fit the true counts of each class; if they were told, every one above 0 is present."""
    actual = np.asarray(counts, dtype=np.float64)
    actual = actual / actual.sum()
    present, taken = actual > 0, guess > 0 if told else guess >= PRESENT / len(guess)
    both = int((present & taken).sum())
    varied = min(float(guess.std()), float(actual.std())) > 1e-12
    return LabelScore(
        f1=2 * both / (int(present.sum()) + int(taken.sum())),
        correlation=float(np.corrcoef(guess, actual)[0, 1]) if varied else None,
        distance=float(np.abs(guess - actual).sum() / 2),
    )
