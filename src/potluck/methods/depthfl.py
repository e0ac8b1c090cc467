"""DepthFL: depthwise federated learning for heterogeneous clients.

Kim, Yu, Kim, Moon. ICLR 2023. https://openreview.net/forum?id=pf8RIZTMU58. Algorithm 1, with FedDyn as its optimiser.

There is one global network with a classifier behind every part of it. A client trains as many leading parts as it
can, and all of their classifiers, which also teach one another. The server averages each layer over the clients that
have it. The mean of the classifiers' outputs predicts.

Symbols
    W         state.weights, of the whole network with all its classifiers
    d         the classifiers that a client has, one for each level up to its own
    z_i, p_i  the outputs of classifier i, and their softmax
    w(t)      consistency, of round t, which grows to 1
    h         state.h
    g_k       client.state["g"]; kept by the client, also while it is not drawn
    alpha     alpha
    K         all clients, whether they have a layer or not

Wire
    down      weights at most |weights|, buffers at most |buffers|
    up        weights at most |weights|, buffers at most |buffers|

Limits
    levels=[1.0] alpha=0.0 equals fedavg sharing.weighting="uniform" on capacity=1.0
    levels=[1.0] alpha=0.3 training.clip_norm=10.0 approaches feddyn alpha=0.3 on capacity=1.0
    equals depthfl consistency=0.0 on capacity=0.25
    training.lr=0.0 stays at rest

Departures from the paper
    1. A level is a share of the blocks of any network in stages, rounded down; with the default levels those of ResNet
       are the paper's, a stage each. A client has the largest level that its capacity allows; the authors' code deals
       levels by the client's number.
    2. As in the authors' code a classifier behind a feature map is a gate and a row of separable convolutions with a
       stride, until the map is as small and as wide as the network's last (`exits`). The gate's map is widened to the
       size of what it gates, which need not be even. Classifiers of other features, and all of them with
       exits="linear", are a norm, a mean over positions and a linear layer. Initial weights are torch's.
    3. A layer's h is divided by the number of all clients, as in the authors' code, where Potluck's FedDyn counts the
       layer's owners. With alpha = 0 the client's terms and h are left out, which is the authors' variant with FedAvg.
    4. The authors' code adds 1e-7 to the probabilities of the classifier that teaches.
    5. Local training defaults to Adam, like all methods here; the authors' code has SGD with 0.1 * 0.998^t, weight
       decay 0.001, batches of 50 and 5 epochs, and alpha = 0.1. They grow w(t) over 300 of 1000 rounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Annotated, Literal

import torch
from torch import Size, Tensor, nn

from potluck import fl

EQUALLY = fl.Sharing(weighting="uniform")


@dataclass(frozen=True)
class State:
    """The whole network with all its classifiers: weights, BatchNorm statistics, and the dual variable of FedDyn."""

    weights: fl.Weights
    buffers: fl.Weights
    h: fl.Weights


@dataclass(frozen=True)
class DepthFL(fl.depth.DepthLevels[State]):
    """Hyper-parameters of DepthFL, beside those of `DepthLevels`.

    Attributes:
        exits: "bottleneck" for the paper's classifiers behind feature maps, or "linear" for small ones.
        consistency: the weight of what classifiers teach one another, once it is grown; 0 for none.
        ramp: rounds in which it grows; with 0 it is there at once.
        alpha: strength of FedDyn's regulariser, which keeps weights moving where the rate falls much; 0 for FedAvg.
        combine: how the clients' values of a number become one.
    """

    variants = {
        "small classifiers": {"exits": "linear"},
        "federated averaging": {"alpha": 0.0},
        "no self-distillation": {"consistency": 0.0},
        "median": {"combine.rule": "median"},
    }

    aligns_classes = True
    sums_suffice = True
    exits: Literal["bottleneck", "linear"] = "bottleneck"
    consistency: Annotated[float, fl.at_least(0)] = 1.0
    ramp: Annotated[int, fl.at_least(0)] = 300
    alpha: Annotated[float, fl.at_least(0)] = 0.1
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        teaches = fl.Need.CLASSES if self.consistency and len(self.levels) > 1 else fl.Need.ONE_OUTPUT
        return super().needs() | {teaches}

    def init(self, server: fl.Server) -> State:
        net = self.whole(server)
        return State(fl.parameters_of(net), fl.buffers_of(net), fl.weights.zeros_like(fl.parameters_of(net)))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        messages = {i: self.inference_message(state, i, server) for i in cohort.ids}
        equally = replace(EQUALLY, combine=self.combine)
        means = equally.means(cohort.stream(self.local_update, messages), self.roster(server), "weights", "buffers")
        mean, owners = means.over({"all": {}}, "weights")["all"], means.coverage("weights").get("all", {})
        drift = {n: (owners[n] / len(server.roster) * (w - state.weights[n])).to(w.dtype) for n, w in mean.items()}
        h = fl.weights.plus(state.h, drift, -self.alpha)
        if self.alpha:
            mean = fl.weights.plus(mean, h, -1 / self.alpha)
        server.note(h_norm=fl.sharing.norm({"all": h}))
        return State({**state.weights, **mean}, means.over({"all": state.buffers}, "buffers")["all"], h)

    def summed(
        self, handler: str, member: fl.Member, message: fl.Message, reply: fl.Message, server: fl.Server
    ) -> fl.ToSum:
        member = self.member(server, member.id)
        weights, buffers = (
            fl.summing.summed_layers(reply, entry, member, message.get(entry, {})) for entry in ("weights", "buffers")
        )
        return fl.ToSum({**weights, **buffers})

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        net, sent = self.filled(client, message), message["weights"]
        extras = {"sent": sent, "g": client.state.get("g") or fl.weights.zeros_like(sent)}
        objective = fl.losses.DynamicLoss(ExitsLoss(client.criterion, self.weight(client.round)), self.alpha)
        yield fl.Fit(net, objective, client.train, self.training, extras=extras)
        if self.alpha:
            client.state["g"] = fl.weights.plus(extras["g"], fl.weights.minus(fl.parameters_of(net), sent), -self.alpha)
        return self.reply(net)

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        return ensemble(self.filled(client, message))

    def global_model(self, state: State, server: fl.Server) -> nn.Module | None:
        net = self.net(server, max(self.levels))
        fl.load(net, {**state.weights, **state.buffers})
        return ensemble(net)

    def exit_behind(self, shapes: Sequence[Size]) -> fl.exits.ExitBuilder:
        if self.exits == "linear":
            return fl.exits.small_exit
        return partial(fl.exits.bottleneck_exit, shapes)

    def weight(self, number: int) -> float:
        """w(t) of a round, counted from 1."""
        left = max(0.0, 1 - (number - 1) / self.ramp) if self.ramp else 0.0
        return self.consistency * math.exp(-5 * left**2)


@dataclass(frozen=True)
class ExitsLoss:
    """A client's loss L_k: of each classifier by labels, and by what each of the others says."""

    criterion: fl.Criterion
    weight: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch; with one classifier it is the task's loss, bit for bit."""
        outputs = list(fl.stages.exit_outputs(net, batch.inputs).values())
        losses = [self.criterion(z, batch.targets) for z in outputs]
        if self.weight:
            taught = [fl.losses.distillation(z, teacher) for z, teacher in permutations(outputs, 2)]
            losses += [self.weight / (len(outputs) - 1) * divergence for divergence in taught]
        return torch.stack(losses).sum()


class Ensemble(nn.Module):
    """The mean of all classifiers' outputs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (batch, ...) to outputs (batch, classes)."""
        return torch.stack([*fl.stages.exit_outputs(self.net, x).values()]).mean(0)


def ensemble(net: nn.Module) -> nn.Module:
    """What predicts: the net itself if it has one classifier."""
    return Ensemble(net) if fl.stages.has_early_exits(net) else net
