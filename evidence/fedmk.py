"""FedMK, from the parts that Liu, Yu, Zhou (ICLR 2023) name and the equations that the method gives them.

Of the paper only the first pages were read, and no code is published. The two minimisations, an example's weight, what
a client begins with and the losses are those of the method's departures; G's layers were read in the method's parts.
Noise, orders of batches, and whose meta knowledge a client begins with are drawn here as by the engine, and G begins as
the engine drew it.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, gradient, logits, played
from potluck.core.ground.rng import Key, fold_in, isolated
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedmk import FedMK
from potluck.testing.worlds import CLASSES, World

COHORTS = [[0, 1], [0, 2], [0, 1, 2]]
SPEED, STEPS, PER_CLASS, INNER_LR = 20.0, 3, 2, 0.2
MODELS, GENERATOR = (0.2, 3), (0.3, 2)  # rates and numbers of steps
NOISE, WIDTH = 5, 3
Knowledge = tuple[Tensor, Tensor]


def reference(run: Run, method: FedMK) -> tuple[list[dict[str, Weights]], list[Weights], list[dict[int, Tensor]]]:
    """The server's models and G before the first round and after each, and the inputs that clients have sent."""
    w, G, sent = dict(run.start), run.states[0].generator, dict[int, Knowledge]()
    found = [dict(w)], [G], list[dict[int, Tensor]]()
    for t, cohort in enumerate(COHORTS, start=1):
        draws, replies = fold_in(0, "server", t).generator(), dict[int, Knowledge]()
        for k in cohort:
            begun = initial(run, k, t, sent, draws, method.initial == "shared")
            replies[k] = condensed(run, k, w[run.clients[k].architecture], *begun, method)
        x, y = (torch.cat([reply[part] for reply in replies.values()]) for part in (0, 1))
        pseudo, key = method.pseudo if sent else 0.0, fold_in(0, "server", t)
        for place, p in enumerate(sorted(w), start=1):
            for labels, u in noisy(key.fold("fit", place), y, MODELS[1]):
                made = generated(G, u, labels)[0] if pseudo else x
                loss = partial(learnt, x=x, y=y, made=made, labels=labels, pseudo=pseudo)
                w[p] = descended(loss, w[p], 1, MODELS[0])
        G = trained(G, list(w.values()), noisy(key.fold("fit", len(w) + 1), y, GENERATOR[1]), method.diversity)
        sent |= replies
        found[0].append(dict(w))
        found[1].append(G)
        found[2].append({k: one[0] for k, one in sent.items()})
    return found


def initial(run: Run, k: int, t: int, sent: dict[int, Knowledge], draws: torch.Generator, shared: bool) -> Knowledge:
    """What a client begins with: of each class another's inputs, or its own last ones, or noise."""
    y = run.clients[k].y.unique().repeat_interleave(PER_CLASS)
    x = torch.randn(len(y), run.clients[k].x.shape[1], generator=fold_in(0, "client", t, 1, k, "client").generator())
    for c in range(CLASSES) if shared else ():
        having = [i for i in sorted(sent) if c in sent[i][1]]
        holders = [i for i in having if i != k] or having
        if holders:
            inputs, labels = sent[holders[int(torch.randint(len(holders), (1,), generator=draws))]]
            if c in y:
                x[y == c] = inputs[labels == c]
    return x, y


def condensed(run: Run, k: int, w: Weights, x: Tensor, y: Tensor, method: FedMK) -> Knowledge:
    """D' after steps down the weighted loss of D at w, through the steps that w makes on D'."""
    data = run.clients[k]
    for _ in range(STEPS):
        leaf, v = x.clone().requires_grad_(), {n: p.clone().requires_grad_() for n, p in w.items()}
        for _ in range(method.inner_steps):
            g = torch.autograd.grad(cross_entropy(logits(v, leaf), y), list(v.values()), create_graph=True)
            v = {n: p - INNER_LR * g_n for (n, p), g_n in zip(v.items(), g, strict=True)}
        loss = -F.log_softmax(logits(v, data.x), 1)[torch.arange(data.n), data.y]
        shares = 2 / (1 + torch.exp(method.smoothing * loss.detach()))
        x = x - SPEED * 0.1 * torch.autograd.grad((shares * loss).mean(), leaf)[0]
        w = {n: p.detach() for n, p in v.items()}
    return x, y


def noisy(key: Key, y: Tensor, steps: int) -> list[Knowledge]:
    """For each step on the server all labels in the order of its batch, and as many rows of noise."""
    order = [y[torch.randperm(len(y), generator=key.fold("order").fold(i).generator())] for i in range(steps)]
    with isolated(key.fold("forward")):
        return [(labels, torch.randn(len(y), NOISE)) for labels in order]


def learnt(v: Weights, x: Tensor, y: Tensor, made: Tensor, labels: Tensor, pseudo: float) -> Tensor:
    """A model's loss on uploads and on what G makes."""
    return cross_entropy(logits(v, x), y) + pseudo * cross_entropy(logits(v, made), labels)


def generated(G: Weights, u: Tensor, y: Tensor, training: bool = False) -> tuple[Tensor, Weights]:
    """What G makes of noise and labels, and its running statistics, which it uses unless it is training."""
    h, now = torch.cat([u, F.one_hot(y, CLASSES).to(u)], 1), Weights()
    for linear, norm in (("layers.layers.0", "layers.layers.1"), ("layers.layers.3", "layers.layers.4")):
        h = h @ G[f"{linear}.weight"].T + G[f"{linear}.bias"]
        m, s = G[f"{norm}.running_mean"], G[f"{norm}.running_var"]
        now[f"{norm}.running_mean"] = 0.9 * m + 0.1 * h.mean(0).detach()
        now[f"{norm}.running_var"] = 0.9 * s + 0.1 * h.var(0).detach()
        m, s = (h.mean(0), h.var(0, correction=0)) if training else (m, s)
        h = (h - m) / (s + 1e-5).sqrt()
        if f"{norm}.weight" in G:
            h = h * G[f"{norm}.weight"] + G[f"{norm}.bias"]
            h = torch.where(h > 0, h, 0.2 * h)
    return h, now


def trained(G: Weights, models: list[Weights], batches: list[Knowledge], diversity: float) -> Weights:
    """G after steps towards inputs that the models recognise, and that differ where their noise does."""

    def loss(v: Weights, y: Tensor, u: Tensor) -> Tensor:
        x, _ = generated({**G, **v}, u, y, training=True)
        apart = (x[:, None] - x).abs().mean(2) * ((u[:, None] - u) ** 2).mean(2)
        missed = sum((cross_entropy(logits(w, x), y) for w in models), torch.zeros(()))
        return missed / len(models) + diversity * torch.exp(-apart.mean())

    for y, u in batches:
        _, running = generated(G, u, y, training=True)
        own = {n: t for n, t in G.items() if "running" not in n and t.is_floating_point()}
        g = gradient(lambda v, y=y, u=u: loss(v, y, u), own)
        G = {**G, **{n: own[n] - GENERATOR[0] * g[n] for n in own}, **running}
    return G


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    server, generator = (LocalTraining("sgd", lr=lr, epochs=n, batch_size=10**6) for lr, n in (MODELS, GENERATOR))
    default = FedMK(
        SGD, server, generator, speed=SPEED, per_class=PER_CLASS, inner_lr=INNER_LR, noise=NOISE, width=WIDTH
    )
    noise = {"initial": "noise", "inner_steps": 2, "smoothing": 0.0, "pseudo": 0.5, "diversity": 0.2}
    for what, method in (
        ("shared", default),
        ("noise, two inner steps, equal weights", replace(default, **noise)),
        ("without a generator", replace(default, pseudo=0.0)),
    ):
        run = played(method, world=World(clients=3, labels=2), cohorts=COHORTS)
        w, G, x = reference(run, method)
        yield f"the server's models in three rounds, {what}", gap([s.weights for s in run.states], w)
        floats = [{n: t for n, t in s.generator.items() if t.is_floating_point()} for s in run.states]
        theirs = [{n: t for n, t in g.items() if t.is_floating_point()} for g in G]
        yield f"G of three rounds, {what}", gap(floats, theirs)
        inputs = [{int(k): one["inputs"] for k, one in s.knowledge.items()} for s in run.states[1:]]
        yield f"meta knowledge, {what}", gap(inputs, x)
