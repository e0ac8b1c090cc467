"""FeDepth, from problem (1) and Algorithm 1 of Zhang et al. (2023), and on FedProx; averaged as FedAvg.

No code was read. A toy network has four stages and its head; a client with half of the memory trains the first two,
then the third, then the fourth, each with the head behind it, on what the finished stages put out. How pieces follow
from a budget is not computed here. All stages are as wide as what the head reads, so nothing is skipped on the way.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import Run, Weights, cross_entropy, descended, gap, mean_by_layer, played
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedepth import FeDepth
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2], [0, 1], [1, 2]]
STAGES = ["stages.stem.0", "stages.hidden1.0", "stages.hidden2.0", "stages.hidden3.0"]
PIECES = {0: [(0, 4)], 1: [(0, 2), (2, 3), (3, 4)], 2: [(0, 4)]}
SGD = LocalTraining("sgd", lr=0.1, epochs=3, batch_size=64)


def reference(run: Run, mu: float) -> list[Weights]:
    """W before the first round and after each."""
    w = run.start["toy1"]
    found = [w]
    for cohort in COHORTS:
        w = mean_by_layer([local(run, k, w, mu) for k in cohort], [run.clients[k].n for k in cohort], w)
        found.append(w)
    return found


def local(run: Run, k: int, sent: Weights, mu: float) -> Weights:
    """A client's weights after its sub-problems, one after the other (l. 11-17)."""
    w, z, y = sent, run.clients[k].x, run.clients[k].y
    for start, stop in PIECES[k]:
        own = [n for n in w if n.startswith((*STAGES[start:stop], "head."))]  # theta_j and phi

        def loss(v: Weights, z: Tensor = z, stages: list[str] = STAGES[start:stop]) -> Tensor:
            out = passed(v, stages, z) @ v["head.weight"].T + v["head.bias"]
            pull = sum((((v[n] - sent[n]) ** 2).sum() for n in v), torch.zeros(()))
            return cross_entropy(out, y) + mu / 2 * pull

        w = {**w, **descended(loss, {n: w[n] for n in own})}
        z = passed(w, STAGES[start:stop], z)
    return w


def passed(w: Weights, stages: list[str], z: Tensor) -> Tensor:
    """What these stages put out."""
    for stage in stages:
        z = (z @ w[f"{stage}.weight"].T + w[f"{stage}.bias"]).clamp(min=0)
    return z


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    world = World(clients=3, architectures=1, depth=3)
    for what, mu, buffer in (("on FedAvg", 0.0, True), ("on FedProx", 0.4, True), ("without a buffer", 0.0, False)):
        run = played(FeDepth(SGD, mu=mu, buffer=buffer), world=world, cohorts=COHORTS)
        yield f"weights of three rounds, {what}", gap([s.weights["all"] for s in run.states], reference(run, mu))
