"""HeteroFL, from eq. 1 to 3, sections 4.1 and 4.2 and Algorithm 1 of Diao, Ding, Tarokh (ICLR 2021).

No code was read. As the method's departures say, a gradient's norm is limited as in the authors' code, levels go by
capacity, drawn ones are read from the messages, some may not count, and the cohort measures the statistics of static
BatchNorm, here each client in one batch, and a client those of its slice. The scaler divides what leaves each hidden
layer, before its norm, if it has one, and its ReLU.
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


def federation(batchnorm: bool = False) -> Federation:
    """Three clients of these rates, with some classes of four, and one network."""
    whole = toy_federation(World(clients=3, architectures=1, labels=3, width=K, batchnorm=batchnorm))
    return replace(whole, sites={k: replace(site, capacity=RATES[k]) for k, site in whole.sites.items()})


def leading(number: int, r: float) -> Tensor:
    """The hidden channels of rate r, the same in every round."""
    return torch.arange(ceil(r * K))


def reference(
    run: Run, window: Window, *, mask: bool = True, left_out: float = 0.0
) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """W_g with its statistics before the first round and after each, and every client's slice for inference."""
    begin = without_counts(run.start["toy1"])
    w = {n: t for n, t in begin.items() if ".running_" not in n}
    found, models = [begin], list[dict[int, Weights]]()
    for number, cohort in enumerate(COHORTS, 1):
        total, count = ({n: torch.zeros_like(t) for n, t in w.items()} for _ in range(2))
        for k in cohort:
            r = float(run.sent["local_update"][number - 1][k]["rate"])
            trained, Y_k = local(run, k, sliced(w, window(number, r)), r, mask), run.clients[k].y.unique()
            for n in w if r != left_out else ():
                at = grid(n, window(number, r), Y_k)
                total[n][at] += trained[n][Y_k] if n.startswith("head.") else trained[n]
                count[n][at] += 1
        w = {n: torch.where(count[n] > 0, total[n] / count[n].clamp(min=1), w[n]) for n in w}
        measured = [passed(w, run.clients[k].x)[1] for k in cohort]
        found.append({**w, **{n: torch.stack([m[n] for m in measured]).mean(0) for n in measured[0]}})
        slices = {k: sliced(w, window(number, RATES[k])) for k in run.clients}
        models.append({k: {**w_l, **passed(w_l, run.clients[k].x)[1]} for k, w_l in slices.items()})
    return found, models


def without_counts(tensors: Weights) -> Weights:
    """All but how many batches BatchNorm has seen."""
    return {n: t for n, t in tensors.items() if not n.endswith("num_batches_tracked")}


def grid(name: str, channels: Tensor, classes: Tensor) -> tuple[Tensor, ...]:
    """The rows and columns of a tensor that belong to these hidden channels, or classes."""
    rows = classes if name.startswith("head.") else channels
    if name.endswith("bias") or ".1." in name:
        return (rows,)
    return rows[:, None], torch.arange(10) if name.startswith("stages.stem.") else channels


def sliced(w: Weights, channels: Tensor) -> Weights:
    """W_l, the hidden channels given of every layer."""
    return {n: t[grid(n, channels, torch.arange(4))] for n, t in w.items()}


def passed(w: Weights, x: Tensor, r: float = 1.0) -> tuple[Tensor, Weights]:
    """Logits, and the statistics of the batch: means and unbiased variances."""
    seen: Weights = {}
    for stage in ("stages.stem", "stages.hidden1"):
        x = (x @ w[f"{stage}.0.weight"].T + w[f"{stage}.0.bias"]) / r
        if (norm := f"{stage}.1") + ".weight" in w:
            mean, var = x.mean(0), ((x - x.mean(0)) ** 2).mean(0)
            seen |= {f"{norm}.running_mean": mean, f"{norm}.running_var": var * len(x) / (len(x) - 1)}
            x = w[f"{norm}.weight"] * (x - mean) / (var + 1e-5).sqrt() + w[f"{norm}.bias"]
        x = x.clamp(min=0)
    return x @ w["head.weight"].T + w["head.bias"], seen


def local(run: Run, k: int, w: Weights, r: float, mask: bool) -> Weights:
    """A client's weights after three clipped steps."""
    x, y = run.clients[k].x, run.clients[k].y
    absent = ~torch.isin(torch.arange(4), y)

    def loss(w: Weights) -> Tensor:
        z, _ = passed(w, x, r)
        return cross_entropy(torch.where(absent, 0.0, z) if mask else z, y)

    for _ in range(3):
        g = gradient(loss, w)
        norm = torch.stack([t.square().sum() for t in g.values()]).sum().sqrt()
        shrunk = min(1.0, CLIP / (float(norm) + 1e-6))  # torch adds this constant
        w = {n: w[n] - 0.1 * shrunk * g[n] for n in w}
    return w


def compared(run: Run, expected: tuple[list[Weights], list[dict[int, Weights]]]) -> tuple[float, float]:
    """The largest differences of the server's weights and statistics, and of the clients' networks."""
    ours = [without_counts({**s.weights, **s.statistics}) for s in run.states]
    models = [{k: without_counts(w) for k, w in of_round.items()} for of_round in run.models]
    return gap(ours, expected[0]), gap(models, expected[1])


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    method = HeteroFL(TRAINING, levels=tuple(RATES.values()))
    for what, changes, mask, left_out in (
        ("by capacity", {}, True, 0.0),
        ("static BatchNorm", {}, True, 0.0),
        ("without the mask", {"mask": False}, False, 0.0),
        ("drawn levels", {"assignment": "dynamic"}, True, 0.0),
        ("a level left out", {"leave_out": (0.5,)}, True, 0.5),
    ):
        made = federation(batchnorm=what == "static BatchNorm")
        run = played(replace(method, **changes), 4, cohorts=COHORTS, federation=made)
        weights, models = compared(run, reference(run, leading, mask=mask, left_out=left_out))
        yield f"weights of four rounds, {what}", weights
        yield f"every client's slice in four rounds, {what}", models
