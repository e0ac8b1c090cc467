"""InCoScaffold: clients train as in SCAFFOLD (Karimireddy et al., ICML 2020), mixed by Chan et al. (ICLR 2024).

No code was read. A client's training is the reference of SCAFFOLD, the mixing that of InCoAvg. By the method's
departures what is mixed is eta_g times the mean of dy, and c is not mixed.
"""

from collections.abc import Iterator

import torch

from evidence.ground import SGD, Run, Weights, gap, owned, played
from evidence.incoavg import PAIRS, mix
from evidence.scaffold import ETA_G, local
from potluck.methods.incoscaffold import InCoScaffold
from potluck.parts.crosslayer import CrossLayer
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2], [0, 2], [1, 2], [0, 1]]


def reference(run: Run, option: str, inco: CrossLayer) -> tuple[list[Weights], list[Weights]]:
    """X and c before the first round and after each."""
    x = dict(run.start["toy2"])
    c = {n: torch.zeros_like(v) for n, v in x.items()}
    c_i = {k: owned(c, run.start[data.architecture]) for k, data in run.clients.items()}
    found = [x], [c]
    for cohort in COHORTS:
        dy, dc = dict[int, Weights](), dict[int, Weights]()
        for i in cohort:
            mine = owned(x, c_i[i])
            y, plus = local(run, i, mine, owned(c, mine), c_i[i], option, 0.0)
            dy[i] = {n: y[n] - mine[n] for n in y}
            dc[i] = {n: plus[n] - c_i[i][n] for n in y}
            c_i[i] = plus
        g, shift = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for n in x:
            drawn, owners = [i for i in cohort if n in dy[i]], [i for i in c_i if n in c_i[i]]
            if drawn:
                g[n] = ETA_G * torch.stack([dy[i][n] for i in drawn]).mean(0)
                shift[n] = torch.stack([dc[i][n] for i in drawn]).sum(0) / len(owners)
        mixed = {n: mix(g[n], g[PAIRS[n]], inco) if n in PAIRS else g[n] for n in g}
        x = {n: x[n] + mixed[n] if n in g else x[n] for n in x}
        c = {n: c[n] + shift[n] if n in g else c[n] for n in c}
        found[0].append(x)
        found[1].append(c)
    return found


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, option, inco in (
        ("option II, the code's rule", "path", CrossLayer(cap=0.3, clip=0.002)),
        ("option I, Algorithm 1", "gradient", CrossLayer("paper", clip=10.0)),
    ):
        method = InCoScaffold(SGD, option, ETA_G, inco=inco)
        run = played(method, 4, World(clients=3, depth=2), COHORTS)
        x, c = reference(run, option, inco)
        yield f"x of four rounds, {what}", gap([s.weights["all"] for s in run.states], x)
        yield f"c of four rounds, {what}", gap([s.control["all"] for s in run.states], c)
