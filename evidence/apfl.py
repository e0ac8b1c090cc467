"""APFL, from Algorithm 1 of Deng et al. (2020), with alpha learnt once a round.

The authors' code was read to settle when alpha takes its step (departure 1 of the method).
"""

from collections.abc import Iterator

from evidence.ground import SGD, Run, Weights, cross_entropy, gap, gradient, logits, mean_by_layer, owned, played
from potluck.methods.apfl import APFL

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
ETA = 0.1


def reference(run: Run, start: float, adaptive: bool) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """W before the first round and after each, and every client's mixture after each."""
    w = dict(max(run.start.values(), key=len))
    v, alpha = dict[int, Weights](), dict.fromkeys(run.clients, start)
    found, models = [w], list[dict[int, Weights]]()
    for cohort in COHORTS:
        trained: list[Weights] = []
        for k in cohort:
            w_k, f = owned(w, run.start[run.clients[k].architecture]), loss_of(run, k)
            v_k = v.get(k, w_k)
            if adaptive:
                g = gradient(f, mixed(v_k, w_k, alpha[k]))
                slope = sum(float(((v_k[n] - w_k[n]) * g[n]).sum()) for n in g)
                alpha[k] = min(1.0, max(0.0, alpha[k] - ETA * slope))
            for _ in range(3):
                g_w, g_bar = gradient(f, w_k), gradient(f, mixed(v_k, w_k, alpha[k]))
                w_k = {n: w_k[n] - ETA * g_w[n] for n in w_k}
                v_k = {n: v_k[n] - ETA * alpha[k] * g_bar[n] for n in v_k}
            v[k] = v_k
            trained.append(w_k)
        w = mean_by_layer(trained, [1.0] * len(cohort), w)
        found.append(w)
        sent = {k: owned(w, run.start[data.architecture]) for k, data in run.clients.items()}
        models.append({k: mixed(v.get(k, sent[k]), sent[k], alpha[k]) for k in sent})
    return found, models


def loss_of(run: Run, k: int):
    """The task's loss of a client."""
    data = run.clients[k]
    return lambda w: cross_entropy(logits(w, data.x), data.y)


def mixed(v: Weights, w: Weights, alpha: float) -> Weights:
    """Alpha v + (1 - alpha) w."""
    return {n: alpha * v[n] + (1 - alpha) * w[n] for n in v}


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for alpha, adaptive in ((0.4, True), (0.7, False)):
        run = played(APFL(SGD, alpha=alpha, adaptive=adaptive), 4, cohorts=COHORTS)
        w, models = reference(run, alpha, adaptive)
        how = "learnt" if adaptive else "fixed"
        yield f"w of four rounds, alpha {how}", gap([s.weights["all"] for s in run.states], w)
        yield f"every client's mixture, alpha {how}", gap(run.models, models)
