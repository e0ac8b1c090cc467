"""FedPer, from Algorithms 1 and 2 of Arivazhagan et al. (2019): the layers before the head are averaged by examples.

No code was read.
"""

from collections.abc import Iterator

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, played
from potluck.methods.fedper import FedPer

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]


def reference(run: Run, own_layers: tuple[str, ...]) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """The base layers after each round, and every client's network."""
    net = {k: run.start[data.architecture] for k, data in run.clients.items()}
    base = {n: w for n, w in max(run.start.values(), key=len).items() if not n.startswith(own_layers)}
    bases: list[Weights] = []
    models: list[dict[int, Weights]] = []
    for cohort in COHORTS:
        for k in cohort:
            data = run.clients[k]
            received = {**net[k], **{n: base[n] for n in net[k] if n in base}}
            net[k] = descended(lambda w, d=data: cross_entropy(logits(w, d.x), d.y), received)
        sent = [{n: net[k][n] for n in net[k] if n in base} for k in cohort]
        base = mean_by_layer(sent, [run.clients[k].n for k in cohort], base)
        bases.append(base)
        models.append({k: {**net[k], **{n: base[n] for n in net[k] if n in base}} for k in net})
    return bases, models


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for layers, own in ((1, ("head.",)), (2, ("head.", "stages.hidden1.", "stages.hidden2."))):
        run = played(FedPer(SGD, personal_layers=layers), 4, cohorts=COHORTS)
        bases, models = reference(run, own)
        yield f"base layers of four rounds, K_P = {layers}", gap([s.weights["all"] for s in run.states[1:]], bases)
        yield f"every client's network, K_P = {layers}", gap(run.models, models)
