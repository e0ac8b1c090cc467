"""FedTGP, from the losses of clients and server and the adaptive margin of Zhang, Liu, Hua, Cao (AAAI 2024).

No code was read. The paper's margin is the largest distance between two classes' mean prototypes; the authors' code
settles, as the method's departures say, that of distances to the nearest other class. Departures, too, are that a class
nobody has reported is not sent, and that prototypes are of the trained model. The first weights of theta_F are those of
the method's first state; the server takes three steps with all of a round's prototypes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, features, gap, logits, played
from potluck.methods.fedtgp import FedTGP
from potluck.testing.worlds import World

COHORTS = [[0], [0, 2], [1, 2], [0, 1]]
LAMBDA, CLASSES = 0.6, 4
Found = tuple[list[Weights], list[dict[int, Tensor]], list[dict[int, Weights]]]


def reference(run: Run, margin: str, tau: float) -> Found:
    """After each round theta_F, the prototypes P of known classes, and every client's weights."""
    own = {k: run.start[data.architecture] for k, data in run.clients.items()}
    theta_F, P = dict(run.states[0].network), dict[int, Tensor]()
    networks, prototypes, models = list[Weights](), list[dict[int, Tensor]](), list[dict[int, Weights]]()
    for cohort in COHORTS:
        p: list[Tensor] = []
        c: list[int] = []
        for k in cohort:
            own[k] = local(run, k, own[k], P)
            h, y = features(own[k], run.clients[k].x), run.clients[k].y
            for label in y.unique().tolist():
                p.append(h[y == label].mean(0))
                c.append(label)
        rows, labels = torch.stack(p), torch.tensor(c)
        m = min(tau, asked(rows, labels, margin))
        theta_F = descended(lambda v, p=rows, c=labels, m=m: contrastive(made(v), p, c, m), theta_F)
        P = {label: made(theta_F)[label] for label in sorted({*P, *c})}
        networks.append(theta_F)
        prototypes.append(P)
        models.append(dict(own))
    return networks, prototypes, models


def local(run: Run, k: int, w: Weights, P: dict[int, Tensor]) -> Weights:
    """A client's weights after three steps."""
    x, y = run.clients[k].x, run.clients[k].y
    has = torch.tensor([c in P for c in y.tolist()])
    P_y = torch.stack([P.get(c, torch.zeros(16)) for c in y.tolist()])

    def loss(w: Weights) -> Tensor:
        gaps = (features(w, x) - P_y).square().mean(1) * has
        return cross_entropy(logits(w, x), y) + LAMBDA * gaps.mean()

    return descended(loss, w)


def made(theta_F: Weights) -> Tensor:
    """P_c = F(theta_c) of all classes."""
    hidden = theta_F["vectors.weight"] @ theta_F["layers.0.weight"].T + theta_F["layers.0.bias"]
    return hidden.clamp(min=0) @ theta_F["layers.2.weight"].T + theta_F["layers.2.bias"]


def asked(rows: Tensor, labels: Tensor, margin: str) -> float:
    """The margin before its limit, from the classes' mean prototypes Q."""
    Q = [rows[labels == c].mean(0) for c in labels.unique()]
    D = [[float((a - b).square().sum().sqrt()) for j, b in enumerate(Q) if j != i] for i, a in enumerate(Q)]
    if margin == "none":
        return 0.0
    return max(max(others) if margin == "farthest" else min(others) for others in D)


def contrastive(P: Tensor, rows: Tensor, labels: Tensor, m: float) -> Tensor:
    """The server's loss, the mean over this round's prototypes."""
    found = torch.zeros(())
    for p, c in zip(rows, labels.tolist(), strict=True):
        D = (p - P).square().sum(1).sqrt()
        own, others = (-D[c] - m).exp(), sum((-D[o]).exp() for o in range(CLASSES) if o != c)
        found = found - (own / (own + others)).log() / len(rows)
    return found


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    world = World(clients=3, labels=2)
    for what, margin, tau in (
        ("nearest", "nearest", 100.0),
        ("farthest", "farthest", 100.0),
        ("limited", "farthest", 0.3),
        ("no margin", "none", 100.0),
    ):
        run = played(FedTGP(SGD, SGD, LAMBDA, margin, tau, "head"), 4, world, COHORTS)
        networks, prototypes, models = reference(run, margin, tau)
        tables = [state.prototypes for state in run.states[1:]]
        found = [{int(c): t["means"][c] for c in t["known"].nonzero().flatten()} for t in tables]
        yield f"theta_F of four rounds, {what}", gap([s.network for s in run.states[1:]], networks)
        yield f"prototypes of four rounds, {what}", gap(found, prototypes)
        yield f"every client's weights in four rounds, {what}", gap(run.models, models)
