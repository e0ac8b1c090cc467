"""FedALA, from Algorithm 1 of Zhang et al. (AAAI 2023), with shares learnt on all of a client's data.

Other libraries' code was read to settle that shares begin at 1, and learn for one pass after the first time.
"""

from collections.abc import Iterator

import torch

from evidence.ground import (
    SGD,
    Run,
    Weights,
    cross_entropy,
    descended,
    gap,
    gradient,
    logits,
    mean_by_layer,
    owned,
    played,
)
from potluck.methods.fedala import FedALA

COHORTS = [[0, 1, 2], [0, 2], [0, 1], [0, 1, 2]]
ETA, PASSES = 3.0, 4


def reference(run: Run) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """The global weights before the first round and after each, and every client's model after each."""
    w = dict(max(run.start.values(), key=len))
    net, share = dict[int, Weights](), dict[int, Weights]()
    found, models = [w], list[dict[int, Weights]]()
    for cohort in COHORTS:
        for k in cohort:
            data = run.clients[k]
            sent = owned(w, run.start[data.architecture])

            def loss(v: Weights, d=data) -> object:
                return cross_entropy(logits(v, d.x), d.y)

            if k in net:
                first = k not in share
                theirs, mine = ({n: t for n, t in full.items() if "head" in n} for full in (sent, net[k]))
                now = share.get(k, {n: torch.ones_like(t) for n, t in mine.items()})
                for _ in range(PASSES if first else 1):
                    g = gradient(loss, {**sent, **moved(mine, theirs, now)})
                    now = {n: (now[n] - ETA * g[n] * (theirs[n] - mine[n])).clamp(0, 1) for n in now}
                share[k] = now
                sent = {**sent, **moved(mine, theirs, now)}
            net[k] = descended(loss, sent)
        w = mean_by_layer([net[k] for k in cohort], [run.clients[k].n for k in cohort], w)
        found.append(w)
        models.append({k: deployed(run, k, w, net, share) for k in run.clients})
    return found, models


def moved(mine: Weights, theirs: Weights, share: Weights) -> Weights:
    """Theta_i + (Theta - Theta_i) W, of the layers that adapt."""
    return {n: mine[n] + (theirs[n] - mine[n]) * share[n] for n in mine}


def deployed(run: Run, k: int, w: Weights, net: dict[int, Weights], share: dict[int, Weights]) -> Weights:
    """The newest global model, of which a client takes the shares that it learnt last."""
    sent = owned(w, run.start[run.clients[k].architecture])
    return {**sent, **moved({n: net[k][n] for n in share[k]}, sent, share[k])} if k in share else sent


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    run = played(FedALA(SGD, sampled=1.0, share_lr=ETA, most=PASSES), 4, cohorts=COHORTS)
    w, models = reference(run)
    yield "weights of four rounds", gap([s.weights["all"] for s in run.states], w)
    yield "every client's model", gap(run.models, models)
