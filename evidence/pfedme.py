"""PFedMe, from Algorithm 1 of Dinh et al. (NeurIPS 2020), three local rounds on all of a client's examples.

The authors' code was read to settle where the solver of theta begins (departure 3 of the method).
"""

from collections.abc import Iterator

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, owned, played
from potluck.methods.pfedme import PFedMe

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
LAMBDA, ETA, BETA, R, K = 2.0, 0.3, 0.7, 3, 4


def reference(run: Run) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """W before the first round and after each, and every client's theta after each."""
    w = dict(max(run.start.values(), key=len))
    theta = {k: run.start[data.architecture] for k, data in run.clients.items()}
    found, models = [w], list[dict[int, Weights]]()
    for cohort in COHORTS:
        sent: list[Weights] = []
        for k in cohort:
            data, w_k = run.clients[k], owned(w, theta[k])
            theta[k] = w_k
            for _ in range(R):

                def h(t: Weights, d=data, near=w_k) -> object:
                    distance = sum(((t[n] - near[n]) ** 2).sum() for n in t)
                    return cross_entropy(logits(t, d.x), d.y) + LAMBDA / 2 * distance

                theta[k] = descended(h, theta[k], K)
                w_k = {n: w_k[n] - ETA * LAMBDA * (w_k[n] - theta[k][n]) for n in w_k}
            sent.append(w_k)
        mean = mean_by_layer(sent, [1.0] * len(cohort), {})
        w = {n: (1 - BETA) * w[n] + BETA * mean[n] if n in mean else w[n] for n in w}
        found.append(w)
        models.append(dict(theta))
    return found, models


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    run = played(PFedMe(SGD, solver_steps=K, lam=LAMBDA, outer_lr=ETA, beta=BETA), 4, cohorts=COHORTS)
    w, theta = reference(run)
    yield "w of four rounds", gap([s.weights["all"] for s in run.states], w)
    yield "every client's theta", gap(run.models, theta)
