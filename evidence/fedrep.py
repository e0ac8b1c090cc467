"""FedRep, from Algorithm 1 of Collins et al. (ICML 2021): tau steps of the head, then of the representation.

No code was read.
"""

from collections.abc import Iterator
from dataclasses import replace

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, played
from potluck.methods.fedrep import FedRep

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
TAU = 5


def reference(run: Run) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """The representation after each round, and every client's network."""
    net = {k: run.start[data.architecture] for k, data in run.clients.items()}
    phi = {n: w for n, w in max(run.start.values(), key=len).items() if not n.startswith("head.")}
    found: list[Weights] = []
    models: list[dict[int, Weights]] = []
    for cohort in COHORTS:
        for k in cohort:
            data, body = run.clients[k], {n: phi[n] for n in net[k] if n in phi}
            head = {n: w for n, w in net[k].items() if n not in phi}
            head = descended(lambda h, d=data, b=body: cross_entropy(logits({**b, **h}, d.x), d.y), head, TAU)
            body = descended(lambda b, d=data, h=head: cross_entropy(logits({**b, **h}, d.x), d.y), body)
            net[k] = {**body, **head}
        phi = mean_by_layer([{n: net[k][n] for n in net[k] if n in phi} for k in cohort], [1.0] * len(cohort), phi)
        found.append(phi)
        models.append({k: {**net[k], **{n: phi[n] for n in net[k] if n in phi}} for k in net})
    return found, models


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    run = played(FedRep(SGD, head=replace(SGD, epochs=TAU)), 4, cohorts=COHORTS)
    phi, models = reference(run)
    yield "phi of four rounds", gap([s.weights["all"] for s in run.states[1:]], phi)
    yield "every client's network", gap(run.models, models)
