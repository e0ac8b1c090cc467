"""InCoMOON: clients train by eq. 3 of Li, He, Song (CVPR 2021), the server mixes by Chan et al. (ICLR 2024).

No code was read. A client's training is the reference of MOON, the mixing that of InCoAvg; averages are equal.
"""

from collections.abc import Iterator

from evidence.ground import SGD, Run, Weights, gap, mean_by_layer, owned, played
from evidence.incoavg import PAIRS, mix
from evidence.moon import MU, TAU, local
from potluck.methods.incomoon import InCoMOON
from potluck.parts.crosslayer import CrossLayer
from potluck.testing.worlds import World

COHORTS = [[0, 1, 2], [0, 2], [1, 2], [0, 1]]


def reference(run: Run, inco: CrossLayer) -> list[Weights]:
    """The server's weights before the first round and after each."""
    w = dict(run.start["toy2"])
    found, previous = [w], dict[int, Weights]()
    for cohort in COHORTS:
        for k in cohort:
            received = owned(w, run.start[run.clients[k].architecture])
            previous[k] = local(run, k, received, previous.get(k))
        trained = [previous[k] for k in cohort]
        mean = mean_by_layer(trained, [1.0] * len(cohort), w)
        g = {n: mean[n] - w[n] for n in w}
        moved = {n for own in trained for n in own}
        w = {n: w[n] + (mix(g[n], g[PAIRS[n]], inco) if n in PAIRS and n in moved else g[n]) for n in w}
        found.append(w)
    return found


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, inco in (
        ("the code's rule", CrossLayer(cap=0.3, clip=0.002)),
        ("Algorithm 1", CrossLayer("paper", clip=10.0)),
    ):
        method = InCoMOON(SGD, mu=MU, temperature=TAU, inco=inco)
        run = played(method, 4, World(clients=3, depth=2), COHORTS)
        yield f"weights of four rounds, {what}", gap([s.weights["all"] for s in run.states], reference(run, inco))
