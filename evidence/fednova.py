"""FedNova, from Algorithm 1 and section 4 of Wang et al. (NeurIPS 2020), with plain SGD and with local momentum.

No code was read. With momentum rho, a_i is that of section 4.1: (1 - rho^(tau - k)) / (1 - rho) for step k, counted
from 0. Batches are of 16 examples, so that clients with 40, 48 and 56 take different numbers of steps; a client's
examples are copies of one, so that their order does not matter. p_i and tau_eff are over each layer's owners.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from evidence.ground import Run, Weights, cross_entropy, gap, gradient, logits, owned, played
from potluck.core.federation import Federation
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fednova import FedNova
from potluck.testing.worlds import World, toy_federation

COHORTS = [[0, 1, 2], [0, 2], [1, 2]]
LR = 0.1


def reference(run: Run, steps: dict[int, int], momentum: float) -> list[Weights]:
    """X before the first round and after each."""
    x = dict(max(run.start.values(), key=len))
    found = [x]
    for cohort in COHORTS:
        d: dict[int, Weights] = {}
        norm: dict[int, float] = {}
        for i in cohort:
            mine = owned(x, run.start[run.clients[i].architecture])
            tau = steps[i]
            norm[i] = sum((1 - momentum ** (tau - k)) / (1 - momentum) for k in range(tau))
            y = local(run, i, mine, tau, momentum)
            d[i] = {n: (mine[n] - y[n]) / norm[i] for n in y}
        x = dict(x)
        for name in x:
            owners = [i for i in cohort if name in d[i]]
            whole = sum(run.clients[i].n for i in owners)
            if owners:
                p = {i: run.clients[i].n / whole for i in owners}
                tau_eff = sum(p[i] * norm[i] for i in owners)
                x[name] = x[name] - tau_eff * sum((p[i] * d[i][name] for i in owners), torch.zeros(()))
        found.append(x)
    return found


def local(run: Run, i: int, x: Weights, tau: int, momentum: float) -> Weights:
    """A client's weights after tau steps with all of its examples, whose momentum begins at zero."""
    data, moving = run.clients[i], {n: 0 * w for n, w in x.items()}
    for _ in range(tau):
        g = gradient(lambda w: cross_entropy(logits(w, data.x), data.y), x)
        moving = {n: momentum * moving[n] + g[n] for n in x}
        x = {n: x[n] - LR * moving[n] for n in x}
    return x


def copies() -> Federation:
    """Clients each of whom has one example many times."""
    whole = toy_federation(World(clients=3))
    sites = {
        id: replace(site, train=site.train.take(torch.zeros(len(site.train), dtype=torch.int64)))
        for id, site in whole.sites.items()
    }
    return replace(whole, sites=sites)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for momentum in (0.0, 0.9):
        training = LocalTraining("sgd", lr=LR, epochs=2, batch_size=16, momentum=momentum)
        run = played(FedNova(training), cohorts=COHORTS, federation=copies())
        steps = {i: 2 * math.ceil(data.n / 16) for i, data in run.clients.items()}
        theirs = reference(run, steps, momentum)
        yield f"x of three rounds, momentum {momentum}", gap([s.weights["all"] for s in run.states], theirs)
