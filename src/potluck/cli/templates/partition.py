"""A partition of your own."""

import torch
from potluck import fl
from torch import Tensor


def template_name(targets: Tensor, clients: int, key: fl.Key, *, mixed: float = 0.2) -> list[Tensor]:
    """Neighbouring classes for each client, but for a share of examples that change hands at random.

    Returns each client's rows of the training set; no two clients share one, and none has none.

    Args:
        targets: the class of each training example, (n,).
        clients: the number of clients.
        key: of the draws, which follow from the run's seed.
        mixed: share of the examples that change hands.
    """
    generator = key.generator()
    rows = targets.argsort(stable=True)
    moved = (torch.rand(len(rows), generator=generator) < mixed).nonzero().flatten()
    rows[moved] = rows[moved[torch.randperm(len(moved), generator=generator)]]
    return list(rows.tensor_split(clients))
