"""FedBN, from Algorithm 1 of Li et al. (ICLR 2021), on networks with BatchNorm, which is computed by hand.

The authors' code for digits was read to settle that the means are plain and that running statistics stay, too. Layers
that some clients lack are averaged over those that own them (departure 1 of the method).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, gap, gradient, mean_by_layer, played
from potluck.methods.fedbn import FedBN
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def normalised(w: Weights, x: Tensor, seen: Weights) -> Tensor:
    """Outputs in training mode: Linear, BatchNorm by the batch, ReLU; new running statistics go to `seen`."""
    stages = sorted(
        {name.rsplit(".", 2)[0] for name in w if name.startswith("stages.")}, key=lambda s: (s[7] != "s", s)
    )
    for stage in stages:
        h = x @ w[f"{stage}.0.weight"].T + w[f"{stage}.0.bias"]
        mean, square = h.mean(0), ((h - h.mean(0)) ** 2).sum(0)
        n = len(h)
        x = (h - mean) / torch.sqrt(square / n + 1e-5) * w[f"{stage}.1.weight"] + w[f"{stage}.1.bias"]
        x = x.clamp(min=0)
        norm = f"{stage}.1."
        seen[norm + "running_mean"] = (0.9 * w[norm + "running_mean"] + 0.1 * mean).detach()
        seen[norm + "running_var"] = (0.9 * w[norm + "running_var"] + 0.1 * square / (n - 1)).detach()
        seen[norm + "num_batches_tracked"] = w[norm + "num_batches_tracked"] + 1
    return x @ w["head.weight"].T + w["head.bias"]


def trained(run: Run, k: int, w: Weights) -> Weights:
    """A client's network after three steps of gradient descent."""
    data = run.clients[k]
    for _ in range(3):
        fixed = {n: t for n, t in w.items() if n.endswith(STATISTICS)}
        learnt = {n: t for n, t in w.items() if n not in fixed}
        seen: Weights = {}
        g = gradient(lambda v, f=fixed, s=seen: cross_entropy(normalised({**v, **f}, data.x, s), data.y), learnt)
        w = {**w, **{n: learnt[n] - 0.1 * g[n] for n in learnt}, **seen}
    return w


def reference(run: Run) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """The layers that are averaged, after each round; and every client's network."""
    own = {k: run.start[data.architecture] for k, data in run.clients.items()}
    shared = {n: t for n, t in max(run.start.values(), key=len).items() if ".1." not in n}
    averages: list[Weights] = []
    models: list[dict[int, Weights]] = []
    for cohort in COHORTS:
        for k in cohort:
            own[k] = trained(run, k, {**own[k], **{n: shared[n] for n in own[k] if n in shared}})
        parts = [{n: own[k][n] for n in own[k] if n in shared} for k in cohort]
        shared = mean_by_layer(parts, [1.0] * len(cohort), shared)
        averages.append(shared)
        models.append({k: {**own[k], **{n: shared[n] for n in own[k] if n in shared}} for k in own})
    return averages, models


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    run = played(FedBN(SGD), 4, World(clients=3, batchnorm=True), COHORTS)
    averages, models = reference(run)
    yield "averaged layers of four rounds", gap([s.weights["all"] for s in run.states[1:]], averages)
    yield "every client's network", gap(run.models, models)
