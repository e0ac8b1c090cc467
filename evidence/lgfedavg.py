"""LG-FedAvg, from Algorithm 1 of Liang et al. (2020): the head is averaged by examples, all else stays at the clients.

No code was read.
"""

from collections.abc import Iterator

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, played
from potluck.methods.lgfedavg import LGFedAvg

COHORTS = [[0, 1, 2], [0, 2], [1]]


def reference(run: Run) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """The head that is averaged, after each round; and every client's whole network for inference."""
    own = {k: run.start[data.architecture] for k, data in run.clients.items()}
    head = {n: w for n, w in own[0].items() if n.startswith("head.")}
    heads: list[Weights] = []
    models: list[dict[int, Weights]] = []
    for cohort in COHORTS:
        for k in cohort:
            data = run.clients[k]
            own[k] = descended(lambda w, d=data: cross_entropy(logits(w, d.x), d.y), {**own[k], **head})
        trained = [{n: own[k][n] for n in head} for k in cohort]
        head = mean_by_layer(trained, [run.clients[k].n for k in cohort], head)
        heads.append(head)
        models.append({k: {**own[k], **head} for k in own})
    return heads, models


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    run = played(LGFedAvg(SGD), cohorts=COHORTS)
    heads, models = reference(run)
    found = [{f"head.{n}": w for n, w in state.shared.items()} for state in run.states[1:]]
    yield "the head of three rounds", gap(found, heads)
    yield "every client's weights in three rounds", gap(run.models, models)
