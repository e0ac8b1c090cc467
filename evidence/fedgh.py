"""FedGH, from Algorithm 1 of Yi et al. (ACM MM 2023): the server's header learns clients' mean features by class.

No code was read. The header takes a step for each mean, as in the paper, in the order that the engine draws (a
departure) from the key of the server's training; all means at once are tried besides. Departures, too, are that clients
begin with the server's first header, and that the newest is evaluated.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, features, gap, logits, played
from potluck.core.ground.rng import fold_in
from potluck.methods.fedgh import FedGH
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1]]
EPOCHS = 3


def reference(run: Run, singly: bool, adopted: bool) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """Theta before the first round and after each, and every client's network for inference after each."""
    own = {k: run.start[data.architecture] for k, data in run.clients.items()}
    theta: Weights = {f"head.{n}": w for n, w in run.states[0].head.items()}
    found, models = [theta], list[dict[int, Weights]]()
    for number, cohort in enumerate(COHORTS, 1):
        R: list[Tensor] = []
        s: list[int] = []
        for k in cohort:
            x, y = run.clients[k].x, run.clients[k].y
            start = {**own[k], **theta} if adopted else own[k]
            own[k] = descended(lambda w, x=x, y=y: cross_entropy(logits(w, x), y), start)
            for label in y.unique().tolist():
                R.append(features(own[k], x)[y == label].mean(0))
                s.append(label)
        theta = taught(theta, torch.stack(R), torch.tensor(s), number, singly)
        found.append(theta)
        models.append({k: {**w, **theta} if adopted else w for k, w in own.items()})
    return found, models


def taught(theta: Weights, R: Tensor, s: Tensor, number: int, singly: bool) -> Weights:
    """The header after some passes over the means."""
    key = fold_in(0, "server", number).fold("fit", 1).fold("order")
    for epoch in range(EPOCHS):
        order = torch.randperm(len(s), generator=key.fold(epoch).generator())
        for rows in order.split(1 if singly else len(s)):
            theta = descended(lambda w, i=rows: cross_entropy(logits(w, R[i]), s[i]), theta, 1)
    return theta


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, singly, adopted in (
        ("a step for each mean", True, True),
        ("all means at once", False, True),
        ("own heads", True, False),
    ):
        server = replace(SGD, batch_size=1) if singly else SGD
        run = played(FedGH(SGD, server, adopted), 4, World(clients=3, labels=3), COHORTS)
        headers, models = reference(run, singly, adopted)
        ours = [{f"head.{n}": w for n, w in state.head.items()} for state in run.states]
        yield f"the header of four rounds, {what}", gap(ours, headers)
        yield f"every client's network in four rounds, {what}", gap(run.models, models)
