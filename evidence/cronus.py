"""Cronus, from the exchange of Chang et al. (2019) and the filter of Diakonikolas et al. (ICML 2017).

No code of the authors was read, and of the paper what the method's docstring states: the filter's constants, that it
drops one vector at a time, that a client learns the public labels first and its own data then, and that it trains once
on its own before its first exchange. The rule in place of the filter is the trimmed mean, number by number, divided by
its sum. Public rows are those that the server drew.
"""

from collections.abc import Iterator
from functools import partial
from math import floor

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played
from potluck.core.requests.fit import LocalTraining
from potluck.methods.cronus import Cronus
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2, 3, 4], [0, 2, 3], [0, 1, 2, 4, 5]]
EPSILON, VARIANCE, ROWS, STEPS, ETA = 0.4, 0.004, 20, 3, 0.4


def reference(run: Run, by_filter: bool, pretrain: bool) -> tuple[list[Tensor], list[dict[int, Weights]]]:
    """Y of each round, and every client's model after it."""
    public, trained = run.federation.public, set[int]()
    theta = {i: run.start[data.architecture] for i, data in run.clients.items()}
    found, models = list[Tensor](), list[dict[int, Weights]]()
    for t, cohort in enumerate(COHORTS):
        X_p = public.batch(run.sent["predict_public"][t][cohort[0]]["rows"]).inputs.double()
        own = {i: partial(supervised, run.clients[i].x, run.clients[i].y) for i in cohort}
        for i in set(cohort) - trained if pretrain else ():
            theta[i] = descended(own[i], theta[i])
        trained |= set(cohort)
        labels = torch.stack([torch.softmax(logits(theta[i], X_p), 1) for i in cohort], 1)
        Y = torch.stack([filtered(row) for row in labels]) if by_filter else trimmed(labels)
        for i in cohort:
            theta[i] = descended(partial(of_public, X_p, Y), theta[i], STEPS, ETA)
            theta[i] = descended(own[i], theta[i])
        found.append(Y)
        models.append(dict(theta))
    return found, models


def supervised(x: Tensor, y: Tensor, w: Weights) -> Tensor:
    """Cross-entropy on own examples."""
    return cross_entropy(logits(w, x), y)


def of_public(x: Tensor, Y: Tensor, w: Weights) -> Tensor:
    """Cross-entropy to the robust labels."""
    return -(Y * F.log_softmax(logits(w, x), 1)).sum(1).mean()


def filtered(row: Tensor) -> Tensor:
    """The mean of an example's vectors (clients, classes) without those that lie farthest out."""
    for _ in range(floor(EPSILON * len(row))):
        apart = row - row.mean(0)
        values, directions = torch.linalg.eigh(apart.T @ apart / len(row))
        if values[-1] <= VARIANCE:
            break
        farthest = int((apart @ directions[:, -1]).abs().argmax())
        row = torch.cat([row[:farthest], row[farthest + 1 :]])
    return row.mean(0)


def trimmed(labels: Tensor) -> Tensor:
    """Of each number the mean without a share of the largest and of the smallest, divided by the sum over classes."""
    count = floor(0.2 * labels.shape[1])
    middle = labels.sort(1).values[:, count : labels.shape[1] - count].mean(1)
    return middle / middle.sum(1, keepdim=True)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    distillation = LocalTraining("sgd", lr=ETA, epochs=STEPS, batch_size=10**6)
    for what, aggregation, pretrain in (
        ("filtered", "filter", True),
        ("filtered, no pre-training", "filter", False),
        ("trimmed", "rule", True),
    ):
        method = Cronus(SGD, distillation, ROWS, pretrain, aggregation, outliers=EPSILON, variance=VARIANCE)
        run = played(method, 3, World(clients=6, labels=1), COHORTS)
        Y, models = reference(run, aggregation == "filter", pretrain)
        sent = [next(iter(messages.values()))["labels"] for messages in run.sent["local_update"]]
        yield f"robust labels of three rounds, {what}", gap(sent, Y)
        yield f"every client's model, {what}", gap(run.models, models)
