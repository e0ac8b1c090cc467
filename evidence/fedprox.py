"""FedProx, from eq. 2 and Algorithm 2 of Li et al. (MLSys 2020), layer by layer where architectures differ.

No code was read. Clients are averaged by their numbers of examples, as in FedAvg; the paper's sampling by examples and
plain mean has the same expectation. The pull as a step of its own is the minimiser of |v - w|^2 / (2 eta) + (mu / 2)
|v - w^t|^2 in v, by hand.
"""

from collections.abc import Iterator

import torch

from evidence.ground import (
    SGD,
    Run,
    Weights,
    cross_entropy,
    descended,
    gap,
    gradient,
    logits,
    mean_by_layer,
    owned,
    played,
)
from potluck.methods.fedprox import FedProx

MU = 0.7
COHORTS = [[0, 1, 2], [0, 2], [1]]


def reference(run: Run, coupled: bool) -> list[Weights]:
    """The server's weights before the first round and after each."""
    w = dict(max(run.start.values(), key=len))
    found = [w]
    for cohort in COHORTS:
        trained = [local(run, k, owned(w, run.start[run.clients[k].architecture]), coupled) for k in cohort]
        w = mean_by_layer(trained, [run.clients[k].n for k in cohort], w)
        found.append(w)
    return found


def local(run: Run, k: int, w_t: Weights, coupled: bool, lr: float = 0.1) -> Weights:
    """A client's weights after three steps from w^t."""
    data = run.clients[k]

    def loss(w: Weights) -> torch.Tensor:
        return cross_entropy(logits(w, data.x), data.y)

    if coupled:
        distance = {name: w_t[name] for name in w_t}
        return descended(lambda w: loss(w) + MU / 2 * sum(((w[n] - distance[n]) ** 2).sum() for n in w), w_t)
    w = w_t
    for _ in range(3):
        g = gradient(loss, w)
        w = {n: (w[n] - lr * g[n] + lr * MU * w_t[n]) / (1 + lr * MU) for n in w}
    return w


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, coupled in (("the pull in the loss", True), ("the pull as a step", False)):
        run = played(FedProx(SGD, mu=MU, coupled=coupled), cohorts=COHORTS)
        yield f"weights of three rounds, {what}", gap([s.weights["all"] for s in run.states], reference(run, coupled))
