"""FedDyn, from Algorithm 1 and eq. 1 of Acar et al. (ICLR 2021), layer by layer where architectures differ.

No code was read. The client's minimisation is three steps of gradient descent. h is kept with the clients' mean sign:
theta^t = mean - h^t / alpha, h^t = h^(t-1) - alpha (1 / m) sum over P_t of (theta_k - theta^(t-1)); the m and P_t of a
layer are those of its owners.
"""

from collections.abc import Iterator

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, owned, played
from potluck.methods.feddyn import FedDyn

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
ALPHA = 0.3


def reference(run: Run) -> tuple[list[Weights], list[Weights]]:
    """Theta and h before the first round and after each."""
    theta = dict(max(run.start.values(), key=len))
    h = {name: 0 * w for name, w in theta.items()}
    g = {k: owned(h, run.start[data.architecture]) for k, data in run.clients.items()}  # gradients of L_k at theta_k
    found = [theta], [h]
    for cohort in COHORTS:
        new: dict[int, Weights] = {}
        for k in cohort:
            sent = owned(theta, g[k])
            new[k] = local(run, k, sent, g[k])
            g[k] = {n: g[k][n] - ALPHA * (new[k][n] - sent[n]) for n in sent}
        before, theta, h = theta, dict(theta), dict(h)
        for name in before:
            drawn, owners = [k for k in cohort if name in new[k]], [k for k, held in g.items() if name in held]
            if drawn:
                h[name] = h[name] - ALPHA / len(owners) * sum(new[k][name] - before[name] for k in drawn)
                theta[name] = sum(new[k][name] for k in drawn) / len(drawn) - h[name] / ALPHA
        found[0].append(theta)
        found[1].append(h)
    return found


def local(run: Run, k: int, sent: Weights, g: Weights) -> Weights:
    """theta_k after three steps on L_k(theta) - <g, theta> + (alpha / 2) |theta - theta^(t-1)|^2."""
    data = run.clients[k]

    def objective(w: Weights):
        linear = sum((g[n] * w[n]).sum() for n in w)
        return (
            cross_entropy(logits(w, data.x), data.y)
            - linear
            + ALPHA / 2 * sum(((w[n] - sent[n]) ** 2).sum() for n in w)
        )

    return descended(objective, sent)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    run = played(FedDyn(SGD, ALPHA), 4, cohorts=COHORTS)
    theta, h = reference(run)
    yield "theta of four rounds", gap([s.weights["all"] for s in run.states], theta)
    yield "h of four rounds", gap([s.h["all"] for s in run.states], h)
