"""FedDF, from Algorithms 1 and 3 of Lin, Kong, Stich, Jaggi (NeurIPS 2020).

No code was read. As the method's departures say, a prototype of which no client was drawn is distilled from where it
was, and a distillation has a fixed length, here three steps with all public data. The paper weighs clients by examples
in averages and equally in the ensemble; equal averages, and the mean of probabilities, are tried besides.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import (
    SGD,
    Run,
    Weights,
    cross_entropy,
    descended,
    gap,
    logits,
    mean_by_layer,
    played,
    public_data,
)
from potluck.methods.feddf import FedDF
from potluck.parts.sharing import Sharing

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1]]


def reference(run: Run, ensemble: str, by_examples: bool) -> list[dict[str, Weights]]:
    """The prototypes before the first round and after each."""
    d, _ = public_data(run)
    x = run.start
    found = [x]
    for cohort in COHORTS:
        trained: dict[int, Weights] = {}
        for k in cohort:
            data = run.clients[k]
            trained[k] = descended(lambda w, c=data: cross_entropy(logits(w, c.x), c.y), x[data.architecture])
        taught = [logits(w, d) if ensemble == "logits" else logits(w, d).softmax(1) for w in trained.values()]
        target = torch.stack(taught).mean(0)
        if ensemble == "logits":
            target = target.softmax(1)
        x = {p: distilled(averaged(run, trained, p, x[p], by_examples), d, target) for p in x}
        found.append(x)
    return found


def averaged(run: Run, trained: dict[int, Weights], p: str, x_p: Weights, by_examples: bool) -> Weights:
    """The prototype that distillation begins with."""
    group = [k for k in trained if run.clients[k].architecture == p]
    shares = [float(run.clients[k].n) if by_examples else 1.0 for k in group]
    return mean_by_layer([trained[k] for k in group], shares, x_p)


def distilled(x_p: Weights, d: Tensor, target: Tensor) -> Weights:
    """The weights after steps down KL(target || softmax f(x_p, d))."""

    def divergence(w: Weights) -> Tensor:
        return (target * (target.log() - logits(w, d).log_softmax(1))).sum(1).mean()

    return descended(divergence, x_p)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, ensemble, weighting in (
        ("mean logits", "logits", "samples"),
        ("mean probabilities", "probabilities", "samples"),
        ("equal averages", "logits", "uniform"),
    ):
        method = FedDF(SGD, SGD, ensemble, Sharing("architecture", weighting))
        run = played(method, 4, cohorts=COHORTS)
        prototypes = reference(run, ensemble, weighting == "samples")
        yield f"prototypes of four rounds, {what}", gap([s.weights for s in run.states], prototypes)
        if ensemble == "logits" and weighting == "samples":
            models = [{k: x[data.architecture] for k, data in run.clients.items()} for x in prototypes[1:]]
            yield "every client's model in four rounds", gap(run.models, models)
