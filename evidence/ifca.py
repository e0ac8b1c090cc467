"""IFCA, from Algorithm 1 of Ghosh et al. (NeurIPS 2020), with models averaged over those who took them.

No code was read. The second model's initial weights, a draw of its own, are read from the run.
"""

from collections.abc import Iterator

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, owned, played
from potluck.methods.ifca import IFCA

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]


def reference(run: Run) -> tuple[list[list[Weights]], list[dict[int, Weights]]]:
    """The models after each round, and every client's."""
    theta = [dict(run.states[0].weights[j]["all"]) for j in ("0", "1")]
    found: list[list[Weights]] = []
    models: list[dict[int, Weights]] = []
    for cohort in COHORTS:
        taken: list[list[Weights]] = [[], []]
        for k in cohort:
            mine, data = best(run, k, theta), run.clients[k]
            start = owned(theta[mine], run.start[data.architecture])
            taken[mine].append(descended(lambda w, d=data: cross_entropy(logits(w, d.x), d.y), start))
        theta = [mean_by_layer(parts, [1.0] * len(parts), old) for parts, old in zip(taken, theta, strict=True)]
        found.append(theta)
        models.append({k: owned(theta[best(run, k, theta)], run.start[d.architecture]) for k, d in run.clients.items()})
    return found, models


def best(run: Run, k: int, theta: list[Weights]) -> int:
    """The model with the least loss on a client's data."""
    data = run.clients[k]
    nets = [owned(model, run.start[data.architecture]) for model in theta]
    losses = [float(cross_entropy(logits(net, data.x), data.y)) for net in nets]
    return losses.index(min(losses))


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    run = played(IFCA(SGD, clusters=2), 4, cohorts=COHORTS)
    theta, models = reference(run)
    found = [[state.weights[j]["all"] for j in ("0", "1")] for state in run.states[1:]]
    yield "both models of four rounds", gap(found, theta)
    yield "every client's model", gap(run.models, models)
