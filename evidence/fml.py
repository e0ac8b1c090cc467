"""FML, from the two losses of mutual learning and the algorithm of Shen et al. (2020).

No code was read. As the method's departures say, neither loss has a gradient in the other net, copies count equally,
and by examples if wanted, and the common network's first weights are drawn apart; they are read from the messages.
"""

from collections.abc import Iterator

from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, gap, gradient, logits, mean_by_layer, played
from potluck.methods.fml import FML

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1]]
ALPHA, BETA = 0.4, 0.7


def reference(run: Run, by_examples: bool) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """Theta_g before the first round and after each, and every client's own model after each."""
    own = {k: run.start[data.architecture] for k, data in run.clients.items()}
    theta_g: Weights = run.sent["local_update"][0][0]["common"]
    found, models = [theta_g], list[dict[int, Weights]]()
    for cohort in COHORTS:
        memes: list[Weights] = []
        for k in cohort:
            own[k], meme = mutual(run, k, own[k], theta_g)
            memes.append(meme)
        theta_g = mean_by_layer(memes, [run.clients[k].n if by_examples else 1.0 for k in cohort], theta_g)
        found.append(theta_g)
        models.append(dict(own))
    return found, models


def mutual(run: Run, k: int, own: Weights, meme: Weights) -> tuple[Weights, Weights]:
    """Both nets of a client after three steps; each step reads both before either moves."""
    for _ in range(3):
        g_own = gradient(lambda w, m=meme: loss(run, k, w, m, ALPHA), own)
        g_meme = gradient(lambda w, o=own: loss(run, k, w, o, BETA), meme)
        own, meme = ({n: w[n] - 0.1 * g[n] for n in w} for w, g in ((own, g_own), (meme, g_meme)))
    return own, meme


def loss(run: Run, k: int, w: Weights, other: Weights, share: float) -> Tensor:
    """L = share CE(p, y) + (1 - share) KL(p_other || p)."""
    x, y = run.clients[k].x, run.clients[k].y
    z, p_other = logits(w, x), logits(other, x).softmax(1)
    divergence = (p_other * (p_other.log() - z.log_softmax(1))).sum(1).mean()
    return share * cross_entropy(z, y) + (1 - share) * divergence


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, weighting in (("equally", "uniform"), ("by examples", "samples")):
        run = played(FML(SGD, ALPHA, BETA, weighting), 4, cohorts=COHORTS)
        common, models = reference(run, weighting == "samples")
        yield f"the common model of four rounds, {what}", gap([s.common for s in run.states], common)
        yield f"every client's own model in four rounds, {what}", gap(run.models, models)
