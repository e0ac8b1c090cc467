"""FjORD: fair and accurate federated learning under heterogeneous targets with ordered dropout.

Horvath, Laskaridis, Almeida, Leontiadis, Venieris, Lane. NeurIPS 2021. https://arxiv.org/abs/2102.13451. Algorithm 1.

Ordered dropout: for every batch a client draws a width among those that it can train, and uses the leading channels of
every hidden layer only. So networks of all widths learn, one inside the other. With self-distillation the client's
widest network learns from every batch too, and teaches the one that was drawn.

Symbols
    w         state.weights
    P         levels
    p_max^i   rate, the largest width of client i
    p         drawn, one for the whole network and batch
    SM_p      Nested.at
    n_i       len(client.train)

Wire
    down      weights |slice|, statistics at most |statistics|, rate 1
    up        weights |slice|, tracked at most |statistics|, examples 1
    with      assignment="dynamic" also: down weights at most |w|; up weights at most |w|

Limits
    levels=[1.0] equals fedavg on capacity=1.0 batchnorm=true
    levels=[1.0] distil=false equals fjord levels=[1.0] on capacity=1.0 batchnorm=true
    levels=[1.0] counts a twin as twice the data on capacity=1.0
    training.lr=0.0 stays at rest

Departures from the paper
    1. The authors' code (the baseline that Flower has of them) sends all weights to everyone; here a client is sent its
       slice, and the statistics of its widths.
    2. Local training defaults to Adam like all methods here; the code has SGD at a rate of 0.1 with weight decay 1e-4.
       As there the optimiser holds all of a client's weights: those outside the drawn width have a gradient of 0, and
       move by momentum, Adam's means and weight decay alone.
    3. The weight and the temperature of the divergence from the widest network are 1, as in the code; its
       cross-entropy with that network's probabilities differs in the value but not in the gradient.
    4. If the width drawn is the client's largest, the divergence and its gradient are 0 and the second pass is left
       out. The code makes it, and counts the batch twice in the running statistics.
    5. BatchNorm has running statistics for each width, as in the code. A client that never drew a width sends what it
       was sent, which counts in the mean. Whole numbers (counters) give their maximum.
    6. `assignment="capacity"` gives a client the largest width that its capacity allows, the paper's tiers; "dynamic"
       draws one for each client of the cohort. The code can also draw as many clients from every tier.
    7. The global network is that of the largest width.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.func import functional_call

from potluck import (
    Batch,
    Client,
    ClientId,
    ClientWork,
    Cohort,
    CoverageMean,
    Criterion,
    Extras,
    Fit,
    LocalTraining,
    Mean,
    Member,
    Message,
    Need,
    Schema,
    Server,
    Weights,
    WidthSlices,
    above,
    at_most,
    buffers_of,
    count,
    distillation,
    leading,
    lies_in,
    like,
    load,
    on_client,
    parameters_of,
    part,
    select,
)


@dataclass(frozen=True)
class State:
    """The global network, and BatchNorm statistics for each width, named "WIDTH/NAME"."""

    weights: Weights
    statistics: Weights


class Nested(nn.ModuleList):
    """Networks from the widest to the narrowest. The others lend their form and buffers, and have its weights."""

    def at(self, place: int, x: Tensor) -> Tensor:
        """SM_p(x; w) at the width in this place."""
        if place == 0:
            return self[0](x)
        whole, narrow = dict(self[0].named_parameters()), self[place]
        places = lies_in(narrow)
        return functional_call(narrow, {n: part(whole[n], places[n]) for n, _ in narrow.named_parameters()}, (x,))


@dataclass(frozen=True)
class FjORD(WidthSlices[State]):
    """Hyper-parameters of FjORD: those of `WidthSlices`, see departure 6, and its own.

    Attributes:
        distil: whether a client's widest network teaches the one that is drawn; else that learns from labels, alone.
        combine: how the clients' values of a weight, or of a statistic, become one.
    """

    training: LocalTraining = LocalTraining()
    levels: tuple[Annotated[float, above(0), at_most(1)], ...] = (1.0, 0.8, 0.6, 0.4, 0.2)
    distil: bool = True
    combine: Mean = Mean()

    default_capacities = (1.0, 0.8, 0.6, 0.4, 0.2)
    variants = {
        "without distillation": {"distil": False},
        "median": {"combine.rule": "median"},
    }

    def needs(self) -> frozenset[Need]:
        return super().needs() | ({Need.CLASSES} if self.distil else set())

    def within(self, rate: float) -> list[float]:
        """The widths that a client of this rate trains, the largest first."""
        return sorted({level for level in self.levels if level <= rate}, reverse=True)

    def init(self, server: Server) -> State:
        self.warn_of_weak_clients(server)
        statistics = {level: buffers_of(server.build(width=level)) for level in self.within(1.0)}
        return State(parameters_of(server.build()), named(statistics.items()))

    def round(self, state: State, cohort: Cohort, server: Server) -> State:
        rates = {i: self.rate(server.roster[i], server) for i in cohort.ids}
        slices = {r: self.submodel(server, r) for r in set(rates.values())}
        parts = {r: (select(state.weights, slices[r]), self.statistics(state, self.within(r))) for r in slices}
        sent = {i: Message(weights=parts[r][0], statistics=parts[r][1], rate=r) for i, r in rates.items()}
        replies = cohort.stream(self.local_update, sent)
        weights, statistics = (CoverageMean(keep, self.combine) for keep in (state.weights, state.statistics))
        for i, reply in replies if self.combine.rule == "mean" else replies.all().items():
            weights.add(reply["weights"], slices[rates[i]], reply["examples"])
            tracked = reply.get("tracked", {})
            statistics.add(tracked, leading({name: t.shape for name, t in tracked.items()}), reply["examples"])
            del reply, tracked  # before the next comes
        return State(weights.weights(), statistics.weights())

    def replies(self, handler: str, member: Member, message: Message, server: Server) -> Schema:
        tracked = like(message["statistics"]) if "statistics" in message else None
        return Schema(weights=like(message["weights"]), tracked=tracked, examples=count(member.examples))

    @on_client
    def local_update(self, client: Client, message: Message) -> ClientWork:
        widths = self.within(message["rate"])
        nets = Nested(client.build(width=width) for width in widths)
        load(nets[0], message["weights"], partial=True)
        for width, net in zip(widths, nets, strict=True):
            load(net, of_width(message.get("statistics", {}), width), partial=True)
        objective = OrderedDropout(client.criterion, self.distil)
        yield Fit(nets, objective, client.train, self.training, trainable=("0.",))
        tracked = named((width, buffers_of(net)) for width, net in zip(widths, nets, strict=True))
        return Message(weights=parameters_of(nets[0]), tracked=tracked or None, examples=len(client.train))

    def inference_message(self, state: State, client_id: ClientId, server: Server) -> Message:
        message = super().inference_message(state, client_id, server)
        return Message(**message, statistics=self.statistics(state, [message["rate"]]))

    @on_client
    def inference_model(self, client: Client, message: Message) -> nn.Module:
        """The client's widest network, with that width's statistics."""
        statistics = of_width(message.get("statistics", {}), message["rate"])
        return load(self.narrow_net(client, message), statistics, partial=True)

    def global_model(self, state: State, server: Server) -> nn.Module | None:
        width = max(self.levels)
        weights = select(state.weights, self.submodel(server, width))
        return load(server.build(width=width), {**weights, **of_width(state.statistics, width)})

    def statistics(self, state: State, widths: Iterable[float]) -> Weights | None:
        """Those of some widths; None if networks have none."""
        return named((width, of_width(state.statistics, width)) for width in widths) or None


@dataclass(frozen=True)
class OrderedDropout:
    """The loss of one batch by labels, and with distillation that of the drawn network by the widest one."""

    criterion: Criterion
    distil: bool

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """Of the nested networks; the width is drawn from torch's generator, as Dropout draws."""
        assert isinstance(net, Nested)
        drawn = int(torch.randint(len(net), ())) if len(net) > 1 else 0
        if not self.distil:
            return self.criterion(net.at(drawn, batch.inputs), batch.targets)
        teacher = net.at(0, batch.inputs)
        loss = self.criterion(teacher, batch.targets)
        return loss + distillation(net.at(drawn, batch.inputs), teacher) if drawn else loss


def named(by_width: Iterable[tuple[float, Weights]]) -> Weights:
    """The tensors of several widths, named "WIDTH/NAME"."""
    return {f"{width}/{name}": tensor for width, tensors in by_width for name, tensor in tensors.items()}


def of_width(statistics: Weights, width: float) -> Weights:
    """Those of one width, under their own names."""
    prefix = f"{width}/"
    return {name.removeprefix(prefix): t for name, t in statistics.items() if name.startswith(prefix)}
