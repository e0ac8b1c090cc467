"""FedFomo, from section 3, eq. 3 and 4 of Zhang et al. (ICLR 2021).

No code was read. Where architectures differ, a candidate is the client's model with the layers that both have replaced;
a client measures candidates against its own model. A choice between candidates that helped equally is drawn, and read
from the messages.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, played
from potluck.methods.fedfomo import FedFomo
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3], [1, 3]]
P = dict[int, dict[int, float]]


def reference(run: Run, M: int, same: bool) -> tuple[list[P], list[dict[int, Weights]]]:
    """The affinities and every client's model after each round."""
    theta = {i: run.start[data.architecture] for i, data in run.clients.items()}
    uploaded = dict[int, Weights]()
    p = {i: {} for i in run.clients}
    affinities, models = list[P](), list[dict[int, Weights]]()
    for number, cohort in enumerate(COHORTS):
        before = dict(uploaded)
        for i in cohort:
            of = run.clients[i].architecture
            others = {
                n: {name: w[name] for name in w if name in theta[i]}
                for n, w in before.items()
                if n != i and (not same or run.clients[n].architecture == of)
            }
            drawn = sorted(int(n) for n in run.sent["local_update"][number][i].get("candidates", {}))
            liked = chosen(p[i], list(others), M)
            w = gains(run, i, theta[i], {n: others[n] for n in (drawn if liked is None else liked)})
            p[i] = {**p[i], **{n: p[i].get(n, 0.0) + w[n] for n in w}}
            helpful = [n for n in w if w[n] > 0]
            theta[i] = mean_by_layer([others[n] for n in helpful], [w[n] for n in helpful], theta[i])  # eq. 4
            theta[i] = descended(lambda v, d=run.clients[i]: cross_entropy(logits(v, d.x), d.y), theta[i])
            uploaded[i] = theta[i]
        affinities.append({i: dict(row) for i, row in p.items() if i in uploaded})
        models.append(dict(theta))
    return affinities, models


def chosen(row: dict[int, float], others: list[int], M: int) -> list[int] | None:
    """The M candidates of the largest affinity, where epsilon is 0; None if ties decide."""
    order = sorted(others, key=lambda n: -row.get(n, 0.0))
    if len(order) > M and row.get(order[M - 1], 0.0) == row.get(order[M], 0.0):
        return None
    return sorted(order[:M])


def gains(run: Run, i: int, mine: Weights, candidates: dict[int, Weights]) -> dict[int, float]:
    """w_n of eq. 3, nothing where it is negative."""
    examples = run.federation.sites[i].validation
    batch = examples.batch(torch.arange(len(examples)))

    def L(w: Weights) -> Tensor:
        return cross_entropy(logits(w, batch.inputs.double()), batch.targets)

    found: dict[int, float] = {}
    for n, theirs in candidates.items():
        distance = torch.cat([(theirs[name] - mine[name]).flatten() for name in theirs]).norm()
        found[n] = max(0.0, float((L(mine) - L({**mine, **theirs})) / distance))
    return found


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    world = World(clients=4)
    for what, M, same in (("all candidates", 5, False), ("the best one", 1, False), ("of one architecture", 5, True)):
        method = FedFomo(SGD, peers=M, epsilon=0.0, candidates="same" if same else "graft")
        run = played(method, 4, world, COHORTS)
        affinity, models = reference(run, M, same)
        yield f"P after each of four rounds, {what}", gap([state.affinity for state in run.states[1:]], affinity)
        yield f"every client's model, {what}", gap(run.models, models)
