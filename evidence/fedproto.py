"""FedProto, from eq. 6 to 8 and Algorithm 1 of Tan et al. (AAAI 2022).

The authors' code settles, as the method's departures say, that averages are plain means over clients and that what is
reported is of the last local epoch's forward passes; the paper's distance, the sum over classes of L2 norms of gaps of
a batch's prototypes, is tried besides the code's mean squared gap of each example's features.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, features, gap, logits, played
from potluck.methods.fedproto import FedProto

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1]]
LAMBDA = 0.6
Prototypes = dict[int, Tensor]


def reference(run: Run, distance: str) -> tuple[list[Prototypes], list[dict[int, Weights]]]:
    """The averages by class after each round, and every client's weights."""
    own = {k: run.start[data.architecture] for k, data in run.clients.items()}
    known: Prototypes = {}
    averages: list[Prototypes] = []
    models: list[dict[int, Weights]] = []
    for cohort in COHORTS:
        told: dict[int, Prototypes] = {}
        for k in cohort:
            before = local(run, k, own[k], known, distance, 2)
            told[k] = means(features(before, run.clients[k].x), run.clients[k].y)
            own[k] = local(run, k, before, known, distance, 1)
        for c in range(4):
            rows = [told[k][c] for k in cohort if c in told[k]]
            if rows:
                known = {**known, c: sum(rows, torch.zeros(())) / len(rows)}  # eq. 6, without its N_j
        averages.append(known)
        models.append(dict(own))
    return averages, models


def means(h: Tensor, y: Tensor) -> Prototypes:
    """C^(j): the mean features of each class that there is."""
    return {int(c): h[y == c].mean(0) for c in y.unique()}


def local(run: Run, k: int, w: Weights, known: Prototypes, distance: str, steps: int) -> Weights:
    """A client's weights after some steps."""
    data = run.clients[k]

    def loss(w: Weights) -> Tensor:
        h, supervised = features(w, data.x), cross_entropy(logits(w, data.x), data.y)
        if distance == "means":
            gaps = [(own - known[c]).square().sum().sqrt() for c, own in means(h, data.y).items() if c in known]
            return supervised + LAMBDA * sum(gaps, torch.zeros(()))
        rows = [(h[i] - known[c]).square().mean() for i, c in enumerate(data.y.tolist()) if c in known]
        return supervised + LAMBDA * sum(rows, torch.zeros(())) / data.n

    return descended(loss, w, steps)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for distance in ("examples", "means"):
        run = played(FedProto(SGD, strength=LAMBDA, distance=distance, prediction="head"), 4, cohorts=COHORTS)
        averages, models = reference(run, distance)
        tables = [state.prototypes for state in run.states[1:]]
        found = [{int(c): t["means"][c] for c in t["known"].nonzero().flatten()} for t in tables]
        yield f"averages of four rounds, {distance}", gap(found, averages)
        yield f"every client's weights in four rounds, {distance}", gap(run.models, models)
