"""Velo, from the authors' published code as the method's departures describe it: the first pages have no equations.

The server fits a conditional VAE to all features that were ever reported, with MSE(h, decoded u) + KL, and decodes one
draw of u for each class. A client takes these as Felo takes averages ("target"), or feeds them to the layers behind the
stem ("replay"). The noise, the VAE's first weights and the order of its examples are those that the engine drew.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from evidence.ground import Run, Weights, cross_entropy, descended, features, gap, logits, played
from potluck.core.ground.rng import fold_in
from potluck.core.nets.weights import weights_of
from potluck.core.requests.fit import LocalTraining
from potluck.engine.client.costs import Costs
from potluck.engine.numerics.costs import Cost
from potluck.methods.velo import Velo
from potluck.parts.cvae import VAELoss
from potluck.testing.worlds import CLASSES, World

# A part of the 64 examples of client 3 has a class that is known, of all others all or none: the method has alpha and
# this share, of weights in replay, in single precision, where neither is rounded.
COHORTS = [[0, 1], [0, 3], [1, 2]]
SGD = LocalTraining("sgd", lr=0.1, epochs=3, batch_size=10**6)
ALPHA, WIDTH, VAE_STEPS, VAE_LR = 0.5, 16, 4, 0.1
Table = dict[int, Tensor]


@contextmanager
def drawn() -> Iterator[list[tuple[Weights, Tensor, Tensor]]]:
    """Inside the block, for each step of a VAE are kept its weights before, its features in order, and the noise."""
    plain, noise, steps = VAELoss.__call__, torch.randn_like, list[tuple[Weights, Tensor, Tensor]]()
    counting = Costs.of  # runs an objective once more, for what it takes

    def listening(self: VAELoss, net: Any, batch: Any, extras: Any) -> Tensor:
        weights, kept = {n: t.clone() for n, t in weights_of(net).items() if t.is_floating_point()}, list[Tensor]()
        torch.randn_like = lambda like: kept.append(noise(like)) or kept[-1]
        loss = plain(self, net, batch, extras)
        torch.randn_like = noise
        steps.append((weights, batch.inputs.clone(), kept[0]))
        return loss

    VAELoss.__call__ = listening
    Costs.of = lambda self, request: Cost()
    try:
        yield steps
    finally:
        VAELoss.__call__ = plain
        Costs.of = counting


def reference(
    run: Run, steps: list[Any], replay: bool, kl: tuple[float, str]
) -> tuple[list[Table], list[dict[int, Weights]]]:
    """H as it is sent in each round, and every client's weights after it."""
    own = {k: run.start[data.architecture] for k, data in run.clients.items()}
    reports: list[tuple[int, Tensor]] = []  # class, mean logits
    h, y = torch.zeros(0, WIDTH), torch.zeros(0, dtype=torch.int64)
    vae, left = steps[0][0], iter(steps)
    sent, models = list[Table](), list[dict[int, Weights]]()
    for number, cohort in enumerate(COHORTS, start=1):
        H, Z = {}, {}
        if number > 1:
            u = torch.randn(CLASSES, WIDTH, generator=fold_in(0, "server", number).generator())
            H = {c: decoded(vae, u, torch.arange(CLASSES))[c] for c in y.unique().tolist()}
            Z = {c: torch.stack([z for of, z in reports if of == c]).mean(0) for c in H}
        sent.append(H)
        for k in cohort:
            data = run.clients[k]
            before = local(run, k, own[k], H, Z, replay, 2)
            h = torch.cat([h, stem(before, data.x) if replay else features(before, data.x)])
            y, z = torch.cat([y, data.y]), logits(before, data.x)
            reports += [(c, z[data.y == c].mean(0)) for c in data.y.unique().tolist()]
            own[k] = local(run, k, before, H, Z, replay, 1)
        for _ in range(VAE_STEPS):
            _, seen, noise = next(left)
            order = torch.cdist(seen, h).argmin(1)
            vae = descended(lambda v, h=h[order], y=y[order], e=noise: elbo(v, h, y, e, *kl), vae, 1, VAE_LR)
        models.append(dict(own))
    return sent, models


def decoded(v: Weights, u: Tensor, y: Tensor) -> Tensor:
    """Features of a class: two linear layers."""
    code = torch.cat([u, v["label.weight"][y]], 1)
    return (code @ v["decoder.0.weight"].T + v["decoder.0.bias"]) @ v["decoder.1.weight"].T + v["decoder.1.bias"]


def elbo(v: Weights, h: Tensor, y: Tensor, noise: Tensor, beta: float, of: str) -> Tensor:
    """The VAE's loss: a layer with BatchNorm and ReLU, and one to m and s, of which u is drawn."""
    a = torch.cat([h, v["label.weight"][y]], 1) @ v["encoder.0.weight"].T + v["encoder.0.bias"]
    a = (a - a.mean(0)) / (a.var(0, unbiased=False) + 1e-5).sqrt() * v["encoder.1.weight"] + v["encoder.1.bias"]
    m, s = (a.clamp(min=0) @ v["encoder.3.weight"].T + v["encoder.3.bias"]).split(WIDTH, 1)
    kl = -(1 + s - m**2 - s.exp()) / 2
    gaps = decoded(v, m + (s / 2).exp() * noise, y) - h
    return (gaps**2).mean() + beta * (kl.sum() if of == "sum" else kl.mean())


def stem(w: Weights, x: Tensor) -> Tensor:
    """What the first stage puts out."""
    return (x @ w["stages.stem.0.weight"].T + w["stages.stem.0.bias"]).clamp(min=0)


def local(run: Run, k: int, w: Weights, H: Table, Z: Table, replay: bool, steps: int) -> Weights:
    """A client's weights after some steps."""
    data = run.clients[k]
    known = [i for i, c in enumerate(data.y.tolist()) if c in H]

    def gaps(values: Tensor, table: Table, rows: list[int]) -> Tensor:
        """The sum of the mean squared differences to what is known of the classes."""
        found = [(v - table[c]).square().mean() for v, c in zip(values, data.y[rows].tolist(), strict=True)]
        return torch.stack(found).sum() if found else torch.zeros(())

    def loss(w: Weights) -> Tensor:
        z = logits(w, data.x)
        task, to_z = cross_entropy(z, data.y), gaps(z[known], Z, known) / data.n
        if not replay:
            return task + ALPHA * (gaps(features(w, data.x)[known], H, known) / data.n + to_z)
        if not known:
            return task + ALPHA * to_z
        behind = {n: t for n, t in w.items() if "stem" not in n}
        again, share = logits(behind, torch.stack([H[c] for c in data.y[known].tolist()])), len(known) / data.n
        taught = cross_entropy(again, data.y[known]) + gaps(again, Z, known) / len(known)
        return (1 - ALPHA * share) * task + ALPHA * (share * taught + to_z)

    return descended(loss, w, steps)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    vae = LocalTraining("sgd", lr=VAE_LR, epochs=VAE_STEPS, batch_size=10**6)
    world = World(clients=4, labels=2)
    for what, use, beta, of in (
        ("target", "target", 0.7, "mean"),
        ("replay", "replay", 0.7, "mean"),
        ("summed KL", "target", 0.0005, "sum"),
    ):
        with drawn() as steps:
            method = Velo(SGD, vae, use=use, alpha=ALPHA, kl_weight=beta, kl_reduction=of)
            run = played(method, world=world, cohorts=COHORTS)
        H, models = reference(run, steps, use == "replay", (beta, of))
        tables = [next(iter(messages.values())).get("features") for messages in run.sent["local_update"]]
        ours = [{} if t is None else {int(c): t["means"][c] for c in t["known"].nonzero().flatten()} for t in tables]
        yield f"H in three rounds, {what}", gap(ours, H)
        yield f"every client's weights, {what}", gap(run.models, models)
