"""FIARSE, from Algorithm 1 of Wu et al. (NeurIPS 2024) and its surrogate gradient of the mask; FedGMR's ladder.

No code was read: by the method's departures a weight that falls below theta_k is 0 and has no gradient, a weight is
averaged over all clients that were sent it, and the ladder is a least density. Averages are equal.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, gap, gradient, logits, played
from potluck.methods.fiarse import FIARSE, Masks
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2], [1], [1, 2]]
ETA_L, STEPS = 0.1, 3
GAMMA = {0: 1.0, 1: 0.5, 2: 1.0}


def reference(
    run: Run, masks: Masks, layers: bool, eta_g: float, ladder: list[float]
) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """The server's weights before the first round and after each, and every client's sub-model after each."""
    x = run.start["toy1"]
    found, models = [x], list[dict[int, Weights]]()
    for least, cohort in zip(ladder, COHORTS, strict=True):
        kept = {k: largest(x, max(GAMMA[k], least), layers) for k in GAMMA}
        ends = {k: local(run, k, x, *kept[k], masks) for k in cohort}
        x = {n: x[n] + eta_g * (mean({k: (ends[k][n], kept[k][0][n]) for k in cohort}, x[n]) - x[n]) for n in x}
        found.append(x)
        after = {k: largest(x, max(GAMMA[k], least), layers)[0] for k in GAMMA}
        models.append({k: {n: x[n] * m[n] for n in x} for k, m in after.items()})
    return found, models


def largest(x: Weights, gamma: float, layers: bool) -> tuple[Weights, Weights]:
    """m, 1 at the largest weights, and theta, of all layers together or of each; both by tensor."""
    m, theta = Weights(), Weights()
    for layer in {n.rpartition(".")[0] for n in x} if layers else [""]:
        names = [n for n in x if n.startswith(layer)]
        sizes = torch.cat([x[n].abs().flatten() for n in names]).sort(descending=True).values
        for n in names:
            theta[n] = sizes[int(gamma * len(sizes)) - 1]
            m[n] = (x[n].abs() >= theta[n]).double()
    return m, theta


def local(run: Run, k: int, x: Weights, m: Weights, theta: Weights, masks: Masks) -> Weights:
    """A client's x after its steps, with the surrogate dm / d|x| = 2 theta / (|x| + theta)^2 if masks are learnt."""
    data = run.clients[k]
    x = {n: x[n] * m[n] for n in x}
    for _ in range(STEPS):
        now = m if masks == "fixed" else {n: m[n] * (x[n].abs() >= theta[n]) for n in x}
        masked = {n: x[n] * now[n] for n in x}
        g = gradient(lambda v: cross_entropy(logits(v, data.x), data.y), masked)
        slope = {n: 2 * theta[n] / (x[n].abs() + theta[n]) ** 2 if masks == "learnt" else 0.0 for n in x}
        x = {n: x[n] - ETA_L * g[n] * now[n] * (1 + x[n].abs() * slope[n]) for n in x}
    return x


def mean(values: dict[int, tuple[Tensor, Tensor]], kept: Tensor) -> Tensor:
    """Of each weight over the clients that held it; what nobody held stays."""
    holders = sum((m for _, m in values.values()), torch.zeros_like(kept))
    total = sum((value * m for value, m in values.values()), torch.zeros_like(kept))
    return torch.where(holders > 0, total / holders.clamp(min=1), kept)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, masks, layers, eta_g, ladder in (
        ("learnt masks", "learnt", False, 1.0, [0.0] * 3),
        ("followed masks by layer", "followed", True, 1.0, [0.0] * 3),
        ("fixed masks on a ladder, half steps", "fixed", False, 0.5, [0.4, 0.7, 1.0]),
    ):
        steps = tuple(ladder) if any(ladder) else ()
        threshold = "layer" if layers else "global"
        method = FIARSE(SGD, threshold=threshold, masks=masks, server_lr=eta_g, ladder=steps, grow_every=1)
        run = played(method, world=World(clients=3, architectures=1, depth=2), cohorts=COHORTS)
        x, models = reference(run, masks, layers, eta_g, ladder)
        yield f"x of three rounds, {what}", gap([s.weights for s in run.states], x)
        yield f"every client's sub-model, {what}", gap(run.models, models)
