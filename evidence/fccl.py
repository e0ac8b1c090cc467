"""FCCL, from the cross-correlation and the two teachers of Huang, Ye and Du (CVPR 2022).

No code of the authors was read; as the method's departures say, the equations are those of the authors' code, clients'
logits are exchanged once for each part of the public rows, and a client trains alone before its first exchange. Public
rows are those that the server drew.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fccl import FCCL
from potluck.testing.worlds import CLASSES, World

COHORTS = [[0, 1, 2], [0, 2], [0, 1, 3]]
LAMBDA, ETA, STEPS, ROWS = 0.2, 0.05, 2, 30


def reference(
    run: Run, exchanges: int, sample: bool, intra: float, inter: float, pretrain: int
) -> list[dict[int, Weights]]:
    """Every client's model after each round."""
    theta = {i: run.start[data.architecture] for i, data in run.clients.items()}
    first, models = dict[int, Weights](), list[dict[int, Weights]]()
    public, drawn = run.federation.public, iter(run.sent["score_public"])
    for cohort in COHORTS:
        for i in cohort:
            if i not in first:
                alone = partial(supervised, run.clients[i].x, run.clients[i].y)
                first[i] = theta[i] = descended(alone, theta[i], 3 * pretrain)
        before = dict(theta)
        for _ in range(exchanges):
            D_0 = public.batch(next(drawn)[cohort[0]]["rows"]).inputs.double()
            Z = torch.stack([logits(theta[i], D_0) for i in cohort]).mean(0)
            for i in cohort:
                theta[i] = descended(partial(correlation, D_0, Z, sample), theta[i], STEPS, ETA)
        for i in cohort:
            x, y = run.clients[i].x, run.clients[i].y
            teachers = [(intra, logits(first[i], x)), (inter, logits(before[i], x))]
            theta[i] = descended(partial(continual, x, y, teachers), theta[i])
        models.append(dict(theta))
    return models


def supervised(x: Tensor, y: Tensor, w: Weights) -> Tensor:
    """Cross-entropy on own examples."""
    return cross_entropy(logits(w, x), y)


def correlation(D_0: Tensor, Z: Tensor, sample: bool, w: Weights) -> Tensor:
    """The sum over u of (1 - M_uu)^2 and lambda times that over u and v of (1 + M_uv)^2."""
    a, b = ((z - z.mean(0)) / z.std(0, correction=int(sample)) for z in (logits(w, D_0), Z))
    M = torch.einsum("bu,bv->uv", a, b) / len(D_0)
    on = sum(((1 - M[u, u]) ** 2 for u in range(CLASSES)), torch.zeros(()))
    off = ((1 + M[u, v]) ** 2 for u in range(CLASSES) for v in range(CLASSES) if u != v)
    return on + LAMBDA * sum(off, torch.zeros(()))


def continual(x: Tensor, y: Tensor, teachers: list[tuple[float, Tensor]], w: Weights) -> Tensor:
    """Cross-entropy, and from each teacher its weight times KL(teacher || net)."""
    z = logits(w, x)
    loss = cross_entropy(z, y)
    for weight, taught in teachers:
        q = torch.softmax(taught, 1)
        loss = loss + weight * (q * (q.log() - F.log_softmax(z, 1))).sum(1).mean()
    return loss


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    learning = LocalTraining("sgd", lr=ETA, epochs=STEPS, batch_size=10**6)
    for what, exchanges, deviation, intra, inter, pretrain in (
        ("one exchange", 1, "population", 1.0, 1.0, 1),
        ("three exchanges, deviation of a sample", 3, "sample", 0.5, 2.0, 2),
        ("no pre-training, no intra-domain teacher", 1, "population", 0.0, 1.0, 0),
    ):
        options = {"intra": intra, "inter": inter, "pretrain": pretrain}
        method = FCCL(SGD, learning, ROWS, exchanges, LAMBDA, deviation, **options)
        run = played(method, 3, World(clients=4, labels=2), COHORTS)
        models = reference(run, exchanges, deviation == "sample", intra, inter, pretrain)
        yield f"every client's model in three rounds, {what}", gap(run.models, models)
