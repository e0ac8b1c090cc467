"""FD, from Algorithm 1 of Jeong et al. (2018), without its augmentation.

No code was read. As the method's departures say, a client reports the means of its last local epoch, an example whose
class nobody else has reported has no second term, and averages are those of the last round, from whoever took part.
Logits in place of probabilities, and one's own report among the others', are tried besides what the paper has.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played
from potluck.methods.fd import FD
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2], [0, 2], [1, 2], [0, 1]]
GAMMA = 0.7
Means = dict[int, Tensor]


def reference(run: Run, exchanged: str, own: bool) -> tuple[list[dict[int, Means]], list[dict[int, Weights]]]:
    """F_l of each client that took part, after each round, and every client's weights."""
    w = {k: run.start[data.architecture] for k, data in run.clients.items()}
    last: dict[int, Means] = {}
    reports, models = list[dict[int, Means]](), list[dict[int, Weights]]()
    for cohort in COHORTS:
        told: dict[int, Means] = {}
        for k in cohort:
            G = averages([means for j, means in last.items() if own or j != k])
            before = local(run, k, w[k], G, exchanged, 2)
            z, y = logits(before, run.clients[k].x), run.clients[k].y
            F = z if exchanged == "logits" else z.softmax(1)
            told[k] = {int(c): F[y == c].mean(0) for c in y.unique()}
            w[k] = local(run, k, before, G, exchanged, 1)
        last = told
        reports.append(told)
        models.append(dict(w))
    return reports, models


def averages(reports: list[Means]) -> Means:
    """G_l, of each class the mean over those who reported it."""
    known = sorted({c for means in reports for c in means})
    return {c: torch.stack([means[c] for means in reports if c in means]).mean(0) for c in known}


def local(run: Run, k: int, w: Weights, G: Means, exchanged: str, steps: int) -> Weights:
    """A client's weights after some steps."""
    data = run.clients[k]
    targets = {c: G[c].softmax(0) if exchanged == "logits" else G[c] for c in G}
    G_l = torch.stack([targets.get(c, torch.zeros(4)) for c in data.y.tolist()])

    def loss(w: Weights) -> Tensor:
        z = logits(w, data.x)
        return cross_entropy(z, data.y) - GAMMA * (G_l * z.log_softmax(1)).sum() / data.n  # phi(F, G_l) of each

    return descended(loss, w, steps)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    world = World(clients=3, labels=2)
    for what, exchanged, averaged in (
        ("probabilities", "probabilities", "others"),
        ("logits", "logits", "others"),
        ("with one's own", "probabilities", "all"),
    ):
        run = played(FD(SGD, gamma=GAMMA, exchanged=exchanged, averaged=averaged), 4, world, COHORTS)
        reports, models = reference(run, exchanged, averaged == "all")
        rows = [state.reports for state in run.states[1:]]
        found = [{k: dict(zip(r["labels"].tolist(), r["values"], strict=True)) for k, r in all.items()} for all in rows]
        yield f"reports of four rounds, {what}", gap(found, reports)
        yield f"every client's weights in four rounds, {what}", gap(run.models, models)
