"""SplitMix, from Algorithms 1 and 2 of Hong et al. (ICLR 2022); of the authors' code the batch-wise mask of classes.

No code was read. Base b begins as the b-th block of the full network's units, by the method's departures. The shuffles
of Algorithm 2 are the engine's generator's; all else about which client trains which base is computed here.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, played
from potluck.core.ground.rng import fold_in
from potluck.methods.splitmix import SplitMix
from potluck.testing.worlds import CLASSES, World

COHORTS = [[0, 1, 2], [1], [1, 3], [3]]
B, UNITS = 4, 4  # bases, and units of a base's layers
R = 1 / B
BUDGET = {0: 4, 1: 2, 2: 4, 3: 2}
Bases = dict[int, Weights]


def reference(run: Run, scaler: bool, mask: bool) -> list[Bases]:
    """theta_b of all bases before the first round and after each."""
    theta = {b: block(run.start["toy1"], b) for b in range(B)}
    found, waiting = [theta], list[int]()
    for t, cohort in enumerate(COHORTS, start=1):
        generator, trained = fold_in(0, "server", t).generator(), {b: dict[int, Weights]() for b in range(B)}
        for k in cohort:
            waiting = waiting or torch.randperm(B, generator=generator).tolist()
            first, waiting = waiting[0], waiting[1:]
            others = [b for b in torch.randperm(B, generator=generator).tolist() if b != first]
            for b in [first, *others[: BUDGET[k] - 1]]:
                trained[b][k] = local(run, k, theta[b], scaler, mask)
        theta = {
            b: mean_by_layer([*trained[b].values()], [run.clients[k].n for k in trained[b]], theta[b]) for b in theta
        }
        found.append(theta)
    return found


def block(w: Weights, b: int) -> Weights:
    """The b-th block of each layer's units and of what it reads, but for inputs and classes, which are all there."""
    mine, found = slice(b * UNITS, (b + 1) * UNITS), Weights()
    for name, tensor in w.items():
        units = tensor if name.startswith("head.") else tensor[mine]
        found[name] = units[:, mine] if tensor.dim() == 2 and "stem" not in name else units
    return found


def local(run: Run, k: int, w: Weights, scaler: bool, mask: bool) -> Weights:
    """One base after a client's training."""
    data = run.clients[k]
    present = torch.tensor([1.0 if c in data.y else 0.0 for c in range(CLASSES)])

    def loss(v: Weights) -> Tensor:
        z = scaled(v, data.x) if scaler else logits(v, data.x)
        return cross_entropy(z * present if mask else z, data.y)

    return descended(loss, w)


def scaled(v: Weights, x: Tensor) -> Tensor:
    """A base's outputs where what leaves each layer but the last is divided by its width."""
    for stage in ("stem", "hidden1", "hidden2"):
        x = ((x @ v[f"stages.{stage}.0.weight"].T + v[f"stages.{stage}.0.bias"]) / R).clamp(min=0)
    return x @ v["head.weight"].T + v["head.bias"]


def named(bases: Bases, count: int = B) -> Weights:
    """The first bases in one dict."""
    return {f"{b}.{name}": tensor for b in range(count) for name, tensor in bases[b].items()}


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, scaler, mask in (("scaled", True, False), ("unscaled", False, False), ("masked", True, True)):
        world = World(clients=4, architectures=1, depth=2, labels=2 if mask else CLASSES)
        run = played(SplitMix(SGD, R, scaler=scaler, mask=mask), len(COHORTS), world, COHORTS)
        theta = reference(run, scaler, mask)
        yield f"all bases in four rounds, {what}", gap([s.weights for s in run.states], [named(b) for b in theta])
        models = [{k: named(bases, BUDGET[k]) for k in run.clients} for bases in theta[1:]]
        yield f"every client's bases, {what}", gap(run.models, models)
