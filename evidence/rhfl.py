"""RHFL, from the equations of Fang, Ye (CVPR 2022) as the authors' code has them.

Of the paper its abstract was read, and of the code a summary. By the method's departures a client measures its loss
when its training ends, trains before its first exchange, and counts as unchanged beside others whose quality is known;
qualities are divided by the sum of absolute values, or by the paper's sum. Public rows are those that the server drew.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played
from potluck.core.requests.fit import LocalTraining
from potluck.methods.rhfl import RHFL
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2], [0, 2, 3], [1, 3], [0, 2]]
LAMBDA, REVERSE, FLOOR, ETA = 0.4, 0.7, 1e-3, 2.5
ETA_D, STEPS = 1.0, 4  # with few classes of their own, some clients lose by what they learn from others
Found = tuple[list[dict[int, float]], list[dict[int, Weights]]]


def reference(run: Run, exchanges: int, absolute: bool, pretrain: int) -> Found:
    """The qualities after each round, and every client's model."""
    theta = {k: run.start[data.architecture] for k, data in run.clients.items()}
    loss, quality, trained = dict[int, float](), dict[int, float](), set[int]()
    found, models = [quality], list[dict[int, Weights]]()
    parts = iter(run.sent["predict_public"])
    for cohort in COHORTS:
        for k in set(cohort) - trained:
            for _ in range(pretrain):
                theta[k] = own_training(run, k, theta[k])
            loss[k] = float(symmetric(theta[k], run, k))
        trained |= set(cohort)
        W = confidences([quality.get(k) for k in cohort], absolute)
        for _ in range(exchanges):
            D_0 = run.federation.public.batch(next(parts)[cohort[0]]["rows"]).inputs.double()
            R = [torch.softmax(logits(theta[k], D_0), 1) for k in cohort]
            for place, k in enumerate(cohort):
                others = [(W[j], R[j]) for j in range(len(cohort)) if j != place]
                theta[k] = descended(lambda v, o=others, D=D_0: lesson(v, D, o), theta[k], STEPS, ETA_D)
        quality = dict(quality)
        for k in cohort:
            theta[k], before = own_training(run, k, theta[k]), loss[k]
            loss[k] = float(symmetric(theta[k], run, k))
            quality[k] = (before - loss[k]) / loss[k]
        found.append(quality)
        models.append(dict(theta))
    return found, models


def own_training(run: Run, k: int, theta: Weights) -> Weights:
    """A client's weights after a round's steps on its own data."""
    return descended(lambda v: symmetric(v, run, k), theta)


def symmetric(theta: Weights, run: Run, k: int) -> Tensor:
    """L_k: lambda CE and the reverse CE, in which the labels' zeros are a small number."""
    z, y = logits(theta, run.clients[k].x), run.clients[k].y
    q = F.one_hot(y, z.shape[1]).double().clamp(min=FLOOR)
    reverse = -(torch.softmax(z, 1) * (q.log())).sum(1).mean()
    return LAMBDA * cross_entropy(z, y) + REVERSE * reverse


def lesson(theta: Weights, D_0: Tensor, others: list[tuple[float, Tensor]]) -> Tensor:
    """The sum of W_l KL(R_l || R_k) over the others."""
    log = F.log_softmax(logits(theta, D_0), 1)
    return sum((W * (R * (R.log() - log)).sum(1).mean() for W, R in others), torch.zeros(()))


def confidences(quality: list[float | None], absolute: bool) -> list[float]:
    """W of each client: exp(1 / (N - 1) + eta F_k / sum F) over the sum of these; before any F, 1 / (N - 1)."""
    N = len(quality)
    if all(F_k is None for F_k in quality):
        return [1 / (N - 1)] * N
    known = [F_k or 0.0 for F_k in quality]
    total = sum(abs(F_k) if absolute else F_k for F_k in known)
    scores = [math.exp(1 / (N - 1) + ETA * F_k / total) for F_k in known]
    return [score / sum(scores) for score in scores]


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    distillation = LocalTraining("sgd", lr=ETA_D, epochs=STEPS, batch_size=10**6)
    for what, exchanges, absolute, pretrain in (
        ("one exchange", 1, True, 1),
        ("two exchanges, the paper's sum, no pre-training", 2, False, 0),
    ):
        options = {"forward": LAMBDA, "reverse": REVERSE, "floor": FLOOR, "confidence": ETA, "pretrain": pretrain}
        scale = "absolute" if absolute else "sum"
        method = RHFL(SGD, distillation, 40, exchanges, scale=scale, **options)
        run = played(method, 4, World(clients=4, labels=2), COHORTS)
        qualities, models = reference(run, exchanges, absolute, pretrain)
        yield f"qualities of four rounds, {what}", gap([s.qualities for s in run.states], qualities)
        yield f"every client's model, {what}", gap(run.models, models)
