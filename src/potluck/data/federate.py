"""From a partition to what each client holds: validation splits, matching test parts, and their records."""

import numpy as np
import torch
from torch import Tensor

from potluck.core.fields import require
from potluck.core.rng import Key
from potluck.data.dataset import digest


def split_validation(indices: Tensor, targets: Tensor, fraction: float, key: Key) -> tuple[Tensor, Tensor]:
    """Split one client's examples into training and validation, each class as near to `fraction` as can be.

    Validation gets `fraction` of the examples, rounded, but never all of them: at least one stays in
    training. A client with few examples (two at a fraction of 0.2, say) therefore has no validation at all.

    Args:
        indices: the client's examples, int64 (n,).
        targets: class of every example of the data set, int64.
        fraction: share of the examples that go to validation, at least 0 and below 1.
        key: names the draw.

    Returns:
        Training and validation indices, both in the order of `indices`.
    """
    require(0 <= fraction < 1, "fraction", "at least 0 and below 1", fraction)
    rng = np.random.default_rng(key.seed)
    labels = targets[indices].numpy()
    classes, counts = np.unique(labels, return_counts=True)
    chosen = np.zeros(len(labels), dtype=bool)
    for label, quota in zip(classes, _quotas(counts, fraction, rng), strict=True):
        chosen[rng.permutation(np.flatnonzero(labels == label))[:quota]] = True
    validation = torch.from_numpy(chosen)
    return indices[~validation], indices[validation]


def matching_test_parts(
    train_targets: Tensor, train_parts: list[Tensor], test_targets: Tensor, key: Key
) -> list[Tensor]:
    """Divide the test set so that each client is tested on the mixture of classes that it trains on.

    The test examples of a class are shared in proportion to the training examples of that class that each
    client holds. The parts are disjoint and cover all test examples of classes that somebody holds; a client
    with very few training examples may get an empty part.

    Args:
        train_targets: class of every training example, int64.
        train_parts: each client's training indices.
        test_targets: class of every test example, int64.
        key: names the draw.

    Returns:
        Sorted test indices of each client, int64.
    """
    rng = np.random.default_rng(key.seed)
    num_classes = int(max(train_targets.max(), test_targets.max())) + 1
    held = label_counts(train_targets, train_parts, num_classes).numpy().cumsum(axis=0)
    owner = np.full(len(test_targets), -1)
    for label in np.flatnonzero(held[-1]):
        members = rng.permutation(np.flatnonzero(test_targets.numpy() == label))
        # A client's share ends where its cumulative share of the class does, rounded down; in exact integers.
        ends = held[:, label] * len(members) // held[-1, label]
        owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    return [torch.from_numpy(np.flatnonzero(owner == client)) for client in range(len(train_parts))]


def label_counts(targets: Tensor, parts: list[Tensor], num_classes: int) -> Tensor:
    """How many examples of each class each client holds, int64 (clients, classes)."""
    return torch.stack([torch.bincount(targets[part], minlength=num_classes) for part in parts])


def fingerprint(parts: list[Tensor]) -> str:
    """Hex digest of a partition, for the manifest of a run: the same examples for the same clients."""
    return digest(*parts)


def _quotas(counts: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """How many of each class go to validation: shares rounded down, the rest to the largest remainders."""
    total = max(min(round(fraction * counts.sum()), counts.sum() - 1), 0)
    quotas = np.floor(fraction * counts).astype(np.int64)
    remainders = fraction * counts - quotas
    order = rng.permutation(len(counts))  # equal remainders must not always favour the first classes
    order = order[np.argsort(-remainders[order], kind="stable")]
    quotas[order[: max(total - quotas.sum(), 0)]] += 1
    return quotas
