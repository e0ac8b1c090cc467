"""Per-FedAvg, from Algorithm 1 of Fallah et al. (NeurIPS 2020): FO, HF, and the exact Hessian.

No code was read. The order of a batch, whose thirds are the three sets of examples, is read from the run.
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
    gap,
    gradient,
    logits,
    mean_by_layer,
    owned,
    played,
    recorded,
)
from potluck.methods.perfedavg import MetaLoss, PerFedAvg

COHORTS = [[0, 1, 2], [0, 2], [1]]
ALPHA, BETA, DELTA, TAU = 0.2, 0.1, 1e-3, 3


def reference(run: Run, rule: str, batches: list[Tensor]) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """W before the first round and after each, and every client's personal model after each."""
    w, order = dict(max(run.start.values(), key=len)), iter(batches)
    found, models = [w], list[dict[int, Weights]]()
    for cohort in COHORTS:
        trained: list[Weights] = []
        for k in cohort:
            w_k = owned(w, run.start[run.clients[k].architecture])
            for _ in range(TAU):
                step = direction(run, k, rule, w_k, next(order))
                w_k = {n: w_k[n] - BETA * step[n] for n in w_k}
            trained.append(w_k)
        w = mean_by_layer(trained, [1.0] * len(cohort), w)
        found.append(w)
        sent = {k: owned(w, run.start[data.architecture]) for k, data in run.clients.items()}
        models.append({k: descended(loss_on(run, k), net, 1, ALPHA) for k, net in sent.items()})
    return found, models


def loss_on(run: Run, k: int, rows: list[int] | None = None):
    """The loss of a client on some of its examples."""
    data = run.clients[k]
    chosen = list(range(data.n)) if rows is None else rows
    return lambda w: cross_entropy(logits(w, data.x[chosen]), data.y[chosen])


def direction(run: Run, k: int, rule: str, w: Weights, inputs: Tensor) -> Weights:
    """(I - alpha Hessian) grad f(w~), by a rule."""
    rows = [int((run.clients[k].x == one).all(1).nonzero()) for one in inputs]
    first, second, third = (loss_on(run, k, rows[part::3]) for part in range(3))
    g = gradient(first, w)
    v = gradient(second, {n: w[n] - ALPHA * g[n] for n in w})
    if rule == "first-order":
        return v
    if rule == "hessian-free":
        ahead, behind = (gradient(third, {n: w[n] + sign * DELTA * v[n] for n in w}) for sign in (1, -1))
        return {n: v[n] - ALPHA * (ahead[n] - behind[n]) / (2 * DELTA) for n in w}
    leaves = {n: tensor.clone().requires_grad_() for n, tensor in w.items()}
    slopes = torch.autograd.grad(first(leaves), list(leaves.values()), create_graph=True)
    along = sum((slope * v[n]).sum() for n, slope in zip(leaves, slopes, strict=True))
    bent = torch.autograd.grad(along, list(leaves.values()))
    return {n: v[n] - ALPHA * h for n, h in zip(leaves, bent, strict=True)}


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for rule in ("first-order", "hessian-free", "exact"):
        with recorded(MetaLoss) as batches:
            run = played(PerFedAvg(SGD, alpha=ALPHA, rule=rule, delta=DELTA), cohorts=COHORTS)
        w, models = reference(run, rule, batches)
        yield f"w of three rounds, {rule}", gap([s.weights["all"] for s in run.states], w)
        yield f"every client's model, {rule}", gap(run.models, models)
