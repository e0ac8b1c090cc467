"""FedRE, from the entangled representations of Yao et al. (CVPR 2026).

No code of the authors was read. As the method's departures say, clients take over the server's head before they train
and are evaluated with it, unless they do not adopt it, as in the released code. The weights w, and the order in which
the server takes its steps, are the engine's draws.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, features, gap, logits, played
from potluck.core.ground.rng import fold_in
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedre import FedRE
from potluck.testing.worlds import CLASSES, World

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
ETA_S, EPOCHS = 0.2, 2


def reference(run: Run, batch: int, adopt: bool) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """The server's head before the first round and after each, and every client's model after each."""
    f = {k: run.start[data.architecture] for k, data in run.clients.items()}
    theta = {name: f[0][f"head.{name}"] for name in ("weight", "bias")}
    found, models = [theta], list[dict[int, Weights]]()
    for t, cohort in enumerate(COHORTS, start=1):
        r, y = list[Tensor](), list[Tensor]()
        for k in cohort:
            data = run.clients[k]
            f[k] = descended(partial(supervised, data.x, data.y), with_head(f[k], theta) if adopt else f[k])
            w = mixture(data.y, fold_in(0, "client", t, 1, k).fold("client").generator())
            h = features(f[k], data.x)
            r.append(sum((w[c] * h[data.y == c].mean(0) for c in data.y.unique()), torch.zeros(())))
            y.append(w)
        key = fold_in(0, "server", t).fold("fit", 1, "order")
        for epoch in range(EPOCHS):
            for rows in torch.randperm(len(cohort), generator=key.fold(epoch).generator()).split(batch):
                loss = partial(of_head, torch.stack(r)[rows], torch.stack(y)[rows])
                theta = descended(loss, theta, 1, ETA_S)
        found.append(theta)
        models.append({k: with_head(own, theta) if adopt else own for k, own in f.items()})
    return found, models


def supervised(x: Tensor, y: Tensor, v: Weights) -> Tensor:
    """A client's loss."""
    return cross_entropy(logits(v, x), y)


def of_head(r: Tensor, y: Tensor, theta: Weights) -> Tensor:
    """The server's loss: cross-entropy to the shares of the classes."""
    return -(y * F.log_softmax(r @ theta["weight"].T + theta["bias"], 1)).sum(1).mean()


def mixture(y: Tensor, draws: torch.Generator) -> Tensor:
    """w: u / sum u for the classes that occur, and 0 for others."""
    u, w = 1 - torch.rand(len(y.unique()), generator=draws), torch.zeros(CLASSES)
    w[y.unique()] = u / u.sum()
    return w


def with_head(f: Weights, theta: Weights) -> Weights:
    """A network with the server's head."""
    return f | {f"head.{name}": tensor for name, tensor in theta.items()}


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, batch, adopt in (
        ("a step for each client", 1, True),
        ("two clients a step", 2, True),
        ("heads not adopted", 1, False),
    ):
        server = LocalTraining("sgd", lr=ETA_S, epochs=EPOCHS, batch_size=batch)
        run = played(FedRE(SGD, server, adopt), 4, World(clients=3, labels=3), COHORTS)
        theta, models = reference(run, batch, adopt)
        yield f"the server's head in four rounds, {what}", gap([state.head for state in run.states], theta)
        yield f"every client's model, {what}", gap(run.models, models)
