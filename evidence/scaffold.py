"""SCAFFOLD, from Algorithm 1 of Karimireddy et al. (ICML 2020), both options of line 12.

No code was read. Where clients have different layers, a layer's x moves by the mean over its owners in the cohort, and
its c by that mean times the share of its owners that took part: with one architecture these are lines 16 and 17.
"""

from collections.abc import Iterator

from evidence.ground import SGD, Run, Weights, cross_entropy, gap, gradient, logits, owned, played
from potluck.core.requests.fit import LocalTraining
from potluck.methods.scaffold import Scaffold

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
ETA_L, ETA_G, K = 0.1, 0.8, 3


def reference(run: Run, option: str, momentum: float = 0.0) -> tuple[list[Weights], list[Weights]]:
    """X and c before the first round and after each."""
    x = dict(max(run.start.values(), key=len))
    c = {name: 0 * w for name, w in x.items()}
    c_i = {k: owned(c, run.start[data.architecture]) for k, data in run.clients.items()}
    found = [x], [c]
    for cohort in COHORTS:
        dy: dict[int, Weights] = {}
        dc: dict[int, Weights] = {}
        for i in cohort:
            mine = owned(x, c_i[i])
            y, plus = local(run, i, mine, owned(c, c_i[i]), c_i[i], option, momentum)
            dy[i] = {n: y[n] - mine[n] for n in y}
            dc[i] = {n: plus[n] - c_i[i][n] for n in y}
            c_i[i] = plus
        x, c = dict(x), dict(c)
        for name in x:
            drawn = [i for i in cohort if name in dy[i]]
            owners = [i for i, held in c_i.items() if name in held]
            if drawn:
                x[name] = x[name] + ETA_G * sum(dy[i][name] for i in drawn) / len(drawn)
                c[name] = c[name] + sum(dc[i][name] for i in drawn) / len(owners)
        found[0].append(x)
        found[1].append(c)
    return found


def local(
    run: Run, i: int, x: Weights, c: Weights, c_i: Weights, option: str, momentum: float
) -> tuple[Weights, Weights]:
    """y_i and the new c_i of one client."""
    data = run.clients[i]

    def f_i(w: Weights) -> Weights:
        return gradient(lambda v: cross_entropy(logits(v, data.x), data.y), w)

    y, moving, passed, factor = x, {n: 0 * w for n, w in x.items()}, 0.0, 0.0
    for _ in range(K):
        g = f_i(y)
        moving = {n: momentum * moving[n] + g[n] - c_i[n] + c[n] for n in y}
        y = {n: y[n] - ETA_L * moving[n] for n in y}
        factor = momentum * factor + 1.0  # how often the gradient of this step and those before are in the step
        passed += factor
    if option == "gradient":
        return y, f_i(x)
    return y, {n: c_i[n] - c[n] + (x[n] - y[n]) / (passed * ETA_L) for n in y}


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    heavy = LocalTraining("sgd", lr=ETA_L, epochs=K, batch_size=10**6, momentum=0.6)
    for what, option, training in (
        ("option II", "path", SGD),
        ("option I", "gradient", SGD),
        ("option II with momentum", "path", heavy),
    ):
        run = played(Scaffold(training, option, ETA_G), 4, cohorts=COHORTS)
        x, c = reference(run, option, training.momentum)
        yield f"x of four rounds, {what}", gap([s.weights["all"] for s in run.states], x)
        yield f"c of four rounds, {what}", gap([s.control["all"] for s in run.states], c)
