"""FedHe, from the loss and the averages of Chan and Ngai (MSN 2021), of a server that waits for its cohort.

No code of the authors was read. As the method's departures say, a report is the mean over the last local epoch in
training's forward passes, a class that nobody has reported has no second term, and in the code all reports so far count
as one after every `memory` reports a client.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played
from potluck.methods.fedhe import FedHe
from potluck.testing.worlds import CLASSES, World

COHORTS = [[0, 1], [0, 2], [1], [0, 1, 2], [2], [0, 1, 2]]


def reference(
    run: Run, alpha: float, warmup: int, memory: int, by_examples: bool
) -> tuple[list[Tensor], list[Tensor], list[dict[int, Weights]]]:
    """Q / m and m before the first round and after each, and every client's model after each."""
    K, reports = len(run.clients), 0
    f = {k: run.start[data.architecture] for k, data in run.clients.items()}
    Q, m = torch.zeros(CLASSES, CLASSES), torch.zeros(CLASSES)
    averages, numbers, models = [Q.clone()], [m.clone()], list[dict[int, Weights]]()
    for cohort in COHORTS:
        sent = averages[-1] if reports >= warmup * K else None
        known = m > 0
        for k in cohort:
            x, y = run.clients[k].x, run.clients[k].y
            loss = partial(of_client, x, y, sent, known, alpha)
            before = descended(loss, f[k], 2)
            z = logits(before, x)
            f[k] = descended(loss, before, 1)
            for c in y.unique():
                counts = float((y == c).sum()) if by_examples else 1.0
                Q[c] += counts * z[y == c].mean(0)
                m[c] += counts
        reports += len(cohort)
        average = Q / m.clamp(min=1)[:, None]
        if reports // (memory * K) > (reports - len(cohort)) // (memory * K):
            Q, m = average.clone(), m.clamp(max=1)
        averages.append(average)
        numbers.append(m.clone())
        models.append(dict(f))
    return averages, numbers, models


def of_client(x: Tensor, y: Tensor, Q: Tensor | None, known: Tensor, alpha: float, w: Weights) -> Tensor:
    """Cross-entropy + alpha times the mean square distance of logits from the averages of their classes."""
    z = logits(w, x)
    if Q is None:
        return cross_entropy(z, y)
    return cross_entropy(z, y) + alpha * ((z - Q[y]) ** 2 * known[y][:, None]).mean()


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, alpha, warmup, memory, weighting in (
        ("reports count as one", 1.0, 1, 10, "uniform"),
        ("by examples, short memory, no warm-up", 2.0, 0, 2, "samples"),
    ):
        options = {"alpha": alpha, "warmup": warmup, "memory": memory, "weighting": weighting}
        # Two of three clients have not all classes together.
        run = played(FedHe(SGD, **options), len(COHORTS), World(clients=3, labels=2), COHORTS)
        Q, m, models = reference(run, alpha, warmup, memory, weighting == "samples")
        found = {"Q": [state.means for state in run.states], "m": [state.counts for state in run.states]}
        yield f"averages and counts of six rounds, {what}", gap(found, {"Q": Q, "m": m})
        yield f"every client's model, {what}", gap(run.models, models)
