"""ScaleFL, from Ilhan et al. (CVPR 2023), by the loss and the average as they are in the authors' code.

No code was read: by the method's departures the divergence is a mean over classes, the deepest exit learns from it too,
and what leaves a layer is divided by the width also where the network predicts. A client with the capacity of a half
has two of four blocks, 12 of 16 units (0.7, rounded up) and an exit behind each block, which begin as the engine drew.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, played
from potluck.methods.scalefl import ScaleFL
from potluck.testing.worlds import CLASSES, World

COHORTS = [[0, 1, 2], [0, 1], [1, 3], [2]]
BLOCKS, UNITS, NARROW, S = 4, 16, 12, 0.7
GAMMA, T = 0.8, 3.0


def reference(run: Run, learns: bool, warmup: int) -> list[Weights]:
    """The whole network before the first round and after each."""
    w = run.states[0].weights
    found = [w]
    for t, cohort in enumerate(COHORTS):
        gamma = GAMMA if t >= warmup else 0.0
        trained = [local(run, k, part(w, k), gamma, learns) for k in cohort]
        w = {n: covered(n, tensor, trained) for n, tensor in w.items()}
        found.append(w)
    return found


def part(w: Weights, k: int) -> Weights:
    """What a client has: the leading units up to its depth."""
    if k % 2 == 0:
        return w
    reached = tuple(f"{kind}.{stage}." for kind in ("stages", "exits") for stage in ("stem", "hidden1", "hidden2"))
    return {n: t[narrow(t)] for n, t in w.items() if n.startswith(reached)}


def narrow(tensor: Tensor) -> tuple[slice, ...]:
    """The places of the leading units in a tensor; inputs and classes are all there."""
    return tuple(slice(NARROW if size == UNITS else size) for size in tensor.shape)


def covered(name: str, before: Tensor, trained: list[Weights]) -> Tensor:
    """The mean of each number over those who had it, as it was where nobody had."""
    total, holders = torch.zeros_like(before), torch.zeros_like(before)
    for w in trained:
        if name in w:
            place = tuple(slice(size) for size in w[name].shape)
            total[place] += w[name]
            holders[place] += 1
    return torch.where(holders > 0, total / holders.clamp(min=1), before)


def exits(v: Weights, x: Tensor) -> list[Tensor]:
    """z_1 to z_m."""
    width = 1.0 if "head.weight" in v else S
    z: list[Tensor] = []
    for stage in ["stem", *(f"hidden{i}" for i in range(1, BLOCKS + 1))]:
        if f"stages.{stage}.0.weight" not in v:
            break
        x = ((x @ v[f"stages.{stage}.0.weight"].T + v[f"stages.{stage}.0.bias"]) / width).clamp(min=0)
        behind = "head" if stage == f"hidden{BLOCKS}" else f"exits.{stage}.head"
        if f"{behind}.weight" in v:
            z.append(x @ v[f"{behind}.weight"].T + v[f"{behind}.bias"])
    return z


def local(run: Run, k: int, w: Weights, gamma: float, learns: bool) -> Weights:
    """A client's part after its training."""

    def loss(v: Weights) -> Tensor:
        z = exits(v, run.clients[k].x)
        m = len(z)
        log_p_m = F.log_softmax((z[-1] if learns else z[-1].detach()) / T, 1)
        total = torch.zeros(())
        for j, z_j in enumerate(z, start=1):
            divergence = (log_p_m.exp() * (log_p_m - F.log_softmax(z_j / T, 1))).sum(1).mean() / CLASSES
            taught = gamma * T**2 * divergence if j < m else 0.0
            total = total + j * (cross_entropy(z_j, run.clients[k].y) + taught)
        return total / (m * (m + 1) / 2)

    return descended(loss, w)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    world = World(clients=4, architectures=1, depth=BLOCKS)
    for what, learns, warmup in (("as in the code", True, 0), ("constant teacher, two rounds alone", False, 2)):
        method = ScaleFL(SGD, gamma=GAMMA, temperature=T, teacher_learns=learns, warmup=warmup)
        run = played(method, len(COHORTS), world, COHORTS)
        w = reference(run, learns, warmup)
        yield f"w of four rounds, {what}", gap([s.weights for s in run.states], w)
        models = [{k: part(after, k) for k in run.clients} for after in w[1:]]
        yield f"every client's part, {what}", gap(run.models, models)
