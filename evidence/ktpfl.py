"""KT-pFL, from the objective of Zhang et al. (NeurIPS 2021), and by the update of coefficients of the authors' code.

No code was read: the code's step and softmax, and how a part of the clients uses its part of c, are as in the method's
departures, and so is that a client trains before its first exchange. Public rows are those that the server drew.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from evidence.ground import SGD, Run, Weights, cross_entropy, descended, gap, logits, played
from potluck.core.requests.fit import LocalTraining
from potluck.methods.ktpfl import KTpFL
from potluck.testing.worlds import CLASSES, World

COHORTS = [[0, 1, 2, 3], [0, 2, 3], [1, 3]]
T, RHO, ETA_C, ETA_D, STEPS = 2.0, 0.6, 6.0, 0.2, 2  # a step of 6 takes some coefficients to 0


def reference(run: Run, paper: bool, mean: bool, pretrain: bool) -> tuple[list[Tensor], list[dict[int, Weights]]]:
    """The coefficients before the first round and after each, and every client's model after each."""
    public = run.federation.public
    w, N = {k: run.start[data.architecture] for k, data in run.clients.items()}, len(run.clients)
    c, trained = torch.full((N, N), 1 / N), set[int]()
    found, models = [c], list[dict[int, Weights]]()
    for t, cohort in enumerate(COHORTS):
        rows = run.sent["predict_public"][t][cohort[0]]["rows"]
        D_r = public.batch(rows).inputs.double()
        for k in set(cohort) - trained if pretrain else ():
            w[k] = revisited(run, k, w[k])
        trained |= set(cohort)
        s = torch.stack([torch.softmax(logits(w[k], D_r) / T, 1) for k in cohort])
        c, learn = c.clone(), projected if paper else by_softmax
        for place, k in enumerate(cohort):
            share = c[k, cohort].sum()
            c[k, cohort] = share * learn(c[k, cohort] / share, s, place)
            t_k = mixed(c[k, cohort] / share, s)
            by = CLASSES if mean else 1
            w[k] = descended(lambda v, q=t_k, D=D_r, by=by: divergence(q, logits(v, D) / T) / by, w[k], STEPS, ETA_D)
            w[k] = revisited(run, k, w[k])
        found.append(c)
        models.append(dict(w))
    return found, models


def revisited(run: Run, k: int, w: Weights) -> Weights:
    """A client's weights after training on its own data."""
    return descended(lambda v, d=run.clients[k]: cross_entropy(logits(v, d.x), d.y), w)


def divergence(q: Tensor, z: Tensor) -> Tensor:
    """KL of q from softmax(z), the mean over examples."""
    return (q * (q.log() - F.log_softmax(z, 1))).sum(1).mean()


def mixed(c_k: Tensor, s: Tensor) -> Tensor:
    """t_k, the sum over l of c_kl s_l."""
    return (c_k[:, None, None] * s).sum(0)


def unequal(c_k: Tensor) -> Tensor:
    """Of each coefficient its squared distance from 1 / N."""
    return (c_k - 1 / len(c_k)) ** 2


def slope(objective: Callable[[Tensor], Tensor], c_k: Tensor) -> Tensor:
    """The gradient of an objective in c_k."""
    leaf = c_k.clone().requires_grad_()
    return torch.autograd.grad(objective(leaf), leaf)[0]


def projected(c_k: Tensor, s: Tensor, k: int) -> Tensor:
    """A step down KL(t_k || s_k) + rho |c_k - 1/N|^2, and the nearest distribution, found by bisection."""
    g = slope(lambda c: divergence(mixed(c, s), s[k].log()) + RHO * unequal(c).sum(), c_k)
    v = c_k - ETA_C * g
    low, high = v.min() - 1, v.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (v - middle).clamp(min=0).sum() > 1 else (low, middle)
    return (v - low).clamp(min=0)


def by_softmax(c_k: Tensor, s: Tensor, k: int) -> Tensor:
    """The code's step, whose size is sought five times over, and softmax(5 c_k)."""
    g = slope(lambda c: ((mixed(c, s) - s[k]) ** 2).mean() + RHO * unequal(c).mean(), c_k)
    step = 1.0
    for _ in range(5):
        step = step / 5 if step * g.abs().mean() > 0.01 else step
        step = step * 5 if step * g.abs().mean() < 0.01 else step
    return torch.softmax(5 * (c_k - step * g), 0)


def evidence() -> Iterator[tuple[str, float]]:
    """What was compared, and the largest difference."""
    distillation = LocalTraining("sgd", lr=ETA_D, epochs=STEPS, batch_size=10**6)
    for what, update, reduction, pretrain in (
        ("by softmax", "softmax", "batchmean", True),
        ("projected", "projected", "batchmean", True),
        ("by softmax, mean over classes, no pre-training", "softmax", "mean", False),
    ):
        options = {"update": update, "reduction": reduction, "pretrain": pretrain, "coefficient_lr": ETA_C}
        method = KTpFL(SGD, distillation, 40, temperature=T, rho=RHO, **options)
        run = played(method, 3, World(clients=4), COHORTS)
        c, models = reference(run, update == "projected", reduction == "mean", pretrain)
        yield f"coefficients of three rounds, {what}", gap([state.coefficients for state in run.states], c)
        yield f"every client's model, {what}", gap(run.models, models)
