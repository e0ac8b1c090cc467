"""HeteroFL: computation and communication efficient federated learning for heterogeneous clients.

Diao, Ding, Tarokh. ICLR 2021. https://arxiv.org/abs/2010.01264. Algorithm 1.

There is one global network. A client trains the leading channels of every hidden layer, as many as it can, and
the server averages each weight over the clients that held it.

Symbols
    W_g       state.weights
    r         rate, the share of channels that a client trains
    W_l       cut(W_g, shapes of the net at rate r)
    Y_k       present, the labels that client k holds

Wire
    down      weights |slice| + |w|, rate 1
    up        weights |slice|, labels classes * flag, statistics |b|, batches 1
    with      assignment="dynamic" also: down weights at most |w| + |w|; up weights at most |w|

Limits
    approaches fedavg sharing.weighting="uniform" training.clip_norm=1.0 on capacity=1.0
    training.lr=0.0 stays at rest

Departures from the paper
    1. BatchNorm is static as in the paper: batch statistics in training, and what is tracked meanwhile is thrown
       away. The statistics to predict with are measured by the cohort in a second exchange, each client on its own
       examples without augmentation, and averaged by batches. The authors' code runs the server's model over all
       clients' training data. Either way every client of the cohort has to run the full network once, forward.
    2. A client evaluates its slice with statistics measured on its own training data, and does not mask its logits.
    3. `assignment="capacity"` gives a client the largest level that its capacity allows, the code's "fix";
       "dynamic" draws a level for each client of the cohort, all equally likely, where the code has proportions.
    4. Local training defaults to Adam at a constant rate like all methods here; the code has SGD with momentum 0.9,
       weight decay 5e-4, 5 epochs, batches of 10, and a rate that falls by steps (`training.schedule`). Its limit of
       the gradient's norm, 1, is kept.
    5. With `mask` the loss is cross-entropy, whatever the federation's criterion.
    6. A client that may train a level only in part of the rounds ("dynamic") is evaluated with the level that its
       capacity allows, though it may have trained larger ones: its capacity does not limit what is drawn.
"""

import warnings
from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from potluck import (
    BATCH_NORMS,
    Batch,
    Client,
    ClientId,
    ClientWork,
    Cohort,
    Extras,
    Fit,
    LocalTraining,
    Mean,
    Measure,
    Member,
    Message,
    Method,
    Need,
    PotluckWarning,
    Replies,
    Request,
    Schema,
    Server,
    Weights,
    above,
    at_most,
    booleans,
    buffers_of,
    classifier_names,
    count,
    cut,
    like,
    load,
    masked_cross_entropy,
    mean,
    mean_where_covered,
    on_client,
    outline,
    parameters_of,
    require,
)


@dataclass(frozen=True)
class State:
    """The global network: its weights, and BatchNorm statistics measured for them."""

    weights: Weights
    statistics: Weights


@dataclass(frozen=True)
class HeteroFL(Method[State]):
    """Hyper-parameters of HeteroFL.

    Attributes:
        training: a client's local training.
        levels: the rates that clients may have, descending.
        assignment: "capacity" or "dynamic", see departure 3.
        mask: whether logits of labels that a client lacks are set to 0 in its loss; the classifier's rows of
            such labels are left out of the mean in either case.
        combine: how the clients' values of a weight become one.
    """

    variants = {
        "dynamic": {"assignment": "dynamic"},
        "unmasked": {"mask": False},
        "median": {"combine.rule": "median"},
    }

    training: LocalTraining = LocalTraining(clip_norm=1.0)
    levels: tuple[Annotated[float, above(0), at_most(1)], ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    assignment: Literal["capacity", "dynamic"] = "capacity"
    mask: bool = True
    combine: Mean = Mean()

    default_capacities = (1.0, 0.5, 0.25, 0.125, 0.0625)

    def __post_init__(self) -> None:
        require(len(self.levels) > 0, "levels", "at least one rate", self.levels)

    @property
    def keeps_model(self) -> bool:
        return False

    def needs(self) -> frozenset[Need]:
        return frozenset({Need.ONE_ARCHITECTURE, Need.WIDTH_SLICES, *([Need.CLASSES] if self.mask else [])})

    def init(self, server: Server) -> State:
        self._say_who_trains_more_than_it_can(server)
        net = server.build()
        return State(parameters_of(net), buffers_of(net))

    def round(self, state: State, cohort: Cohort, server: Server) -> State:
        rates = {i: self._rate(server.roster[i], server) for i in cohort.ids}
        narrow = {rate: cut(state.weights, shapes(server, rate)) for rate in set(rates.values())}
        replies = cohort.ask(self.local_update, {i: Message(weights=narrow[r], rate=r) for i, r in rates.items()})
        head = classifier_names(server.build())
        labels = replies.entries("labels")
        weights = mean_where_covered(
            replies.entries("weights"),
            keep=state.weights,
            rows=lambda index, name: labels[index] if name in head else None,
            combine=None if self.combine.rule == "mean" else self.combine.of_covered,
        )
        measured = cohort.ask(self.measure, {i: Message(weights=weights) for i in replies})
        return State(weights, averaged_statistics(measured, state.statistics))

    def replies(self, handler: str, member: Member, message: Message, server: Server) -> Schema:
        if handler == "local_update":
            return Schema(weights=like(message["weights"]), labels=booleans(server.num_classes))
        whole = server.about(None, outline)
        statistics = {name: tensor for name, tensor in whole.items() if name not in message["weights"]}
        batches = count(member.examples, least=0)
        return Schema(statistics=like(statistics) if statistics else None, batches=batches)

    @on_client
    def local_update(self, client: Client, message: Message) -> ClientWork:
        net = load(client.build(width=message["rate"]), message["weights"], partial=True)
        present = torch.bincount(client.train.labels, minlength=client.num_classes) > 0
        with_scaler(net, message["rate"])
        objective = masked if self.mask else client.objective
        yield Fit(net, objective, client.train, self.training, extras={"present": present})
        return Message(weights=parameters_of(net), labels=present)

    @on_client
    def measure(self, client: Client, message: Message) -> ClientWork:
        """Static BatchNorm, section 4.1: statistics of the new global model on this client's data."""
        net = load(client.build(), message["weights"], partial=True)
        batches = yield Measure(net, client.train, self.training.batch_size)
        return Message(statistics=buffers_of(net) or None, batches=batches)

    def _say_who_trains_more_than_it_can(self, server: Server) -> None:
        least = min(self.levels)
        weak = [member for member in server.roster.values() if member.capacity < least]
        if weak and self.assignment == "capacity":
            others = f" and {len(weak) - 1} more" if len(weak) > 1 else ""
            warnings.warn(
                f"heterofl: client {weak[0].id}{others}: capacity {weak[0].capacity:g} lies below the smallest level,"
                f" {least:g}, which is trained all the same; give method.levels a smaller one",
                PotluckWarning,
                stacklevel=2,
            )

    def _rate(self, member: Member, server: Server) -> float:
        if self.assignment == "dynamic":
            return self.levels[int(torch.randint(len(self.levels), (), generator=server.rng))]
        return level_within(self.levels, member.capacity)

    @on_client
    def inference_model(self, client: Client, message: Message) -> Generator[Request, Any, nn.Module]:
        net = load(client.build(width=message["rate"]), message["weights"], partial=True)
        yield Measure(net, client.train, self.training.batch_size)
        return net

    def inference_message(self, state: State, client_id: ClientId, server: Server) -> Message:
        rate = level_within(self.levels, server.roster[client_id].capacity)
        return Message(weights=cut(state.weights, shapes(server, rate)), rate=rate)

    def global_model(self, state: State, server: Server) -> nn.Module | None:
        return load(server.build(), {**state.weights, **state.statistics})


def masked(net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
    """Section 4.2: cross-entropy over the labels that the client holds."""
    inputs, targets, _ = batch
    return masked_cross_entropy(net(inputs), targets, extras["present"])


def with_scaler(net: nn.Module, rate: float) -> None:
    """Section 4.1: in training, divide by the rate what enters each norm, or leaves each hidden layer without one."""

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] / rate, *inputs[1:]) if layer.training else inputs

    def after(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output / rate if layer.training else output

    norms = [layer for layer in net.modules() if isinstance(layer, (*BATCH_NORMS, nn.GroupNorm, nn.LayerNorm))]
    for norm in norms:
        norm.register_forward_pre_hook(before)
    if not norms:
        head = classifier_names(net)
        for name, layer in net.named_modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)) and f"{name}.weight" not in head:
                layer.register_forward_hook(after)


def averaged_statistics(measured: Replies, keep: Weights) -> Weights:
    """The cohort's statistics, weighted by batches, as if one machine had measured all of them in a row."""
    counted = [reply for reply in measured.values() if reply["batches"] and reply.get("statistics")]
    if not counted:
        return keep
    shares = [float(reply["batches"]) for reply in counted]
    return {name: mean([reply["statistics"][name] for reply in counted], shares) for name in keep}


def level_within(levels: tuple[float, ...], capacity: float) -> float:
    """The largest level that a capacity allows; the smallest of all if none does."""
    return max((level for level in levels if level <= capacity), default=min(levels))


def shapes(server: Server, rate: float) -> dict[str, torch.Size]:
    """Shapes of the trained tensors at a rate, read off the narrow net so that rounding always agrees."""
    return {name: tensor.shape for name, tensor in server.build(width=rate).named_parameters()}
