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
       are the paper's, a stage each. A client has the largest level that its capacity allows.
    2. As in the authors' code a classifier behind a feature map is a gate and a row of separable convolutions with a
       stride, until the map is as small and as wide as the network's last (`exits`). The gate's map is widened to the
       size of what it gates, which need not be even. Classifiers of other features, and all of them with
       exits="linear", are a norm, a mean over positions and a linear layer. Initial weights are torch's.
    3. The linear terms of FedDyn and h are divided by all clients, as in the authors' code, where Potluck's FedDyn
       counts a layer's owners. With alpha = 0 both are left out, which is the authors' variant with FedAvg.
    4. The authors' code adds 1e-7 to the probabilities of the classifier that teaches.
    5. Local training defaults to Adam, like all methods here; the authors' code has SGD with 0.1 * 0.998^t, weight
       decay 0.001, batches of 50 and 5 epochs, and alpha = 0.1. They grow w(t) over 300 of 1000 rounds.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Size, Tensor, nn
from torch.nn import functional as F

from potluck import (
    Batch,
    Client,
    ClientId,
    ClientWork,
    Cohort,
    CoverageMean,
    Criterion,
    Exit,
    Extras,
    Fit,
    GlobalPool,
    Key,
    LocalTraining,
    Member,
    Message,
    Method,
    Need,
    Schema,
    Server,
    StagedNet,
    Weights,
    above,
    at_least,
    at_most,
    batch_norms,
    blocks,
    blocks_within,
    buffers_of,
    distillation,
    isolated,
    leading,
    leading_share,
    level_within,
    like,
    linear_exit,
    load,
    minus,
    norm,
    of_depth,
    on_client,
    parameters_of,
    place_shapes,
    plus,
    require,
    squared_distance,
    staged,
    warn_below,
    zeros_like,
)


@dataclass(frozen=True)
class State:
    """The whole network with all its classifiers: weights, BatchNorm statistics, and the dual variable of FedDyn."""

    weights: Weights
    buffers: Weights
    h: Weights


@dataclass(frozen=True)
class DepthFL(Method[State]):
    """Hyper-parameters of DepthFL.

    Attributes:
        training: a client's local training.
        levels: shares of the blocks that clients may train; the network has a classifier behind each.
        exits: "bottleneck" for the paper's classifiers behind feature maps, or "linear" for small ones.
        consistency: the weight of what classifiers teach one another, once it is grown; 0 for none.
        ramp: rounds in which it grows; with 0 it is there at once.
        alpha: strength of FedDyn's regulariser; 0 for FedAvg.
    """

    variants = {
        "small classifiers": {"exits": "linear"},
        "federated averaging": {"alpha": 0.0},
        "no self-distillation": {"consistency": 0.0},
    }

    predicts_with_exits = True
    default_capacities = (1.0, 0.75, 0.5, 0.25)
    training: LocalTraining = LocalTraining()
    levels: tuple[Annotated[float, above(0), at_most(1)], ...] = (1.0, 0.75, 0.5, 0.25)
    exits: Literal["bottleneck", "linear"] = "bottleneck"
    consistency: Annotated[float, at_least(0)] = 1.0
    ramp: Annotated[int, at_least(0)] = 300
    alpha: Annotated[float, at_least(0)] = 0.1

    def __post_init__(self) -> None:
        require(len(self.levels) > 0, "levels", "at least one share of the blocks", self.levels)

    @property
    def keeps_model(self) -> bool:
        return False

    def needs(self) -> frozenset[Need]:
        teaches = Need.CLASSES if self.consistency and len(self.levels) > 1 else Need.ONE_OUTPUT
        return frozenset({Need.ONE_ARCHITECTURE, Need.SPLIT_MODEL, Need.DEPTH_PREFIXES, teaches})

    def init(self, server: Server) -> State:
        warn_below(min(self.levels), server, self, "the smallest level", "give method.levels a smaller one")
        net = self.net(server, server.build(), server.input_shape, max(self.levels))
        return State(parameters_of(net), buffers_of(net), zeros_like(parameters_of(net)))

    def round(self, state: State, cohort: Cohort, server: Server) -> State:
        before = {**state.weights, **state.buffers}
        means, owners = CoverageMean(before), Counter[str]()
        replies = cohort.stream(self.local_update, {i: self.inference_message(state, i, server) for i in cohort.ids})
        for _, reply in replies:
            found = {**reply["weights"], **(reply.get("buffers") or {})}
            means.add(found, leading({name: tensor.shape for name, tensor in found.items()}))
            owners.update(found.keys())
            del reply, found  # before the next comes
        mean = means.weights()
        buffers = {name: mean[name] for name in state.buffers}
        answered = {name: mean[name] for name in state.weights if owners[name]}
        if not self.alpha:
            return State({**state.weights, **answered}, buffers, state.h)
        drift = {n: owners[n] / len(server.roster) * gap for n, gap in minus(answered, state.weights).items()}
        h = plus(state.h, drift, -self.alpha)
        server.note(h_norm=norm({"all": h}))
        return State({**state.weights, **plus(answered, h, -1 / self.alpha)}, buffers, h)

    def replies(self, handler: str, member: Member, message: Message, server: Server) -> Schema:
        buffers = message.get("buffers")
        return Schema(weights=like(message["weights"]), buffers=None if buffers is None else like(buffers))

    @on_client
    def local_update(self, client: Client, message: Message) -> ClientWork:
        net = self.filled(client, message)
        sent = message["weights"]
        extras = {"sent": sent, "g": client.state.get("g") or zeros_like(sent)} if self.alpha else {}
        objective = DepthLoss(client.criterion, self.weight(client.round), self.alpha)
        yield Fit(net, objective, client.train, self.training, extras=extras)
        if self.alpha:
            client.state["g"] = plus(extras["g"], minus(parameters_of(net), sent), -self.alpha)
        return Message(weights=parameters_of(net), buffers=buffers_of(net) or None)

    def inference_message(self, state: State, client_id: ClientId, server: Server) -> Message:
        level = level_within(self.levels, server.roster[client_id].capacity)
        layers, exits = server.about(None, Names(level))
        weights, buffers = (
            {name: tensor for name, tensor in whole.items() if name in layers or name.startswith(exits)}
            for whole in (state.weights, state.buffers)
        )
        return Message(weights=weights, buffers=buffers or None)

    @on_client
    def inference_model(self, client: Client, message: Message) -> nn.Module:
        return ensemble(self.filled(client, message))

    def global_model(self, state: State, server: Server) -> nn.Module | None:
        net = self.net(server, server.build(), server.input_shape, max(self.levels))
        load(net, {**state.weights, **state.buffers})
        return ensemble(net)

    def filled(self, client: Client, message: Message) -> StagedNet:
        """On the client, its part of the network with what it was sent."""
        level = level_within(self.levels, client.capacity)
        net = self.net(client, client.model, client.train.input_shape, level)
        load(net, {**message["weights"], **(message.get("buffers") or {})})
        return net

    def net(self, party: Server | Client, full: nn.Module, input_shape: tuple[int, ...], level: float) -> StagedNet:
        """The leading share of the full network's blocks, with the classifiers behind them."""
        build = linear_exit
        if self.exits == "bottleneck":
            build = partial(bottleneck_exit, [*place_shapes(staged(full), input_shape).values()])
        return leading_share(party, staged(full), input_shape, level, self.levels, build)

    def weight(self, number: int) -> float:
        """w(t) of a round, counted from 1."""
        left = max(0.0, 1 - (number - 1) / self.ramp) if self.ramp else 0.0
        return self.consistency * math.exp(-5 * left**2)


@dataclass(frozen=True)
class Names:
    """Of the leading share of a net's blocks the names of the layers' tensors, and what those of exits begin with."""

    share: float

    def __call__(self, net: nn.Module, input_shape: tuple[int, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
        depth = blocks_within(staged(net), self.share)
        with isolated(Key(("an exit that is not used",))):
            part = of_depth(staged(net), depth, 1, input_shape)
        layers = frozenset(name for name in part.state_dict() if not name.startswith("exits."))
        return layers, tuple(f"exits.{place}." for place in blocks(staged(net))[:depth])


@dataclass(frozen=True)
class DepthLoss:
    """A client's loss: of each classifier by labels, and to the mean of the others; and FedDyn's regulariser."""

    criterion: Criterion
    consistency: float
    alpha: float

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """Of one batch; with one classifier and alpha = 0 it is the task's loss, bit for bit."""
        outputs = list(staged(net).exit_outputs(batch.inputs).values())
        losses = [self.criterion(z, batch.targets) for z in outputs]
        if self.consistency and len(outputs) > 1:
            pairs = [(z, other) for i, z in enumerate(outputs) for j, other in enumerate(outputs) if i != j]
            losses += [self.consistency / (len(outputs) - 1) * distillation(z, other) for z, other in pairs]
        if self.alpha:
            linear = [(extras["g"][n] * w).sum() for n, w in net.named_parameters() if n in extras["g"]]
            losses += [-torch.stack(linear).sum(), self.alpha / 2 * squared_distance(net, extras["sent"])]
        return torch.stack(losses).sum()


class Ensemble(nn.Module):
    """The mean of all classifiers' outputs."""

    def __init__(self, net: StagedNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (batch, ...) to outputs (batch, classes)."""
        return torch.stack([*self.net.exit_outputs(x).values()]).mean(0)


def ensemble(net: StagedNet) -> nn.Module:
    """What predicts: the net itself if it has one classifier."""
    return Ensemble(net) if len(net.exits) - bool(net.ending) else net


def bottleneck_exit(shapes: Sequence[Size], net: StagedNet, features: Size, outputs: int) -> Exit:
    """The authors' classifier behind a feature map; behind other features `linear_exit`.

    Args:
        shapes: of one example's features at all places of the whole net, in order.
        net: that the classifier is for.
        features: shape of one example's here.
        outputs: how many numbers it puts out.
    """
    if len(features) != 3:
        return linear_exit(net, features, outputs)
    normed, widths, side = bool(batch_norms(net)), [features[0]], features[-1]
    for shape in shapes:
        if len(shape) == 3 and shape[-1] < side:
            widths, side = [*widths, shape[0]], shape[-1]
    rows = [separable(*pair, normed) for pair in pairwise(widths)]
    return Exit(nn.Sequential(Gate(features[0], normed), *rows, GlobalPool()), nn.Linear(widths[-1], outputs))


class Gate(nn.Module):
    """Multiplies a feature map by a map between 0 and 1 that it makes of it at half its size."""

    def __init__(self, channels: int, normed: bool) -> None:
        super().__init__()
        norm = [nn.BatchNorm2d(channels)] if normed else []
        self.map = nn.Sequential(separable(channels, channels, normed), *norm, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """A map (batch, channels, height, width) to one of the same shape."""
        gate = F.interpolate(self.map(x), x.shape[-2:], mode="bilinear", align_corners=False)
        return x * gate.sigmoid()


def separable(inputs: int, outputs: int, normed: bool) -> nn.Sequential:
    """Two separable convolutions, the first with a stride of 2, each with a BatchNorm, if the net has any, and ReLU."""

    def one(outputs: int, stride: int) -> list[nn.Module]:
        each = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=not normed)
        mixed = nn.Conv2d(inputs, outputs, 1, bias=not normed)
        return [each, mixed, *([nn.BatchNorm2d(outputs)] if normed else []), nn.ReLU()]

    return nn.Sequential(*one(inputs, 2), *one(outputs, 1))
