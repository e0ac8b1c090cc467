"""Ditto, from Algorithm 1 of Li et al. (ICML 2021), with FedAvg for the global model.

The authors' code was read to settle that both models are trained from what a client has at the beginning of the round.
"""

from collections.abc import Iterator

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, owned, played
from potluck.methods.ditto import Ditto

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
LAMBDA = 0.7


def reference(run: Run) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """The global weights before the first round and after each, and every client's v after each."""
    w = dict(max(run.start.values(), key=len))
    v = {k: run.start[data.architecture] for k, data in run.clients.items()}
    found, models = [w], list[dict[int, Weights]]()
    for cohort in COHORTS:
        trained: list[Weights] = []
        for k in cohort:
            data, sent = run.clients[k], owned(w, v[k])

            def loss(u: Weights, d=data) -> object:
                return cross_entropy(logits(u, d.x), d.y)

            def pulled(u: Weights, d=data, s=sent) -> object:
                return loss(u, d) + LAMBDA / 2 * sum(((u[n] - s[n]) ** 2).sum() for n in u)

            trained.append(descended(loss, sent))
            v[k] = descended(pulled, v[k])
        w = mean_by_layer(trained, [1.0] * len(cohort), w)
        found.append(w)
        models.append(dict(v))
    return found, models


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    run = played(Ditto(SGD, personal=SGD, lam=LAMBDA), 4, cohorts=COHORTS)
    w, v = reference(run)
    yield "w of four rounds", gap([s.weights["all"] for s in run.states], w)
    yield "every client's v", gap(run.models, v)
