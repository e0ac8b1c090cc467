"""FedH2L, from the losses of Li et al. (2021) and the projection of A-GEM (Chaudhry et al. 2019).

No code of the authors was read, and of the paper what the method's docstring states: local training, then a pass over
the seeds, whose gradient is projected over all weights together where it would raise the loss on own examples. Seeds,
and which own examples go with them, are the engine's draws.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, gradient, logits, played
from potluck.core.ground.rng import fold_in
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedh2l import FedH2L
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2], [0, 2], [0, 1, 2], [1]]
ETA, STEPS, SEEDS = 0.3, 3, 60


def reference(run: Run, strength: float, mean: bool, project: bool) -> list[dict[int, Weights]]:
    """Every client's model after each round."""
    public = run.federation.public
    theta = {i: run.start[data.architecture] for i, data in run.clients.items()}
    models: list[dict[int, Weights]] = []
    for t, cohort in enumerate(COHORTS, start=1):
        seeds = public.batch(run.sent["learn_and_predict"][t - 1][cohort[0]]["rows"])
        x, y = seeds.inputs.double(), seeds.targets
        for i in cohort:
            theta[i] = descended(partial(supervised, run.clients[i].x, run.clients[i].y), theta[i])
        p = {i: torch.softmax(logits(theta[i], x), 1) for i in cohort}
        for i in cohort:
            others = [p[j] for j in cohort if j != i]
            L = partial(on_seeds, x, y, others, strength / len(others) if mean and others else strength)
            theta[i] = learnt(theta[i], L, own(run, i, t, len(y)) if project else None)
        models.append(dict(theta))
    return models


def supervised(x: Tensor, y: Tensor, w: Weights) -> Tensor:
    """Cross-entropy."""
    return cross_entropy(logits(w, x), y)


def on_seeds(x: Tensor, y: Tensor, others: list[Tensor], strength: float, w: Weights) -> Tensor:
    """L_i: CE(p_i, y) + strength times the sum of KL(p_j || p_i)."""
    z = logits(w, x)
    apart = [(p_j * (p_j.log() - F.log_softmax(z, 1))).sum(1).mean() for p_j in others]
    return cross_entropy(z, y) + strength * sum(apart, torch.zeros(()))


def own(run: Run, i: int, t: int, count: int) -> partial[Tensor]:
    """The loss on the own examples that go with so many seeds."""
    data = run.clients[i]
    order = torch.randperm(data.n, generator=fold_in(0, "client", t, 2, i).fold("client").generator())
    rows = torch.cat([order] * (count // data.n + 1))[:count]
    return partial(supervised, data.x[rows], data.y[rows])


def learnt(w: Weights, L: partial[Tensor], on_own: partial[Tensor] | None) -> Weights:
    """A client's weights after its pass over the seeds."""
    for _ in range(STEPS):
        g = gradient(L, w)
        if on_own:
            o = gradient(on_own, w)
            product = sum((g[n] * o[n]).sum() for n in w)
            if product < 0:
                square = sum((o[n] ** 2).sum() for n in w)
                g = {n: g[n] - product / square * o[n] for n in w}
        w = {n: w[n] - ETA * g[n] for n in w}
    return w


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    mutual = LocalTraining("sgd", lr=ETA, epochs=STEPS, batch_size=10**6)
    for what, strength, weighting, conflicts in (
        ("summed and projected", 1.5, "sum", "project"),
        ("means, projected", 0.8, "mean", "project"),
        ("summed, kept", 1.0, "sum", "keep"),
    ):
        method = FedH2L(SGD, mutual, SEEDS, strength, weighting, conflicts)
        # With three of four classes a client, what others teach sometimes opposes its own.
        run = played(method, 4, World(clients=3, labels=3), COHORTS)
        models = reference(run, strength, weighting == "mean", conflicts == "project")
        yield f"every client's model in four rounds, {what}", gap(run.models, models)
