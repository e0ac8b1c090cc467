"""Shared by the schemes: a check that a division is possible, and division by sizes."""

import numpy as np
import torch
from torch import Tensor

from potluck.core.ground.errors import DataError
from potluck.core.ground.fields import require


def check_enough(examples: int, clients: int, each: int = 1) -> None:
    """Check that every client can have `each` examples."""
    require(clients >= 1, "clients", "at least 1", clients)
    if clients > examples:
        raise DataError(f"{clients} clients but only {examples} examples; ask for fewer clients or give more data")
    if clients * each > examples:
        raise DataError(
            f"{clients} clients with at least {each} examples each need {clients * each}, found {examples}; "
            "lower min_examples or ask for fewer clients"
        )


def members_by_class(targets: Tensor) -> list[np.ndarray]:
    """Indices of the examples of each class that occurs, classes in ascending order."""
    labels = targets.numpy()
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def deal(members: list[np.ndarray], sizes: np.ndarray, rng: np.random.Generator) -> list[Tensor]:
    """Shuffle each class and give each client its number of them.

    Args:
        members: indices of each class.
        sizes: how many of each class each client gets, (classes, clients); at most as many as there are.
        rng: the source of the shuffles.
    """
    held: list[list[np.ndarray]] = [[] for _ in range(sizes.shape[1])]
    for indices, row in zip(members, sizes, strict=True):
        pieces = np.split(rng.permutation(indices), np.cumsum(row))[:-1]  # the last piece is left over
        for client, piece in zip(held, pieces, strict=True):
            client.append(piece)
    return [sorted_indices(np.concatenate(pieces)) for pieces in held]


def sorted_indices(indices: np.ndarray) -> Tensor:
    """Ascending int64 indices; batches are shuffled anyway, and sorted parts can be compared."""
    return torch.from_numpy(np.sort(indices).astype(np.int64))
