"""APFL: adaptive personalised federated learning.

Deng, Kamani, Mahdavi. 2020. https://arxiv.org/abs/2003.13461. Algorithm 1.

A client predicts with a mixture of the global model and one of its own, weight by weight. Beside its share of the
global training it trains its own model where it counts, inside the mixture, and learns how much of it to take.

Symbols
    w         state.weights; w_i is client.model in training
    v_i       the module "own", kept by the client
    v_bar_i   alpha_i v_i + (1 - alpha_i) w
    alpha_i   client.state["alpha"], at first alpha
    eta       training.lr, in the round that it is

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    alpha=0.0 adaptive=false equals fedavg sharing.weighting="uniform"
    alpha=1.0 adaptive=false training.batch_size=1000 approaches local training.batch_size=1000 on architectures=1
    training.lr=0.0 stays at rest

Departures from the paper
    1. alpha_i takes its step, alpha_i - eta <v_i - w, grad f_i(v_bar_i)>, within 0 and 1, once a round, as in the
       authors' code; it does so before the local steps, with the gradient of all of the client's data.
    2. The mixture is of weights, as in Algorithm 1; the authors' code mixes the two models' outputs.
    3. Clients are evaluated with the mixture of v_i and the newest w.
    4. Layers owned by some clients only are averaged over those, see `sharing`; v_i is a network of the client's own
       architecture, and begins as the first w that it is sent.
    5. The mixture has BatchNorm statistics of its own, those of v_i's training.
    6. Local training defaults to Adam, like all methods here, for w_i and v_i together; weight decay would pull at v_i
       rather than at the mixture. The paper has SGD.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class APFL(fl.Averages):
    """Hyper-parameters of APFL, beside those of `Averages`.

    Attributes:
        alpha: of every client at first, the share of its own model in the mixture.
        adaptive: whether clients learn their alpha.
        sharing: who averages with whom, with which weights.
    """

    aligns_classes = True

    variants = {"fixed": {"adaptive": False}, "mostly own": {"alpha": 0.9}}

    alpha: Annotated[float, fl.at_least(0), fl.at_most(1)] = 0.5
    adaptive: bool = True
    sharing: fl.Averaging = fl.Sharing(weighting="uniform")

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        v, alpha = client.module("own", client.copy), float(client.state.get("alpha", self.alpha))
        if self.adaptive:
            gap = fl.weights.minus(fl.parameters_of(v), fl.parameters_of(client.model))
            bar = fl.load(client.twin(), mixed(v, client.model, alpha), partial=True)
            found = yield fl.Gradient(bar, client.objective, client.train)
            slope = torch.stack([(gap[name] * gradient).sum() for name, gradient in found.items()]).sum()
            alpha = min(1.0, max(0.0, alpha - self.training.at(client.round).lr * float(slope)))
            client.state["alpha"] = alpha
            client.note(alpha=alpha)
        both = nn.ModuleDict({"w": client.model, "v": v})
        losses = (GlobalLoss(client.criterion), MixtureLoss(client.criterion))
        yield fl.Fit(both, losses, client.train, self.training, extras={"alpha": torch.tensor(alpha)})
        return self.sharing.reply(client)

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> Generator[fl.Request, Any, nn.Module]:
        w, v = self.sharing.deploy(client, message), client.module("own", client.copy)
        alpha = float(client.state.get("alpha", self.alpha))
        bar = fl.load(v, mixed(v, w, alpha), partial=True)
        yield fl.NormStatistics(bar, client.train, layers="unlearnt")
        return bar

    def global_model(self, state: fl.sharing.Averaged, server: fl.Server) -> None:
        """None: every client has a mixture of its own."""


def mixed(v: nn.Module, w: nn.Module, alpha: float | Tensor) -> fl.Weights:
    """The parameters of v_bar; no gradient flows to those of w."""
    theirs = dict(w.named_parameters())
    return {n: theirs[n].detach().lerp(own, alpha) for n, own in v.named_parameters()}


@dataclass(frozen=True)
class GlobalLoss:
    """The task's loss of w_i."""

    criterion: fl.Criterion

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch."""
        return self.criterion(net.get_submodule("w")(batch.inputs), batch.targets)


@dataclass(frozen=True)
class MixtureLoss:
    """The task's loss of v_bar, whose gradient in v_i is alpha_i times that in v_bar."""

    criterion: fl.Criterion

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch; the extras have alpha_i as "alpha"."""
        v, w = net.get_submodule("v"), net.get_submodule("w")
        return self.criterion(fl.call_with(v, mixed(v, w, extras["alpha"]), batch.inputs), batch.targets)
