"""Reconciling conflicting gradients: the quadratic programme of FedIN, and its solutions.

Chan, Jiang, Deng, Ngai. arXiv 2023. https://arxiv.org/abs/2304.00759, section 4.3. Where two equations are given, the
second is that of the authors' revision, https://openreview.net/forum?id=Nh3pX3AnPt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from potluck.core.nets.weights import Weights
from potluck.core.requests.fit import Extras, Observed

Granularity = Literal["tensor", "whole", "kernel"]


@dataclass(frozen=True)
class Reconcile:
    """Z from G_local and G_IN on the intermediate layers, and the gradient of the other layers; a `Fit.combine`.

    Attributes:
        inner: names of the parameters of the intermediate layers.
        rule: "exact" projects G_IN (eq. 13 / 12), "simplified" adds (lambda / 2) G_local to it (eq. 14 / 13).
        multiplier: lambda.
        granularity: what the exact rule projects, see `without_conflict`.
        outside: under the simplified rule the other layers take "half" of lambda times G_local, or G_local ("unit").
    """

    inner: frozenset[str]
    rule: Literal["simplified", "exact"] = "simplified"
    multiplier: float = 1.0
    granularity: Granularity = "tensor"
    outside: Literal["half", "unit"] = "half"

    def __call__(self, gradients: list[Weights], extras: Extras) -> tuple[Weights, Observed]:
        """Z of [G_local, G_IN], a gradient being 0 where its loss does not depend on the weight.

        Observed is whether the two oppose each other: 1 where b = <G_IN, G_local> over all intermediate layers is
        negative, else 0. Single tensors are not counted, since some have gradients that are nothing but rounding.
        """
        local, feature = gradients
        ours = {n: g for n, g in {**local, **feature}.items() if n in self.inner}
        half = self.multiplier / 2
        outer = half if self.outside == "half" and self.rule == "simplified" else 1.0
        z = {name: outer * g for name, g in local.items() if name not in self.inner}
        local, feature = ({n: g.get(n, torch.zeros_like(like)) for n, like in ours.items()} for g in (local, feature))
        products = [feature[n].flatten() @ local[n].flatten() for n in local]
        seen = {"conflict": (torch.stack(products).sum() < 0).float()} if products else {}
        if self.rule == "exact":
            return {**z, **without_conflict(feature, local, self.granularity)}, seen
        return {**z, **{n: feature[n] + half * local[n] for n in local}}, seen


def without_conflict(
    gradients: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    granularity: Granularity = "tensor",
) -> Weights:
    """The nearest gradients to `gradients` whose inner product with `others` is not negative.

    With a = <o, o> and b = <o, g>: g where b >= 0, otherwise g - (b / a) o, the Euclidean projection on the half
    space (FedIN, eq. 13). Where o vanishes, g stays.

    Args:
        gradients: what to project, by name.
        others: what not to oppose, of the same names and shapes.
        granularity: inner products over each "tensor", over the "whole" of all, or over each convolution "kernel".
    """
    if granularity == "whole":
        a = torch.stack([other.square().sum() for other in others.values()]).sum()
        b = torch.stack([(other * gradients[name]).sum() for name, other in others.items()]).sum()
        return {name: _projected(gradients[name], other, a, b) for name, other in others.items()}
    projected: Weights = {}
    for name, other in others.items():
        axes = (-2, -1) if granularity == "kernel" and other.dim() == 4 else tuple(range(other.dim()))
        a = other.square().sum(axes, keepdim=True)
        b = (other * gradients[name]).sum(axes, keepdim=True)
        projected[name] = _projected(gradients[name], other, a, b)
    return projected


def _projected(gradient: Tensor, other: Tensor, a: Tensor, b: Tensor) -> Tensor:
    conflict = (b < 0) & (a > 0)
    return torch.where(conflict, gradient - b / torch.where(a > 0, a, 1.0) * other, gradient)
