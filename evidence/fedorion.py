"""FedORION, from eq. 1 to 3 and Algorithm 1 of the paper (submitted to ICLR 2024; https://openreview.net/forum?id=ZzeXjCQ5CK).

No code is published. The server's batches of noise are those that the engine drew. A client whose model has the global
architecture holds that alone where mutual learning is selective (section 3.2.1). Momentum is left out here.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, gradient, logits, played, recorded
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedorion import FedORION
from potluck.parts.teaching import EnsembleLoss

COHORTS = [[0, 1, 2], [0, 1], [1, 2]]
ETA, ETA_G, T, T_S = 0.1, 0.2, 3, 2


def reference(
    run: Run, z: list[Tensor], selective: bool, sequential: bool
) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """theta_g after each round, and every client's model for inference."""
    theta_g, own, drawn = run.states[0].common, {k: run.start[d.architecture] for k, d in run.clients.items()}, iter(z)
    alone = {k for k, data in run.clients.items() if selective and data.architecture == "toy1"}
    found: list[Weights] = []
    models: list[dict[int, Weights]] = []
    for cohort in COHORTS:
        copies: dict[int, Weights] = {}
        for i in cohort:
            if i in alone:
                copies[i] = descended(lambda w, i=i: labels(run, i, w), theta_g, T, ETA)
            else:
                own[i], copies[i] = mutual(run, i, own[i], theta_g, sequential)
        theta_g = {n: sum(copies[i][n] for i in cohort) / len(cohort) for n in theta_g}  # server, l. 1
        teachers = {i: copies[i] if i in alone else own[i] for i in cohort}
        for _ in range(T_S):
            theta_g = distilled(run, theta_g, teachers, next(drawn))
        found.append(theta_g)
        models.append({k: theta_g if k in alone else own[k] for k in own})
    return found, models


def labels(run: Run, i: int, w: Weights) -> Tensor:
    """The loss of a client's examples."""
    return cross_entropy(logits(w, run.clients[i].x), run.clients[i].y)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL of the teacher's predictions from the student's, the mean over a batch."""
    return (teacher * (teacher / torch.softmax(student, 1)).log()).sum(1).mean()


def mutual(run: Run, i: int, own: Weights, copy: Weights, sequential: bool) -> tuple[Weights, Weights]:
    """theta_i and theta_gi after T steps of eq. 1 and eq. 2."""
    x = run.clients[i].x
    for _ in range(T):
        of_copy, of_own = (torch.softmax(logits(w, x), 1) for w in (copy, own))
        own = stepped(lambda w, p=of_copy: labels(run, i, w) + divergence(p, logits(w, x)), own)
        if sequential:
            of_own = torch.softmax(logits(own, x), 1)
        copy = stepped(lambda w, p=of_own: labels(run, i, w) + divergence(p, logits(w, x)), copy)
    return own, copy


def stepped(loss, w: Weights) -> Weights:
    """One step of gradient descent."""
    g = gradient(loss, w)
    return {n: w[n] - ETA * g[n] for n in w}


def distilled(run: Run, theta_g: Weights, teachers: dict[int, Weights], z: Tensor) -> Weights:
    """One step of eq. 3 on a batch of noise."""
    whole = sum(run.clients[i].n for i in teachers)
    taught = {i: torch.softmax(logits(w, z), 1) for i, w in teachers.items()}

    def l_kd(w: Weights) -> Tensor:
        out = logits(w, z)
        return sum((run.clients[i].n / whole * divergence(p, out) for i, p in taught.items()), torch.zeros(()))

    g = gradient(l_kd, theta_g)
    return {n: theta_g[n] - ETA_G * g[n] for n in theta_g}


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    on_noise = LocalTraining("sgd", lr=ETA_G, epochs=T_S, batch_size=16)
    for what, selective, order in (
        ("Algorithm 1", False, "sequential"),
        ("selective", True, "sequential"),
        ("both by what they predicted before", False, "simultaneous"),
    ):
        method = FedORION(SGD, on_noise, selective=selective, order=order, noise_batches=1)
        with recorded(EnsembleLoss) as z:
            run = played(method, cohorts=COHORTS)
        theirs, models = reference(run, z, selective, order == "sequential")
        yield f"theta_g of three rounds, {what}", gap([state.common for state in run.states[1:]], theirs)
        yield f"every client's model, {what}", gap(run.models, models)
