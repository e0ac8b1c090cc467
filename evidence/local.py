"""Local training: a client goes on from where it stopped when it was last drawn. There is no paper."""

from collections.abc import Iterator

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played
from potluck.methods.local import Local

COHORTS = [[0, 1, 2], [0, 2], [1]]


def reference(run: Run) -> list[dict[int, Weights]]:
    """Every client's weights after each round."""
    own = {k: run.start[data.architecture] for k, data in run.clients.items()}
    found: list[dict[int, Weights]] = []
    for cohort in COHORTS:
        for k in cohort:
            data = run.clients[k]
            own[k] = descended(lambda w, d=data: cross_entropy(logits(w, d.x), d.y), own[k])
        found.append(dict(own))
    return found


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    run = played(Local(SGD), cohorts=COHORTS)
    yield "every client's weights in three rounds", gap(run.models, reference(run))
