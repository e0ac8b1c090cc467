"""FedAvg, from Algorithm 1 of McMahan et al. (AISTATS 2017), layer by layer where architectures differ.

No code was read. A client owns the layers of its architecture; a layer is averaged over the clients that own it, by
their numbers of examples.
"""

from collections.abc import Iterator

from evidence.ground import (
    SGD,
    Run,
    Weights,
    cross_entropy,
    descended,
    gap,
    logits,
    mean_by_layer,
    owned,
    played,
)
from potluck.methods.fedavg import FedAvg
from potluck.parts.sharing import Sharing


def reference(run: Run, cohorts: list[list[int]], *, by_examples: bool = True) -> list[Weights]:
    """The server's weights before the first round and after each, all layers in one dict."""
    w = dict(max(run.start.values(), key=len))
    found = [w]
    for cohort in cohorts:
        trained: list[Weights] = []
        for k in cohort:
            data = run.clients[k]
            received = owned(w, run.start[data.architecture])
            trained.append(descended(lambda v, d=data: cross_entropy(logits(v, d.x), d.y), received))
        shares = [float(run.clients[k].n) if by_examples else 1.0 for k in cohort]
        w = mean_by_layer(trained, shares, w)
        found.append(w)
    return found


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, by_examples in (("by examples", True), ("equally", False)):
        cohorts = [[0, 1, 2], [0, 2], [1]]
        sharing = Sharing(weighting="samples" if by_examples else "uniform")
        run = played(FedAvg(SGD, sharing), cohorts=cohorts)
        ours = [state.weights["all"] for state in run.states]
        yield f"weights of three rounds, {what}", gap(ours, reference(run, cohorts, by_examples=by_examples))
