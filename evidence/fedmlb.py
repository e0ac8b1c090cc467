"""FedMLB, from eq. 3 to 8 of Kim et al. (ICML 2022), averaged as FedAvg.

No code was read; as the method's departures say, the gradient of KL flows into both of its sides, and KL is not
multiplied by tau squared. Path m takes the client's stages up to the m-th and those of the net that was sent behind it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, mean_by_layer, owned, played
from potluck.methods.fedmlb import FedMLB

COHORTS = [[0, 1, 2], [0, 2], [1]]
L1, L2, L3, TAU = 0.9, 0.5, 0.7, 2.0


def reference(run: Run, teacher_learns: bool) -> list[Weights]:
    """The server's weights before the first round and after each."""
    w = dict(max(run.start.values(), key=len))
    found = [w]
    for cohort in COHORTS:
        trained = [local(run, k, owned(w, run.start[run.clients[k].architecture]), teacher_learns) for k in cohort]
        w = mean_by_layer(trained, [run.clients[k].n for k in cohort], w)
        found.append(w)
    return found


def local(run: Run, k: int, sent: Weights, teacher_learns: bool) -> Weights:
    """A client's weights after three steps."""
    data = run.clients[k]
    depth = sum(name.endswith(".0.weight") for name in sent)

    def loss(w: Weights) -> Tensor:
        own = path(w, w, data.x, depth)
        hybrids = [path(w, sent, data.x, m) for m in range(1, depth + 1)]
        log_q = torch.log_softmax(own / TAU, 1)
        total = L1 * cross_entropy(own, data.y)
        for z in hybrids:
            log_p = torch.log_softmax((z if teacher_learns else z.detach()) / TAU, 1)
            kl = (log_p.exp() * (log_p - log_q)).sum(1).mean()
            total = total + (L2 * cross_entropy(z, data.y) + L3 * kl) / depth
        return total

    return descended(loss, sent)


def path(w: Weights, frozen: Weights, x: Tensor, m: int) -> Tensor:
    """Logits of the first m stages of w and what lies behind them in `frozen`."""
    stages = [name.removesuffix(".0.weight") for name in w if name.endswith(".0.weight")]
    for number, stage in enumerate(stages):
        of = w if number < m else frozen
        x = (x @ of[f"{stage}.0.weight"].T + of[f"{stage}.0.bias"]).clamp(min=0)
    head = w if w is frozen else frozen
    return x @ head["head.weight"].T + head["head.bias"]


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for what, learns in (("the teacher learns", True), ("a constant teacher", False)):
        method = FedMLB(SGD, lambda1=L1, lambda2=L2, lambda3=L3, temperature=TAU, teacher_learns=learns)
        run = played(method, cohorts=COHORTS)
        yield f"weights of three rounds, {what}", gap([s.weights["all"] for s in run.states], reference(run, learns))
