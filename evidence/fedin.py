"""FedIN, from eq. 4, 8, 13 and 14 and Algorithm 1 of Chan et al. (arXiv 2304.00759), averaged by layer and equally.

No code is published. What the server drew of its pairs, the batch S, is read from its messages; the rest follows from
the equations. A toy network's extractor is its first stage, the classifier its last layer. What clients upload is a
sample of their last step's features, whose rows are looked up among all of them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, gap, gradient, logits, mean_by_layer, owned, played
from potluck.methods.fedin import FedIN

COHORTS = [[0, 1, 2], [0, 2], [1, 2], [0, 1]]
MU, LAMBDA, LR, STEPS = 0.3, 1.4, 0.1, 3


def reference(run: Run, rule: str, outside: str, joint: bool) -> tuple[list[Weights], float]:
    """The server's weights before the first round and after each; how far uploads are from the nearest features."""
    w = dict(max(run.start.values(), key=len))
    found, off = [w], 0.0
    for number, cohort in enumerate(COHORTS):
        trained: list[Weights] = []
        for k in cohort:
            S = run.sent["local_update"][number][k].get("features")
            anchor = owned(w, run.start[run.clients[k].architecture])
            last, mine = local(run, k, anchor, S if joint else None, rule, outside)
            off = max(off, nearest(run.replied["local_update"][number][k]["features"], last, run.clients[k].x))
            if S and not joint:
                mine = descended_on(S, mine)
            trained.append(mine)
        w = mean_by_layer(trained, [1.0] * len(cohort), w)
        found.append(w)
    return found, off


def local(run: Run, k: int, anchor: Weights, S: Weights | None, rule: str, outside: str) -> tuple[Weights, Weights]:
    """The weights of the last step's forward pass, and those after it."""
    data, w, before = run.clients[k], anchor, anchor

    def l_local(v: Weights) -> Tensor:
        return cross_entropy(logits(v, data.x), data.y) + MU / 2 * sum(((v[n] - anchor[n]) ** 2).sum() for n in v)

    for _ in range(STEPS):
        before, g = w, gradient(l_local, w)
        step = g if S is None else reconciled(g, gradient(lambda v: l_in(v, S), w), rule, outside)
        w = {n: w[n] - LR * step[n] for n in w}
    return before, w


def intermediate(w: Weights, s_in: Tensor) -> Tensor:
    """The stages behind the first."""
    for name in [n.removesuffix(".0.weight") for n in w if n.startswith("stages.hidden") and n.endswith("0.weight")]:
        s_in = (s_in @ w[f"{name}.0.weight"].T + w[f"{name}.0.bias"]).clamp(min=0)
    return s_in


def l_in(w: Weights, S: Weights) -> Tensor:
    """Eq. 8."""
    return (intermediate(w, S["s_in"]) - S["s_out"]).square().mean()


def reconciled(g_local: Weights, g_in: Weights, rule: str, outside: str) -> Weights:
    """Z by eq. 14, or by eq. 13 for each tensor; G_IN is 0 outside the intermediate layers."""
    z: Weights = {}
    for n, g in g_local.items():
        inner, a, b = n.startswith("stages.hidden"), (g * g).sum(), (g * g_in[n]).sum()
        if rule == "exact":
            z[n] = g if not inner else g_in[n] - b / a * g if b < 0 and a > 0 else g_in[n]
        else:
            z[n] = g_in[n] + LAMBDA / 2 * g if inner or outside == "half" else g
    return z


def descended_on(S: Weights, w: Weights) -> Weights:
    """As many steps on the features alone, of the intermediate layers."""
    for _ in range(STEPS):
        g = gradient(lambda v: l_in(v, S), w)
        w = {n: w[n] - LR * g[n] for n in w}
    return w


def nearest(pairs: Weights, w: Weights, x: Tensor) -> float:
    """How far uploaded pairs are at most from the nearest that the weights make of the client's examples."""
    s_in = (x @ w["stages.stem.0.weight"].T + w["stages.stem.0.bias"]).clamp(min=0)
    rows = torch.cat([s_in, intermediate(w, s_in)], 1)
    gaps = torch.cat([pairs["s_in"], pairs["s_out"]], 1)[:, None] - rows
    return float(gaps.abs().amax(2).amin(1).max())


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, rule, outside, optimization in (
        ("simplified rule", "simplified", "half", "joint"),
        ("simplified rule inside alone", "simplified", "unit", "joint"),
        ("exact rule", "exact", "half", "joint"),
        ("without optimisation", "simplified", "half", "sequential"),
    ):
        method = FedIN(
            SGD, mu=MU, multiplier=LAMBDA, rule=rule, outside=outside, optimization=optimization, feature_batch=8
        )
        run = played(method, 4, cohorts=COHORTS)
        weights, off = reference(run, rule, outside, optimization == "joint")
        yield f"weights of four rounds, {what}", gap([s.weights["all"] for s in run.states], weights)
        yield f"uploaded pairs, {what}", off
