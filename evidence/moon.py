"""MOON, from eq. 2 to 4 and Algorithm 1 of Li, He, Song (CVPR 2021), averaged as FedAvg.

No code was read. The representation is what the last layer reads (departure 1 of the method), and a client that has
never trained has no previous model and trains on the task's loss alone (departure 2).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import (
    SGD,
    Run,
    Weights,
    cross_entropy,
    descended,
    features,
    gap,
    logits,
    mean_by_layer,
    owned,
    played,
)
from potluck.methods.moon import MOON

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
MU, TAU = 0.8, 0.5


def reference(run: Run) -> list[Weights]:
    """The server's weights before the first round and after each."""
    w = dict(max(run.start.values(), key=len))
    found, previous = [w], dict[int, Weights]()
    for cohort in COHORTS:
        for k in cohort:
            received = owned(w, run.start[run.clients[k].architecture])
            previous[k] = local(run, k, received, previous.get(k))
        w = mean_by_layer([previous[k] for k in cohort], [run.clients[k].n for k in cohort], w)
        found.append(w)
    return found


def local(run: Run, k: int, w_glob: Weights, w_prev: Weights | None) -> Weights:
    """A client's weights after three steps."""
    data = run.clients[k]

    def loss(w: Weights) -> Tensor:
        supervised = cross_entropy(logits(w, data.x), data.y)
        if w_prev is None:
            return supervised
        z, z_glob, z_prev = (features(v, data.x) for v in (w, w_glob, w_prev))
        near, far = (torch.exp(cosine(z, other) / TAU) for other in (z_glob, z_prev))
        return supervised + MU * -torch.log(near / (near + far)).mean()  # eq. 3

    return descended(loss, w_glob)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """The cosine similarity of rows."""
    return (a * b).sum(1) / (a.square().sum(1).sqrt() * b.square().sum(1).sqrt())


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    run = played(MOON(SGD, mu=MU, temperature=TAU), 4, cohorts=COHORTS)
    yield "weights of four rounds", gap([s.weights["all"] for s in run.states], reference(run))
