"""InCoProx: clients train by eq. 2 of Li et al. (MLSys 2020), the server mixes by Chan et al. (ICLR 2024).

No code was read. A client's training is the reference of FedProx, the mixing that of InCoAvg; averages are equal.
"""

from collections.abc import Iterator

from evidence.fedprox import MU, local
from evidence.ground import SGD, Run, Weights, gap, mean_by_layer, owned, played
from evidence.incoavg import COHORTS, PAIRS, mix
from potluck.methods.incoprox import InCoProx
from potluck.parts.crosslayer import CrossLayer
from potluck.testing.worlds import World


def reference(run: Run, inco: CrossLayer, coupled: bool) -> list[Weights]:
    """The server's weights before the first round and after each."""
    w = dict(run.start["toy2"])
    found = [w]
    for cohort in COHORTS:
        trained = [local(run, k, owned(w, run.start[run.clients[k].architecture]), coupled) for k in cohort]
        mean = mean_by_layer(trained, [1.0] * len(cohort), w)
        g = {n: mean[n] - w[n] for n in w}
        moved = {n for own in trained for n in own}
        w = {n: w[n] + (mix(g[n], g[PAIRS[n]], inco) if n in PAIRS and n in moved else g[n]) for n in w}
        found.append(w)
    return found


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, inco, coupled in (
        ("the code's rule, the pull in the loss", CrossLayer(cap=0.3, clip=0.002), True),
        ("Algorithm 1, the pull as a step", CrossLayer("paper", clip=10.0), False),
    ):
        method = InCoProx(SGD, mu=MU, coupled=coupled, inco=inco)
        run = played(method, world=World(clients=3, depth=2), cohorts=COHORTS)
        yield (
            f"weights of three rounds, {what}",
            gap([s.weights["all"] for s in run.states], reference(run, inco, coupled)),
        )
