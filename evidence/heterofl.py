"""HeteroFL, from eq. 1 to 3, sections 4.1 and 4.2 and Algorithm 1 of Diao, Ding, Tarokh (ICLR 2021).

No code was read. Of the method's departures the reference follows the limit of the gradient's norm, which the authors'
code has, levels by capacity, and levels whose clients do not count. Levels that are drawn are read from the messages. A
toy network has no norm; the scaler then divides what leaves each hidden layer, before its ReLU. Evaluation has none.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, gap, gradient, played
from potluck.core.federation import Federation
from potluck.methods.heterofl import HeteroFL
from potluck.testing.worlds import World, toy_federation

COHORTS = [[0, 1, 2], [1, 2], [0, 2], [2]]
RATES = {0: 1.0, 1: 0.5, 2: 0.3}
CLIP, K = 0.4, 5
TRAINING = replace(SGD, clip_norm=CLIP)
Window = Callable[[int, float], Tensor]


def federation() -> Federation:
    """Three clients of these rates, with some classes of four, and one network."""
    whole = toy_federation(World(clients=3, architectures=1, labels=3, width=K))
    return replace(whole, sites={k: replace(site, capacity=RATES[k]) for k, site in whole.sites.items()})


def leading(number: int, r: float) -> Tensor:
    """The hidden channels of rate r, the same in every round."""
    return torch.arange(ceil(r * K))


def reference(
    run: Run, window: Window, *, mask: bool = True, left_out: float = 0.0
) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """W_g before the first round and after each, and every client's slice for inference after each."""
    w = run.start["toy1"]
    found, models = [w], list[dict[int, Weights]]()
    for number, cohort in enumerate(COHORTS, 1):
        total, count = ({n: torch.zeros_like(t) for n, t in w.items()} for _ in range(2))
        for k in cohort:
            r = float(run.sent["local_update"][number - 1][k]["rate"])
            trained = local(run, k, sliced(w, window(number, r)), r, mask)
            for n in w if r != left_out else ():
                at = grid(n, window(number, r), run.clients[k].y.unique())
                own = trained[n][run.clients[k].y.unique()] if n.startswith("head.") else trained[n]
                total[n][at] += own
                count[n][at] += 1
        w = {n: torch.where(count[n] > 0, total[n] / count[n].clamp(min=1), w[n]) for n in w}
        found.append(w)
        models.append({k: sliced(w, window(number, RATES[k])) for k in run.clients})
    return found, models


def grid(name: str, channels: Tensor, classes: Tensor) -> tuple[Tensor, ...]:
    """The rows and columns of a tensor that belong to these hidden channels, or classes."""
    rows = classes if name.startswith("head.") else channels
    if name.endswith("bias"):
        return (rows,)
    return rows[:, None], torch.arange(10) if name.startswith("stages.stem.") else channels


def sliced(w: Weights, channels: Tensor) -> Weights:
    """W_l, the hidden channels given of every layer."""
    return {n: t[grid(n, channels, torch.arange(4))] for n, t in w.items()}


def local(run: Run, k: int, w: Weights, r: float, mask: bool) -> Weights:
    """A client's weights after three clipped steps."""
    x, y = run.clients[k].x, run.clients[k].y
    absent = ~torch.isin(torch.arange(4), y)

    def loss(w: Weights) -> Tensor:
        h = x
        for stage in ("stages.stem.0", "stages.hidden1.0"):
            h = ((h @ w[f"{stage}.weight"].T + w[f"{stage}.bias"]) / r).clamp(min=0)
        z = h @ w["head.weight"].T + w["head.bias"]
        return cross_entropy(torch.where(absent, 0.0, z) if mask else z, y)

    for _ in range(3):
        g = gradient(loss, w)
        norm = torch.stack([t.square().sum() for t in g.values()]).sum().sqrt()
        shrunk = min(1.0, CLIP / (float(norm) + 1e-6))  # torch adds this constant
        w = {n: w[n] - 0.1 * shrunk * g[n] for n in w}
    return w


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    levels = tuple(RATES.values())
    for what, method, mask, left_out in (
        ("by capacity", HeteroFL(TRAINING, levels=levels), True, 0.0),
        ("without the mask", HeteroFL(TRAINING, levels=levels, mask=False), False, 0.0),
        ("drawn levels", HeteroFL(TRAINING, levels=levels, assignment="dynamic"), True, 0.0),
        ("a level left out", HeteroFL(TRAINING, levels=levels, leave_out=(0.5,)), True, 0.5),
    ):
        run = played(method, 4, cohorts=COHORTS, federation=federation())
        weights, models = reference(run, leading, mask=mask, left_out=left_out)
        yield f"weights of four rounds, {what}", gap([s.weights for s in run.states], weights)
        if what == "by capacity":
            yield "every client's slice in four rounds", gap(run.models, models)
