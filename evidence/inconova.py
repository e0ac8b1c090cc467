"""InCoNova: clients train by section 4 of Wang et al. (NeurIPS 2020), the server mixes by Chan et al. (ICLR 2024).

No code was read. A client's training is the reference of FedNova, with examples that are copies of one so that clients
take different numbers of steps in any order; the mixing is that of InCoAvg. By the method's departures p_i are equal,
or FedNova's, and what is mixed is -tau_eff times the mean of d.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from evidence.fednova import COHORTS, LR, local
from evidence.ground import Run, Weights, gap, owned, played
from evidence.incoavg import PAIRS, mix
from potluck.core.federation import Federation
from potluck.core.requests.fit import LocalTraining
from potluck.methods.inconova import InCoNova
from potluck.parts.crosslayer import CrossLayer
from potluck.parts.sharing import Sharing
from potluck.testing.worlds import World, toy_federation


def reference(run: Run, inco: CrossLayer, by_examples: bool) -> list[Weights]:
    """X before the first round and after each."""
    x = dict(run.start["toy2"])
    found = [x]
    for cohort in COHORTS:
        d, tau = dict[int, Weights](), {i: 2 * math.ceil(run.clients[i].n / 16) for i in cohort}
        for i in cohort:
            mine = owned(x, run.start[run.clients[i].architecture])
            y = local(run, i, mine, tau[i], 0.0)
            d[i] = {n: (mine[n] - y[n]) / tau[i] for n in y}
        g = Weights()
        for n in x:
            owners = [i for i in cohort if n in d[i]]
            shares = [float(run.clients[i].n) if by_examples else 1.0 for i in owners]
            p = dict(zip(owners, [share / sum(shares) for share in shares], strict=True))
            if owners:
                tau_eff = sum(p[i] * tau[i] for i in owners)
                g[n] = -tau_eff * sum((p[i] * d[i][n] for i in owners), torch.zeros(()))
        mixed = {n: mix(g[n], g[PAIRS[n]], inco) if n in PAIRS else g[n] for n in g}
        x = {n: x[n] + mixed[n] if n in g else x[n] for n in x}
        found.append(x)
    return found


def copies() -> Federation:
    """Clients each of whom has one example many times; some networks have three layers of one shape."""
    whole = toy_federation(World(clients=3, depth=2))
    sites = {
        k: replace(site, train=site.train.take(torch.zeros(len(site.train), dtype=torch.int64)))
        for k, site in whole.sites.items()
    }
    return replace(whole, sites=sites)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    training = LocalTraining("sgd", lr=LR, epochs=2, batch_size=16)
    for what, inco, by_examples in (
        ("the code's rule, equally", CrossLayer(cap=0.3, clip=0.01), False),
        ("Algorithm 1, by examples", CrossLayer("paper", clip=10.0), True),
    ):
        sharing = Sharing(weighting="samples" if by_examples else "uniform")
        run = played(InCoNova(training, sharing, inco=inco), cohorts=COHORTS, federation=copies())
        theirs = reference(run, inco, by_examples)
        yield f"x of three rounds, {what}", gap([s.weights["all"] for s in run.states], theirs)
