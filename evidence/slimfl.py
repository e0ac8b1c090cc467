"""SlimFL, from the superposition training and the decoding of replies of Baek et al. (INFOCOM 2022).

Only abstracts and a summary of the equations were read. By the method's departures a reply's width comes from one
number for each client, drawn here as by the engine, and a client of less capacity trains the widths within it, of which
the widest learns from labels. Averages are equal.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played
from potluck.core.ground.rng import fold_in
from potluck.methods.slimfl import SlimFL
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2, 3], [1, 2], [0, 2, 3]]
CAPACITY = {0: 1.0, 1: 0.5, 2: 1.0, 3: 0.5}
UNITS = 16  # of the widest network's layers


def reference(
    run: Run, levels: tuple[float, ...], w: tuple[float, ...], decoded: tuple[float, ...], distil: bool
) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """Theta before the first round and after each, and every client's network after each."""
    theta = run.start["toy1"]
    found, models = [theta], list[dict[int, Weights]]()
    for t, cohort in enumerate(COHORTS, start=1):
        channels = torch.rand(len(cohort), generator=fold_in(0, "server", t).generator())
        total, count = ({n: torch.zeros_like(v) for n, v in theta.items()} for _ in range(2))
        for k, channel in zip(cohort, channels, strict=True):
            after = local(run, k, theta, tuple(level for level in levels if level <= CAPACITY[k]), w, distil)
            heard = [v for v, p in zip(levels, decoded, strict=True) if v <= CAPACITY[k] and channel < p]
            Xi = mask(theta, max(heard, default=0.0))
            total = {n: total[n] + after[n] * Xi[n] for n in theta}
            count = {n: count[n] + Xi[n] for n in theta}
        theta = {n: torch.where(count[n] > 0, total[n] / count[n].clamp(min=1), theta[n]) for n in theta}
        found.append(theta)
        models.append({k: cut(theta, capacity) for k, capacity in CAPACITY.items()})
    return found, models


def local(run: Run, k: int, theta: Weights, levels: tuple[float, ...], w: tuple[float, ...], distil: bool) -> Weights:
    """Theta after a client's steps along the sum of w_i grad F(theta * Xi_i)."""
    data = run.clients[k]
    w = tuple(share / sum(w[: len(levels)]) for share in w[: len(levels)])
    Xi = [mask(theta, level) for level in levels]

    def loss(v: Weights) -> Tensor:
        z = [logits({n: v[n] * m[n] for n in v}, data.x) for m in Xi]
        teacher = torch.softmax(z[0].detach(), 1)
        narrow = [
            -(teacher * F.log_softmax(own, 1)).sum(1).mean() if distil else cross_entropy(own, data.y) for own in z[1:]
        ]
        return sum((w_i * F_i for w_i, F_i in zip(w[1:], narrow, strict=True)), w[0] * cross_entropy(z[0], data.y))

    return descended(loss, theta)


def mask(theta: Weights, level: float) -> Weights:
    """Xi, 1 in the leading part of each layer's units and of what it reads, and 0 elsewhere."""
    found = {n: torch.zeros_like(v) for n, v in theta.items()}
    if level > 0:
        for n, part in cut(theta, level).items():
            found[n][tuple(slice(size) for size in part.shape)] = 1.0
    return found


def cut(theta: Weights, level: float) -> Weights:
    """The network of this width: inputs and classes are all there."""
    units, found = int(level * UNITS), Weights()
    for n, v in theta.items():
        own = v if n.startswith("head.") else v[:units]
        found[n] = own[:, :units] if v.dim() == 2 and "stem" not in n else own
    return found


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, levels, w, decoded, distil in (
        ("three widths", (1.0, 0.5, 0.25), (0.5, 0.2, 0.3), (0.6, 0.75, 0.9), True),
        ("labels for all widths", (1.0, 0.5), (0.7, 0.3), (0.6, 0.85), False),
    ):
        method = SlimFL(SGD, levels=levels, weights=w, decoded=decoded, distil=distil)
        run = played(method, 3, World(clients=4, architectures=1, depth=2), COHORTS)
        theta, models = reference(run, levels, w, decoded, distil)
        yield f"theta of three rounds, {what}", gap([s.weights for s in run.states], theta)
        yield f"every client's network, {what}", gap(run.models, models)
