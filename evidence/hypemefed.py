"""HypeMeFed, from the equations of Shin et al. (SenSys 2024) in a summary and in the authors' code.

Of the paper only the abstract and a summary were read. In the method's file were read a hypernetwork's shape, which is
two perceptrons with one hidden layer of ReLUs, the crossing of its factors, its loss, and what is generated from what.
Its weights begin as the engine drew them, which is seen where the server does not train. Averages are equal.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, mean_by_layer, played
from potluck.core.federation import Federation
from potluck.core.requests.fit import LocalTraining
from potluck.methods.hypemefed import HypeMeFed
from potluck.testing.worlds import World, toy_federation

COHORTS = [[0, 1, 2], [1, 2], [0, 1]]
CAPACITY = {0: 1.0, 1: 0.5, 2: 0.75}
D, RANK, ETA_S, STEPS = 4, 3, 0.5, 4
LAYERS = ["stem", *(f"hidden{i}" for i in range(1, D + 1))]


def reference(run: Run, levels: tuple[float, ...], H: dict[str, Weights]) -> tuple[list[Weights], list[Weights]]:
    """The whole network's weights before the first round and after each, and the hypernetworks after each."""
    W, found, learnt = run.states[0].weights, [run.states[0].weights], list[dict[str, Weights]]()
    held = {k: [n for n in W if behind(n) <= depth(levels, CAPACITY[k])] for k in CAPACITY}
    for cohort in COHORTS:
        models = [descended(lambda v, k=k: exits(v, run, k), {n: W[n] for n in held[k]}) for k in cohort]
        H = dict(H)
        for t, s in sources(levels).items() if H else ():
            having = [m for m in models if t in m]
            lacking = [m for m in models if t not in m and s in m]
            if having:
                W_s, W_t = torch.stack([m[s] for m in having]), torch.stack([m[t] for m in having])
                H[t] = descended(lambda v, a=W_s, b=W_t: ((made(v, a) - b) ** 2).mean(), H[t], STEPS, ETA_S)
                for m in lacking:
                    m[t] = made(H[t], m[s][None])[0]
        W = mean_by_layer(models, [1.0] * len(models), W)
        found.append(W)
        learnt.append({f"{t}/{n}": w for t, all in H.items() for n, w in all.items()})
    return found, learnt


def depth(levels: tuple[float, ...], capacity: float) -> int:
    """How many blocks a client has."""
    return int(D * max(level for level in levels if level <= capacity))


def behind(name: str) -> int:
    """The block that a tensor belongs to, or behind which its exit is."""
    return D if name.startswith("head.") else LAYERS.index(name.split(".")[1])


def sources(levels: tuple[float, ...]) -> dict[str, str]:
    """By the matrix that some lack, that from which it follows: by the same place in the part before."""
    ends, found = sorted(int(D * level) for level in levels), dict[str, str]()
    for end, next_end in pairwise(ends):
        for t in range(end + 1, next_end + 1):
            found[f"stages.hidden{t}.0.weight"] = f"stages.hidden{t - min(next_end - end, end)}.0.weight"
    return found


def exits(v: Weights, run: Run, k: int) -> Tensor:
    """The sum of all exits' cross-entropies."""
    x, total = run.clients[k].x, torch.zeros(())
    for layer in LAYERS:
        if f"stages.{layer}.0.weight" in v:
            x = (x @ v[f"stages.{layer}.0.weight"].T + v[f"stages.{layer}.0.bias"]).clamp(min=0)
            head = "head" if layer == LAYERS[-1] else f"exits.{layer}.head"
            if f"{head}.weight" in v:
                total = total + cross_entropy(x @ v[f"{head}.weight"].T + v[f"{head}.bias"], run.clients[k].y)
    return total


def made(v: Weights, W_s: Tensor) -> Tensor:
    """Matrices that a hypernetwork makes of others: of A their columns, and of B their rows."""
    U, S, V_h = torch.linalg.svd(W_s, full_matrices=False)
    peaks = U.gather(1, U.abs().argmax(1, keepdim=True)).transpose(1, 2)
    A = peaks.sign() * S.sqrt()[..., None] * U.transpose(1, 2)
    B = peaks.sign() * S.sqrt()[..., None] * V_h
    columns, rows = perceptron(v, "left", A[:, :RANK]), perceptron(v, "right", B[:, :RANK])
    return torch.einsum("mri,mrj->mij", rows, columns)


def perceptron(v: Weights, side: str, x: Tensor) -> Tensor:
    """One hidden layer."""
    x = (x @ v[f"{side}.0.weight"].T + v[f"{side}.0.bias"]).clamp(min=0)
    return x @ v[f"{side}.2.weight"].T + v[f"{side}.2.bias"]


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    plain = toy_federation(World(clients=3, architectures=1, depth=D))
    sites = {k: replace(site, capacity=CAPACITY[k]) for k, site in plain.sites.items()}
    federation: Federation = replace(plain, sites=sites)
    for what, levels, generate in (
        ("two levels", (1.0, 0.5), True),
        ("three levels", (1.0, 0.75, 0.5), True),
        ("nothing generated", (1.0, 0.5), False),
    ):
        training = LocalTraining("sgd", lr=ETA_S, epochs=STEPS, batch_size=10**6)
        method = HypeMeFed(SGD, server_training=training, levels=levels, generate=generate, rank=RANK, hidden=6)
        run = played(method, cohorts=COHORTS, federation=federation)
        still = replace(method, server_training=replace(training, lr=0.0))
        start = played(still, 1, federation=federation).states[1].hypernetworks if generate else {}
        W, H = reference(run, levels, start)
        yield f"weights of three rounds, {what}", gap([s.weights for s in run.states], W)
        if generate:
            ours = [{f"{t}/{n}": w for t, all in s.hypernetworks.items() for n, w in all.items()} for s in run.states]
            yield f"hypernetworks, {what}", gap(ours[1:], H)
        models = [{k: {n: w[n] for n in ours} for k, ours in run.models[0].items()} for w in W[1:]]
        yield f"every client's model, {what}", gap(run.models, models)
