"""Felo, from the authors' published code as the method's departures describe it: the first pages have no equations.

A client adds alpha (MSE(h, H_y) + MSE(z, Z_y)) to its loss, each a mean over the batch in which examples without an
average count as 0. It reports by class the means of the features and logits of its last step. H_y is the mean over all
examples that were ever reported of y, Z_y the mean of all means. Averages are sent from the second round on.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, features, gap, logits, played
from potluck.methods.felo import Felo

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1]]
ALPHA = 0.6
Averages = dict[int, Tensor]


def reference(run: Run) -> tuple[list[Averages], list[Averages], list[dict[int, Weights]]]:
    """H and Z as they are sent in each round, and every client's weights after it."""
    own = {k: run.start[data.architecture] for k, data in run.clients.items()}
    reports: list[tuple[int, int, Tensor, Tensor]] = []  # class, examples, mean features, mean logits
    sent: tuple[list[Averages], list[Averages]] = ([], [])
    models: list[dict[int, Weights]] = []
    for number, cohort in enumerate(COHORTS, start=1):
        H, Z = averages(reports) if number > 1 else ({}, {})
        sent[0].append(H)
        sent[1].append(Z)
        for k in cohort:
            data = run.clients[k]
            before = local(run, k, own[k], H, Z, 2)
            h, z = features(before, data.x), logits(before, data.x)
            for c in data.y.unique().tolist():
                of_c = data.y == c
                reports.append((c, int(of_c.sum()), h[of_c].mean(0), z[of_c].mean(0)))
            own[k] = local(run, k, before, H, Z, 1)
        models.append(dict(own))
    return *sent, models


def averages(reports: list[tuple[int, int, Tensor, Tensor]]) -> tuple[Averages, Averages]:
    """H and Z of all that was reported."""
    H: Averages = {}
    Z: Averages = {}
    for c in {report[0] for report in reports}:
        mine = [report[1:] for report in reports if report[0] == c]
        H[c] = sum((n * h for n, h, _ in mine), torch.zeros(())) / sum(n for n, _, _ in mine)
        Z[c] = sum((z for _, _, z in mine), torch.zeros(())) / len(mine)
    return H, Z


def local(run: Run, k: int, w: Weights, H: Averages, Z: Averages, steps: int) -> Weights:
    """A client's weights after some steps."""
    data = run.clients[k]

    def loss(w: Weights) -> Tensor:
        h, z, total = features(w, data.x), logits(w, data.x), torch.zeros(())
        for i, c in enumerate(data.y.tolist()):
            for mine, table in ((h[i], H), (z[i], Z)):
                total = total + ((mine - table[c]).square().mean() if c in table else 0)
        return cross_entropy(z, data.y) + ALPHA * total / data.n

    return descended(loss, w, steps)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    run = played(Felo(SGD, alpha=ALPHA), 4, cohorts=COHORTS)
    H, Z, models = reference(run)
    for name, theirs in (("features", H), ("logits", Z)):
        ours: list[Averages] = []
        for messages in run.sent["local_update"]:
            table = next(iter(messages.values())).get(name)
            ours.append(
                {} if table is None else {int(c): table["means"][c] for c in table["known"].nonzero().flatten()}
            )
        yield f"averages of {name} in four rounds", gap(ours, theirs)
    yield "every client's weights in four rounds", gap(run.models, models)
