"""FedNTD, from eq. 3 to 5 of Lee et al. (NeurIPS 2022), averaged as FedAvg.

No code was read. The loss is cross-entropy + beta L_NTD, L_NTD = tau^2 KL(q_g || q_l) over the classes that are not
true, both softened by tau; the mean over the examples.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, owned, played
from potluck.methods.fedntd import FedNTD

COHORTS = [[0, 1, 2], [0, 2], [1]]


def reference(run: Run, beta: float, tau: float) -> list[Weights]:
    """The server's weights before the first round and after each."""
    w = dict(max(run.start.values(), key=len))
    found = [w]
    for cohort in COHORTS:
        trained = [local(run, k, owned(w, run.start[run.clients[k].architecture]), beta, tau) for k in cohort]
        w = mean_by_layer(trained, [run.clients[k].n for k in cohort], w)
        found.append(w)
    return found


def local(run: Run, k: int, sent: Weights, beta: float, tau: float) -> Weights:
    """A client's weights after three steps."""
    data = run.clients[k]
    q_g = not_true(logits(sent, data.x), data.y, tau)

    def loss(w: Weights) -> Tensor:
        z = logits(w, data.x)
        q_l = not_true(z, data.y, tau)
        kl = torch.stack([(p * (p / q).log()).sum() for p, q in zip(q_g, q_l, strict=True)]).mean()
        return cross_entropy(z, data.y) + beta * tau**2 * kl

    return descended(loss, sent)


def not_true(z: Tensor, y: Tensor, tau: float) -> list[Tensor]:
    """Of each example, the probabilities of the classes that are not its own among themselves."""
    rows = [torch.cat([row[:c], row[c + 1 :]]) for row, c in zip(z, y.tolist(), strict=True)]
    return [(row / tau).exp() / (row / tau).exp().sum() for row in rows]


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for beta, tau in ((1.0, 1.0), (0.3, 3.0)):
        run = played(FedNTD(SGD, beta=beta, temperature=tau), cohorts=COHORTS)
        found = [s.weights["all"] for s in run.states]
        yield f"weights of three rounds, beta {beta}, tau {tau}", gap(found, reference(run, beta, tau))
