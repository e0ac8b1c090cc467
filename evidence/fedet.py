"""Fed-ET, from the weighted consensus and the diversity of Cho et al. (IJCAI 2022), as others reconstructed them.

No code of the authors was read. As the method's departures say, confidence is the variance of raw logits, shares sum to
one, what travels are the heads, by a plain mean, and an example on which all agree has no s_div, or a uniform one. The
server has a network of its own, deeper than the clients'. Public rows are the engine's draw.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, owned, played
from potluck.core.ground.rng import fold_in
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedet import FedET
from potluck.parts.sharing import Sharing
from potluck.testing.worlds import CLASSES, World, toy_federation, toy_net

COHORTS = [[0, 1, 2], [0, 2], [1, 3], [0, 1, 2, 3]]
HEAD = ("head.weight", "head.bias")
LAMBDA, ROWS, ETA_S, TAU_S = 0.5, 40, 0.2, 4


def reference(
    run: Run, travels: bool, uniform: bool, layers: bool, by_examples: bool
) -> tuple[list[dict[str, Weights]], list[Weights]]:
    """The prototypes, each whole, and theta_s, before the first round and after each."""
    w = {data.architecture: run.start[data.architecture] for data in run.clients.values()}
    if layers:  # from the deepest network, as prototypes share what they have in common
        w = {u: owned(max(w.values(), key=len), one) for u, one in w.items()}
    theta_s, public = run.start["large"], run.federation.public
    found, larges = [w], [theta_s]
    for t, cohort in enumerate(COHORTS, start=1):
        rows = torch.randperm(len(public), generator=fold_in(0, "server", t).generator())[:ROWS]
        x = public.batch(rows).inputs.double()
        trained: dict[int, Weights] = {}
        for k in cohort:
            data = run.clients[k]
            trained[k] = descended(partial(supervised, data.x, data.y), w[data.architecture])
        if travels:
            heads = [{n: trained[k][n] for n in HEAD} for k in cohort]
            theta_s = mean_by_layer(heads, [1.0] * len(heads), theta_s)
        y, s_div = consensus(torch.stack([logits(trained[k], x) for k in cohort]), uniform)
        theta_s = descended(partial(transfer, x, y, s_div), theta_s, TAU_S, ETA_S)
        w = averaged(run, w, trained, layers, by_examples)
        if travels:
            w = {u: one | {n: theta_s[n] for n in HEAD} for u, one in w.items()}
        found.append(w)
        larges.append(theta_s)
    return found, larges


def supervised(x: Tensor, y: Tensor, v: Weights) -> Tensor:
    """A client's loss."""
    return cross_entropy(logits(v, x), y)


def averaged(
    run: Run, w: dict[str, Weights], trained: dict[int, Weights], layers: bool, by_examples: bool
) -> dict[str, Weights]:
    """The prototypes: means over the clients of an architecture, or, layer by layer, over those with the layer."""
    found: dict[str, Weights] = {}
    for u in w:
        mine = [k for k in trained if layers or run.clients[k].architecture == u]
        shares = [float(run.clients[k].n) if by_examples else 1.0 for k in mine]
        found[u] = owned(mean_by_layer([trained[k] for k in mine], shares, w[u]), w[u])
    return found


def consensus(s: Tensor, uniform: bool) -> tuple[Tensor, list[Tensor | None]]:
    """Of the clients' logits (clients, rows, classes) y(x), and softmax s_div(x), None where nobody disagrees."""
    v = ((s - s.mean(2, keepdim=True)) ** 2).mean(2)
    alpha = v / v.sum(0)
    y = (alpha[:, :, None] * s).sum(0).argmax(1)
    divergent: list[Tensor | None] = []
    for j in range(s.shape[1]):
        others = [k for k in range(len(s)) if int(s[k, j].argmax()) != int(y[j])]
        if others:
            s_div = sum((v[k, j] * s[k, j] for k in others), torch.zeros(())) / sum(v[k, j] for k in others)
            divergent.append(torch.softmax(s_div, 0))
        else:
            divergent.append(torch.full((CLASSES,), 1 / CLASSES) if uniform else None)
    return y, divergent


def transfer(x: Tensor, y: Tensor, s_div: list[Tensor | None], theta_s: Weights) -> Tensor:
    """Cross-entropy to y + lambda KL(softmax s_div || net), a mean over all rows."""
    log_p = F.log_softmax(logits(theta_s, x), 1)
    apart = [(q * (q.log() - log_p[j])).sum() for j, q in enumerate(s_div) if q is not None]
    return -log_p[torch.arange(len(y)), y].mean() + LAMBDA * sum(apart, torch.zeros(())) / len(y)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    plain = toy_federation(World(clients=4, labels=2))
    large = {**plain.architectures, "large": partial(toy_net, 3, False)}
    federation = replace(plain, architectures=large, server_architecture="large")
    server = LocalTraining("sgd", lr=ETA_S, epochs=TAU_S, batch_size=10**6)
    for what, representation, unanimous, sharing in (
        ("by architecture", "head", "skip", Sharing("architecture", "uniform")),
        ("uniform s_div, by examples", "head", "uniform", Sharing("architecture", "samples")),
        ("layer by layer, no head travels", "none", "skip", Sharing("layer", "uniform")),
    ):
        method = FedET(SGD, server, ROWS, LAMBDA, unanimous, representation, sharing)
        run = played(method, len(COHORTS), cohorts=COHORTS, federation=federation)
        layers, by_examples = sharing.scope == "layer", sharing.weighting == "samples"
        w, theta_s = reference(run, representation == "head", unanimous == "uniform", layers, by_examples)
        pools = [state.weights for state in run.states]
        found = [{u: owned(pool["all" if layers else u], one) for u, one in w[0].items()} for pool in pools]
        yield f"prototypes of four rounds, {what}", gap(found, w)
        yield f"theta_s of four rounds, {what}", gap([state.common for state in run.states], theta_s)
