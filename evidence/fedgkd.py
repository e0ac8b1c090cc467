"""FedGKD, from eq. 4 to 6 of Yao et al. (2021), averaged as FedAvg.

No code was read; as the method's departures say, gamma multiplies the divergence and not its half, there is no teacher
in the first round, and the initial weights are never part of one. The teacher is the mean of the last models, and the
divergence gamma T^2 KL(teacher || student), or the mean squared gap of the logits.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, mean_by_layer, owned, played
from potluck.methods.fedgkd import FedGKD

COHORTS = [[0, 1, 2], [0, 2], [1], [0, 1, 2]]
GAMMA, T, BUFFER = 0.4, 0.5, 2


def reference(run: Run, divergence: str) -> list[Weights]:
    """The server's weights before the first round and after each."""
    w = dict(max(run.start.values(), key=len))
    found = [w]
    for cohort in COHORTS:
        held = found[1:][-BUFFER:]
        teacher = {n: sum(one[n] for one in held) / len(held) for n in w} if held else None
        trained = [local(run, k, w, teacher, divergence) for k in cohort]
        w = mean_by_layer(trained, [run.clients[k].n for k in cohort], w)
        found.append(w)
    return found


def local(run: Run, k: int, w: Weights, teacher: Weights | None, divergence: str) -> Weights:
    """A client's weights after three steps."""
    data = run.clients[k]
    sent = owned(w, run.start[data.architecture])
    taught = logits(owned(teacher, sent), data.x) if teacher else None

    def loss(w: Weights) -> Tensor:
        z = logits(w, data.x)
        supervised = cross_entropy(z, data.y)
        if taught is None:
            return supervised
        if divergence == "mse":
            return supervised + GAMMA * (z - taught).square().mean()
        p, q = ((one / T).exp() / (one / T).exp().sum(1, keepdim=True) for one in (taught, z))
        return supervised + GAMMA * T**2 * (p * torch.log(p / q)).sum(1).mean()

    return descended(loss, sent)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    for divergence, temperature in (("kl", T), ("mse", 1.0)):
        method = FedGKD(SGD, gamma=GAMMA, temperature=temperature, divergence=divergence, buffer=BUFFER)
        run = played(method, 4, cohorts=COHORTS)
        found = [s.weights["all"] for s in run.states]
        yield f"weights of four rounds, {divergence}", gap(found, reference(run, divergence))
