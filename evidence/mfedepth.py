"""m-FeDepth, from problem (1) and Algorithm 1 of Zhang et al. (2023), with auxiliary classifiers; averaged as FedAvg.

The paper does not define them: as in the authors' code, by the method's departures, a piece that is not the last has a
linear classifier of its own, here without a batch norm, averaged over the clients that trained it. No code was read. A
client with half of the memory trains two stages, then the third, then the fourth and the head. How pieces follow from a
budget is not computed here, and the classifiers' first values are those that the engine drew.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import Run, Weights, cross_entropy, descended, gap, mean_by_layer, played
from potluck.core.requests.fit import LocalTraining
from potluck.methods.mfedepth import MFeDepth
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2, 3], [0, 1], [1, 2, 3]]
STAGES = ["stages.stem.0", "stages.hidden1.0", "stages.hidden2.0", "stages.hidden3.0"]
PIECES = {0: [(0, 4)], 1: [(0, 2), (2, 3), (3, 4)]}  # of whom has the whole memory, and half of it
SGD = LocalTraining("sgd", lr=0.1, epochs=3, batch_size=64)


def reference(run: Run, mu: float) -> tuple[list[Weights], list[Weights]]:
    """W and all phi before the first round and after each."""
    w, phi = run.start["toy1"], run.states[0].exits["all"]
    found, exits = [w], [phi]
    for cohort in COHORTS:
        trained = [local(run, k, w, phi, mu) for k in cohort]
        shares = [run.clients[k].n for k in cohort]
        w = mean_by_layer([own for own, _ in trained], shares, w)
        phi = mean_by_layer([own for _, own in trained], shares, phi)
        found.append(w)
        exits.append(phi)
    return found, exits


def local(run: Run, k: int, sent: Weights, phi: Weights, mu: float) -> tuple[Weights, Weights]:
    """A client's weights after its sub-problems, one after the other (l. 11-17), and the phi_j that it trained."""
    w, z, y = sent, run.clients[k].x, run.clients[k].y
    used: Weights = {}
    for start, stop in PIECES[k % 2]:
        stages = STAGES[start:stop]
        whose = "head." if stop == len(STAGES) else f"{stages[-1].split('.')[1]}."
        behind = {n: t for n, t in (w if whose == "head." else phi).items() if n.startswith(whose)}
        own = {n: w[n] for n in w if n.startswith(tuple(stages))} | behind  # theta_j and phi_j
        first = {n: {**phi, **sent}[n] for n in own}
        weight, bias = sorted(behind, reverse=True)

        def loss(v: Weights, stages=stages, z=z, first=first, weight=weight, bias=bias) -> Tensor:
            pull = sum((((v[n] - first[n]) ** 2).sum() for n in v), torch.zeros(()))
            return cross_entropy(passed(v, stages, z) @ v[weight].T + v[bias], y) + mu / 2 * pull

        own = descended(loss, own)
        used |= {n: own[n] for n in own if n in phi}
        w = {n: own.get(n, t) for n, t in w.items()}
        z = passed(w, stages, z)
    return w, used


def passed(w: Weights, stages: list[str], z: Tensor) -> Tensor:
    """What these stages put out."""
    for stage in stages:
        z = (z @ w[f"{stage}.weight"].T + w[f"{stage}.bias"]).clamp(min=0)
    return z


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    world = World(clients=4, architectures=1, depth=3)
    for what, mu, buffer in (("on FedAvg", 0.0, True), ("on FedProx", 0.4, True), ("without a buffer", 0.0, False)):
        run = played(MFeDepth(SGD, mu=mu, buffer=buffer), world=world, cohorts=COHORTS)
        w, phi = reference(run, mu)
        yield f"weights of three rounds, {what}", gap([s.weights["all"] for s in run.states], w)
        yield f"auxiliary classifiers, {what}", gap([s.exits["all"] for s in run.states], phi)
