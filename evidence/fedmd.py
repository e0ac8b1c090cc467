"""FedMD, from Algorithm 1 of Li and Wang (NeurIPS workshop 2019).

No code was read. The authors' code settles, as the method's departures say, that a digest's loss is the mean absolute
difference of logits; squares are tried besides. Departures, too, are that a client trains on its own data before it is
first asked, as long as a revisit, on public labels before that if wanted, and that the consensus is of those who were
drawn. The rows of the public data are read from the messages.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played, public_data
from potluck.methods.fedmd import FedMD

COHORTS = [[0, 1, 2], [0, 2], [1, 2], [0, 1]]


def reference(run: Run, distance: str, first: tuple[str, ...]) -> tuple[list[Tensor], list[dict[int, Weights]]]:
    """The consensus of each round, and every client's weights after it."""
    x_0, y_0 = public_data(run)
    f = {k: run.start[data.architecture] for k, data in run.clients.items()}
    asked = set[int]()
    consensus, models = list[Tensor](), list[dict[int, Weights]]()
    for number, cohort in enumerate(COHORTS):
        d_0 = x_0[run.sent["score_public"][number][cohort[0]]["rows"]]
        for k in cohort:
            if k not in asked and "public" in first:
                f[k] = learnt(f[k], x_0, y_0)
            if k not in asked and "private" in first:
                f[k] = learnt(f[k], *own(run, k))
            asked.add(k)
        F = sum((logits(f[k], d_0) for k in cohort), torch.zeros(())) / len(cohort)
        for k in cohort:
            digested = descended(lambda w, d_0=d_0, F=F: apart(logits(w, d_0) - F, distance), f[k])
            f[k] = learnt(digested, *own(run, k))  # revisit
        consensus.append(F)
        models.append(dict(f))
    return consensus, models


def own(run: Run, k: int) -> tuple[Tensor, Tensor]:
    """A client's private data."""
    return run.clients[k].x, run.clients[k].y


def learnt(w: Weights, x: Tensor, y: Tensor) -> Weights:
    """The weights after training on labelled examples."""
    return descended(lambda w: cross_entropy(logits(w, x), y), w)


def apart(difference: Tensor, distance: str) -> Tensor:
    """How far predictions are from the consensus."""
    return difference.abs().mean() if distance == "l1" else difference.square().mean()


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    base = FedMD(SGD, SGD, public_examples=24, public_training=SGD)
    for what, distance, first in (
        ("absolute differences", "l1", ("private",)),
        ("squared differences", "mse", ("private",)),
        ("public labels first", "l1", ("public", "private")),
        ("without pre-training", "l1", ()),
    ):
        method = replace(base, digest_loss=distance, pretrain="private" in first, public_labels="public" in first)
        run = played(method, 4, cohorts=COHORTS)
        consensus, models = reference(run, distance, first)
        sent = [next(iter(messages.values()))["consensus"] for messages in run.sent["digest_and_revisit"]]
        yield f"consensus of four rounds, {what}", gap(sent, consensus)
        yield f"every client's weights in four rounds, {what}", gap(run.models, models)
