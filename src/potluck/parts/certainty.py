"""How certain a client is that an example is of its own kind, by a logistic regression against public ones: FedAUX."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

LossesCount = Literal["sum", "mean"]

_MOST_STEPS = 100
_TINY = 1e-12


def certainty(own: Tensor, negatives: Tensor, asked: Tensor, penalty: float, regression: LossesCount) -> Tensor:
    """The probability that each of the features `asked` (rows, width) is of the kind of `own` and not of `negatives`.

    Returns:
        (rows,), from 0 to 1.
    """
    x = torch.cat([own, negatives]).double()
    kind = torch.cat([torch.ones(len(own)), -torch.ones(len(negatives))]).double()
    if regression == "sum":
        longest = x.norm(dim=1).max()
        x, asked = (F.pad(shortened(f, longest), (0, 1), value=1.0) for f in (x, asked.double()))  # an intercept
    else:
        longest = negatives.double().norm(dim=1).max()
        x, asked = (shortened(f, f.norm(dim=1, keepdim=True).clamp(min=longest)) for f in (x, asked.double()))
    penalised = torch.ones(x.shape[1]).double()
    penalised[own.shape[1] :] = 0.0
    w = logistic(x, kind, penalty * penalised, regression)
    return (asked @ w).sigmoid().to(own.dtype)


def shortened(features: Tensor, length: Tensor) -> Tensor:
    """Features (rows, width) divided by a length, or a row's by its own; what has none, being all 0, stays as it is."""
    return features / length.where(length > 0, 1.0)


def logistic(x: Tensor, kind: Tensor, penalty: Tensor, regression: LossesCount) -> Tensor:
    """The weights w (width,) that minimise the logistic losses log(1 + exp(-kind x w)) + 1/2 sum of penalty w^2.

    By Newton's method, with shorter steps where a whole one would lead uphill; to the last digits. Of more penalised
    weights than examples the best are a combination of the examples, each divided by the penalties: what is looked for
    are its numbers, in an orthonormal basis.

    Args:
        x: (n, width), in double precision.
        kind: 1 or -1 (n,); both occur.
        penalty: of each weight (width,), 0 for no more than an intercept.
        regression: whether the losses' sum or their mean counts.
    """
    each = 1.0 if regression == "sum" else 1 / len(x)
    if (penalised := penalty > 0).sum() <= len(x):
        return _newton(x, kind, penalty, each)
    scales, w = penalty[penalised].sqrt(), torch.zeros_like(penalty)
    basis, numbers = torch.linalg.qr((x[:, penalised] / scales).T)
    smaller = torch.cat([numbers.T, x[:, ~penalised]], dim=1)
    found = _newton(smaller, kind, torch.cat([torch.ones_like(kind), penalty[~penalised]]), each)
    w[penalised], w[~penalised] = basis @ found[: len(x)] / scales, found[len(x) :]
    return w


def _newton(x: Tensor, kind: Tensor, penalty: Tensor, each: float) -> Tensor:
    """The weights of `logistic`, of losses that weigh `each`."""

    def value(w: Tensor) -> Tensor:
        return each * F.softplus(-kind * (x @ w)).sum() + (penalty * w.square()).sum() / 2

    w = torch.zeros_like(penalty)
    for _ in range(_MOST_STEPS):
        wrong = (-kind * (x @ w)).sigmoid()
        gradient = penalty * w - each * x.T @ (kind * wrong)
        curvature = each * (x.T * (wrong * (1 - wrong))) @ x + torch.diag(penalty + _TINY)
        step = torch.linalg.solve(curvature, gradient)
        if gradient @ step <= _TINY**2:
            break
        size, before = 1.0, value(w)
        while value(w - size * step) > before * (1 + _TINY) and size > _TINY:
            size /= 2
        w = w - size * step
    return w
