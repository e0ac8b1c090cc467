"""FedRolex, from eq. 4 to 6 of section 3 of Alam, Liu, Yan, Zhang (NeurIPS 2022).

No code was read. The index set of eq. 5, which goes around, is written as in the paper; its size is rounded up, all
clients count equally and local training is HeteroFL's, as the method's departures say. So that is computed as in the
evidence of HeteroFL. A client is evaluated with the window of the last round.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

import torch
from torch import Tensor

from evidence.ground import played
from evidence.heterofl import COHORTS, RATES, TRAINING, K, compared, federation, reference
from potluck.methods.fedrolex import FedRolex


def rolling(number: int, beta: float) -> Tensor:
    """S_n of round j = number - 1 of a client of capacity beta, in a layer of K channels.

    A set has no order; here it begins at the window's first channel, and that of all channels at 0.
    """
    j_hat, size = (number - 1) % K, ceil(beta * K)
    if size == K:
        return torch.arange(K)
    if j_hat + size <= K:
        return torch.arange(j_hat, j_hat + size)
    return torch.cat([torch.arange(j_hat, K), torch.arange(j_hat + size - K)])


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    method = FedRolex(TRAINING, levels=tuple(RATES.values()))
    for what, changes, mask in (
        ("by capacity", {}, True),
        ("static BatchNorm", {}, True),
        ("without the mask", {"mask": False}, False),
        ("drawn levels", {"assignment": "dynamic"}, True),
    ):
        made = federation(batchnorm=what == "static BatchNorm")
        run = played(replace(method, **changes), 4, cohorts=COHORTS, federation=made)
        weights, models = compared(run, reference(run, rolling, mask=mask))
        yield f"weights of four rounds, {what}", weights
        yield f"every client's window in four rounds, {what}", models
