"""Per-FedAvg: a model from which one step of a client's own leads to its personal one.

Fallah, Mokhtari, Ozdaglar. NeurIPS 2020. https://arxiv.org/abs/2002.07948. Algorithm 1.

Clients do not descend their loss but the loss after one step of gradient descent on their data, so that the average is
a good place to start from. Its gradient has second derivatives: they are left out, or approximated by a difference of
two gradients.

Symbols
    w         state.weights, and client.model in training
    alpha     alpha
    beta      training.lr
    tau       training.steps, or training.epochs
    D, D', D''    thirds of a batch
    delta     delta

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    training.lr=0.0 alpha=0.0 stays at rest
    alpha=0.0 averages each layer over its owners on batchnorm=true
    sharing.scope="layer" equals perfedavg sharing.scope="architecture" on architectures=1

Departures from the paper
    1. A step's three sets of examples are the thirds of one batch, so that all methods see as many examples a step; of
       fewer than six examples each set is all of them.
    2. The Hessian's matrix times v is (grad f(w + delta v) - grad f(w - delta v)) / (2 delta), as the paper
       proposes; `rule="exact"` differentiates twice instead.
    3. A client is evaluated after one step of size alpha with the gradient of all of its training data; before the
       first round without.
    4. Layers owned by some clients only are averaged over those, see `sharing`; clients weigh alike, as in Algorithm 1.
    5. BatchNorm's running statistics move with every third that is computed, and are averaged like those of FedAvg.
    6. Local training defaults to Adam, like all methods here; the paper has SGD with beta = 0.001.
"""

from collections.abc import Generator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from potluck import fl

_ENOUGH = 6  # examples of a batch whose thirds have two each, as BatchNorm needs
Rule = Literal["first-order", "hessian-free", "exact"]

TWICE = replace(fl.derivatives.TWICE, advice="choose another model, or method.rule = 'first-order' or 'hessian-free'")


@dataclass(frozen=True)
class PerFedAvg(fl.Averages):
    """Hyper-parameters of Per-FedAvg, beside those of `Averages`.

    Attributes:
        alpha: size of the step that a client takes for itself.
        rule: what becomes of the second derivatives: left out (FO), by a difference of gradients (HF), or exact.
        delta: of that difference.
        sharing: who averages with whom, with which weights.
    """

    aligns_classes = True

    variants = {"Hessian-free": {"rule": "hessian-free"}, "exact": {"rule": "exact"}}

    alpha: Annotated[float, fl.at_least(0)] = 0.01
    rule: Rule = "first-order"
    delta: Annotated[float, fl.above(0)] = 0.001
    sharing: fl.Averaging = fl.Sharing(weighting="uniform")

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | ({TWICE} if self.rule == "exact" else set[fl.Need]())

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        objective = MetaLoss(client.criterion, self.alpha, self.rule, self.delta)
        yield fl.Fit(client.model, objective, client.train, self.training)
        return self.sharing.reply(client)

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> Generator[fl.Request, Any, nn.Module]:
        self.sharing.deploy(client, message)
        steps, whole = int(client.round > 0), len(client.train)
        return (yield from fl.adapting.adapted(client, client.train, self.alpha, steps, whole))

    def global_model(self, state: fl.sharing.Averaged, server: fl.Server) -> None:
        """None: every client takes a step of its own."""


@dataclass(frozen=True)
class MetaLoss:
    """F(w) = f(w - alpha grad f(w; D); D'), with the gradient that a rule gives it."""

    criterion: fl.Criterion
    alpha: float
    rule: Rule
    delta: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch."""
        first, second, third = (slice(k, None, 3) if len(batch.targets) >= _ENOUGH else slice(None) for k in range(3))
        w = {name: weight for name, weight in net.named_parameters() if weight.requires_grad}

        def f(weights: Mapping[str, Tensor], part: slice) -> Tensor:
            return self.criterion(fl.call_with(net, weights, fl.rows_of(batch.inputs, part)), batch.targets[part])

        exact = self.rule == "exact"
        with fl.derivatives.twice() if exact else nullcontext():
            before = f(w, first)
        stepped = fl.weights.plus(w, slope(before, w, keep=exact), -self.alpha)
        loss = f(stepped, second)
        if self.rule != "hessian-free":
            return loss
        v = {n: g.detach() for n, g in slope(loss, stepped, keep=True).items()}
        slopes: list[fl.Weights] = []
        for delta in (self.delta, -self.delta):
            near = {n: (w[n] + delta * v[n]).detach().requires_grad_() for n in w}
            slopes.append(slope(f(near, third), near))
        ahead, behind = slopes
        bent = {n: self.alpha * (ahead[n] - behind[n]) / (2 * self.delta) for n in w}
        return loss - torch.stack([((w[n] - w[n].detach()) * bent[n]).sum() for n in w]).sum()  # its value is the loss


def slope(loss: Tensor, weights: Mapping[str, Tensor], keep: bool = False) -> fl.Weights:
    """The gradient of a loss by name, zero where it does not depend on the weights; `keep` to differentiate it too."""
    found = torch.autograd.grad(
        loss, list(weights.values()), create_graph=keep, allow_unused=True, materialize_grads=True
    )
    return dict(zip(weights, found, strict=True))
