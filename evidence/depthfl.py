"""DepthFL, from Algorithm 1 of Kim et al. (ICLR 2023), with FedDyn; by the method's departures h is over all clients.

No code was read. A client with the capacity of a half has two of four blocks, with a classifier behind each; here these
are linear, and begin as the engine drew them. What is compared of a client's model is its weights: that the mean of its
outputs predicts is not.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, mean_by_layer, played
from potluck.methods.depthfl import DepthFL
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2], [0, 1], [1], [1, 2]]
D, RAMP = 4, 3


def reference(run: Run, alpha: float, consistency: float) -> tuple[list[Weights], list[Weights]]:
    """W and h before the first round and after each."""
    W, K = run.states[0].weights, len(run.clients)
    h = {n: torch.zeros_like(t) for n, t in W.items()}
    g = {k: {n: h[n] for n in part(W, k)} for k in run.clients}
    found = ([W], [h])
    for t, cohort in enumerate(COHORTS):
        w_t = consistency * math.exp(-5 * (1 - min(t, RAMP) / RAMP) ** 2)
        trained: list[Weights] = []
        for k in cohort:
            sent = part(W, k)

            def loss(v: Weights, k=k, sent=sent, w_t=w_t) -> Tensor:
                dyn = sum(((v[n] - sent[n]) ** 2).sum() * alpha / 2 - (g[k][n] * v[n]).sum() for n in v)
                return taught(run, k, v, w_t) + dyn

            trained.append(descended(loss, sent))
            g[k] = {n: g[k][n] - alpha * (trained[-1][n] - sent[n]) for n in sent}
        held = {n: [w[n] for w in trained if n in w] for n in W}
        h = {n: h[n] - alpha / K * sum((w - W[n] for w in held[n]), torch.zeros(())) for n in W}
        mean = mean_by_layer(trained, [1.0] * len(cohort), W)
        W = {n: mean[n] - h[n] / alpha if alpha and held[n] else mean[n] for n in W}
        found[0].append(W)
        found[1].append(h)
    return found


def part(W: Weights, k: int) -> Weights:
    """What a client has of the network."""
    mine = ("stages.stem.", "stages.hidden1.", "stages.hidden2.", "exits.hidden1.", "exits.hidden2.")
    return W if k % 2 == 0 else {n: t for n, t in W.items() if n.startswith(mine)}


def taught(run: Run, k: int, v: Weights, w_t: float) -> Tensor:
    """L_k: of each classifier by labels, and by the others' predictions, which are constant."""
    x, z = run.clients[k].x, list[Tensor]()
    for stage in ["stem", *(f"hidden{i}" for i in range(1, D + 1))]:
        if f"stages.{stage}.0.weight" not in v:
            break
        x = (x @ v[f"stages.{stage}.0.weight"].T + v[f"stages.{stage}.0.bias"]).clamp(min=0)
        behind = "head" if stage == f"hidden{D}" else f"exits.{stage}.head"
        if f"{behind}.weight" in v:
            z.append(x @ v[f"{behind}.weight"].T + v[f"{behind}.bias"])
    total = sum((cross_entropy(z_i, run.clients[k].y) for z_i in z), torch.zeros(()))
    for i, z_i in enumerate(z):
        for j, z_j in enumerate(z):
            log_p, log_q = F.log_softmax(z_i, 1), F.log_softmax(z_j, 1).detach()
            kl = (log_q.exp() * (log_q - log_p)).sum(1).mean()
            total = total + (w_t / (len(z) - 1) * kl if i != j else 0)
    return total


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    world = World(clients=3, architectures=1, depth=D)
    for what, alpha, consistency in (("Algorithm 1", 0.3, 0.8), ("on FedAvg", 0.0, 0.8), ("no distillation", 0.3, 0.0)):
        method = DepthFL(SGD, alpha=alpha, consistency=consistency, ramp=RAMP)
        run = played(method, len(COHORTS), world, COHORTS)
        W, h = reference(run, alpha, consistency)
        yield f"W of four rounds, {what}", gap([state.weights for state in run.states], W)
        if alpha:
            yield f"h, {what}", gap([state.h for state in run.states], h)
        models = [{k: {f"net.{n}": t for n, t in part(w, k).items()} for k in run.clients} for w in W[1:]]
        yield f"every client's model, {what}", gap(run.models, models)
