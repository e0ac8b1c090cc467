"""FedKEMF, from the deep mutual learning, the ensembles and the server's distillation of Yu et al. (2022).

No code was read. By the method's departures a client's own model is updated first, the peer's probabilities are the
first argument of KL and constant, and theta_g goes on from where it was; it begins as the engine drew it. Every round
has all public rows, and the server takes them at once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedkemf import FedKEMF
from potluck.testing.worlds import CLASSES

COHORTS = [[0, 1, 2], [0, 1], [2], [1, 2]]
ETA_S, STEPS = 0.3, 4


def reference(
    run: Run, ensemble: str, mutual: bool, sequential: bool
) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """theta_g before the first round and after each, and every client's own model after each."""
    public = run.federation.public
    P = public.batch(torch.arange(len(public))).inputs.double()
    theta_g, own = run.states[0].common, {k: run.start[data.architecture] for k, data in run.clients.items()}
    found, models = [theta_g], list[dict[int, Weights]]()
    for cohort in COHORTS:
        copies: list[Weights] = []
        for i in cohort:
            own[i], copy = learnt(run, i, own[i], theta_g, mutual, sequential)
            copies.append(copy)
        taught = fused([logits(copy, P) for copy in copies], ensemble)
        theta_g = descended(lambda w, q=taught: divergence(q, logits(w, P)), theta_g, STEPS, ETA_S)
        found.append(theta_g)
        models.append(dict(own))
    return found, models


def fused(z: list[Tensor], ensemble: str) -> Tensor:
    """The teacher's probabilities."""
    if ensemble == "max":
        return torch.softmax(torch.stack(z).max(0).values, 1)
    votes = [F.one_hot(z_i.argmax(1), CLASSES).double() for z_i in z]
    return sum(votes if ensemble == "vote" else [torch.softmax(z_i, 1) for z_i in z], torch.zeros(())) / len(z)


def divergence(q: Tensor, z: Tensor) -> Tensor:
    """KL of q from the network's predictions, the mean over a batch; a probability of 0 brings nothing."""
    return (torch.xlogy(q, q) - q * F.log_softmax(z, 1)).sum(1).mean()


def learnt(run: Run, i: int, own: Weights, copy: Weights, mutual: bool, sequential: bool) -> tuple[Weights, Weights]:
    """theta_i and theta_gi after a client's local training."""
    x, y = run.clients[i].x, run.clients[i].y

    def loss(w: Weights, peer: Tensor) -> Tensor:
        z = logits(w, x)
        return cross_entropy(z, y) + (divergence(torch.softmax(peer, 1), z) if mutual else 0)

    for _ in range(3):
        of_own, of_copy = logits(own, x), logits(copy, x)
        own = descended(lambda w, p=of_copy: loss(w, p), own, 1)
        if sequential:
            of_own = logits(own, x)
        copy = descended(lambda w, p=of_own: loss(w, p), copy, 1)
    return own, copy


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    server = LocalTraining("sgd", lr=ETA_S, epochs=STEPS, batch_size=10**6)
    for what, ensemble, mutual, order in (
        ("mean", "mean", True, "sequential"),
        ("max, both at once", "max", True, "simultaneous"),
        ("vote, without mutual learning", "vote", False, "sequential"),
    ):
        run = played(FedKEMF(SGD, server, ensemble=ensemble, mutual=mutual, order=order), 4, cohorts=COHORTS)
        theta_g, own = reference(run, ensemble, mutual, order == "sequential")
        yield f"theta_g of four rounds, {what}", gap([state.common for state in run.states], theta_g)
        yield f"every client's own model, {what}", gap(run.models, own)
