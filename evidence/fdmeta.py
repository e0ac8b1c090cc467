"""FDMeta, from the abstract of Liu et al. (ICC 2022) and the method's reconstruction of what that leaves open.

No code was read. By the method's departures the server asks for labels of the examples of which its model is least
certain, by entropy, largest probability or margin, beside a share of random ones, and all are random in the first
round. The shuffle of public examples is the engine's generator's; which of them are chosen is computed here.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played
from potluck.core.ground.rng import fold_in
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fdmeta import FDMeta

COHORTS = [[0, 1, 2], [0, 2], [1, 2]]
N_P = 20
CLIENTS, SERVER = (0.2, 2), (0.3, 4)  # rates and numbers of steps on the labels


def reference(
    run: Run, sampling: str, exploration: float, distil: bool
) -> tuple[list[Weights], list[dict[int, Weights]]]:
    """Theta_g before the first round and after each, and every client's model after each."""
    theta_g, theta = run.start["toy1"], {k: run.start[data.architecture] for k, data in run.clients.items()}
    public = run.federation.public
    x = public.batch(torch.arange(len(public))).inputs.double()
    found, models = [theta_g], list[dict[int, Weights]]()
    for t, cohort in enumerate(COHORTS, start=1):
        shuffled = torch.randperm(len(x), generator=fold_in(0, "server", t).generator()).tolist()
        certainty = sampling if t > 1 else "random"
        P_t = x[chosen(shuffled, torch.softmax(logits(theta_g, x), 1), certainty, exploration)]
        for k in cohort:
            theta[k] = descended(lambda v, d=run.clients[k]: cross_entropy(logits(v, d.x), d.y), theta[k])
        p = torch.stack([torch.softmax(logits(theta[k], P_t), 1) for k in cohort]).mean(0)
        theta_g = taught(theta_g, P_t, p, *SERVER)
        for k in cohort if distil else ():
            theta[k] = taught(theta[k], P_t, p, *CLIENTS)
        found.append(theta_g)
        models.append(dict(theta))
    return found, models


def chosen(shuffled: list[int], p: Tensor, sampling: str, exploration: float) -> list[int]:
    """The rows of P_t: the least certain, and the first others of the shuffle."""
    if sampling == "random":
        return shuffled[:N_P]
    top = p.sort(1, descending=True).values
    doubt = {"entropy": -(p * p.log()).sum(1), "confidence": -top[:, 0], "margin": top[:, 1] - top[:, 0]}[sampling]
    least = sorted(shuffled, key=lambda row: -float(doubt[row]))[: round((1 - exploration) * N_P)]
    return least + [row for row in shuffled if row not in least][: N_P - len(least)]


def taught(theta: Weights, x: Tensor, p: Tensor, lr: float, steps: int) -> Weights:
    """After steps along the cross-entropy with p."""
    return descended(lambda v: -(p * F.log_softmax(logits(v, x), 1)).sum(1).mean(), theta, steps, lr)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    clients, server = (LocalTraining("sgd", lr=lr, epochs=n, batch_size=10**6) for lr, n in (CLIENTS, SERVER))
    for sampling, exploration, distil in (
        ("entropy", 0.2, True),
        ("confidence", 0.0, True),
        ("margin", 0.5, True),
        ("random", 0.2, False),
    ):
        options = {"sampling": sampling, "exploration": exploration, "distil_clients": distil}
        run = played(FDMeta(SGD, clients, server, N_P, **options), cohorts=COHORTS)
        theta_g, models = reference(run, sampling, exploration, distil)
        what = sampling if distil else f"{sampling}, the server alone learns"
        yield f"theta_g of three rounds, {what}", gap([s.common for s in run.states], theta_g)
        yield f"every client's model, {what}", gap(run.models, models)
