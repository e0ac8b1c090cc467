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

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """The global network, and BatchNorm statistics for each width, named "WIDTH/NAME"."""

    weights: fl.Weights
    statistics: fl.Weights


@dataclass(frozen=True)
class FjORD(fl.nested.NestedWidths[State]):
    """Hyper-parameters of FjORD: those of `WidthSlices`, see departure 6, and its own.

    Attributes:
        distil: whether a client's widest network teaches the one that is drawn; else that learns from labels, alone.
        combine: how the clients' values of a weight, or of a statistic, become one.
    """

    training: fl.LocalTraining = fl.LocalTraining()
    levels: tuple[Annotated[float, fl.above(0), fl.at_most(1)], ...] = (1.0, 0.8, 0.6, 0.4, 0.2)
    distil: bool = True
    combine: fl.Aggregate = fl.Aggregate()

    aligns_classes = True
    sums_suffice = True
    default_capacities = (1.0, 0.8, 0.6, 0.4, 0.2)
    variants = {
        "without distillation": {"distil": False},
        "median": {"combine.rule": "median"},
    }

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | ({fl.Need.CLASSES} if self.distil else set())

    def init(self, server: fl.Server) -> State:
        self.warn_of_weak_clients(server)
        return State(*self.initial(server))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        rates = {i: self.rate(server.roster[i], server) for i in cohort.ids}
        replies = cohort.stream(self.local_update, self.send(state, rates, server))
        return State(*self.merge(state, replies, rates, server, lambda reply: float(reply["examples"])))

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        return fl.Schema(**self.expected(message), examples=fl.schema.count(member.examples))

    def summed(
        self, handler: str, member: fl.Member, message: fl.Message, reply: fl.Message, server: fl.Server
    ) -> fl.ToSum:
        weights = self.summed_weights(member, message, reply, server, "client")
        statistics = message.get("statistics", {})
        tracked = fl.summing.summed_layers(reply, "tracked", member, statistics, "client")
        return fl.ToSum({**weights, **tracked}, reply["examples"])

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        nets = self.receive(client, message)
        objective = OrderedDropout(client.criterion, self.distil)
        yield fl.Fit(nets, objective, client.train, self.training, trainable=("0.",))
        return self.reply(nets, message, len(client.train))


@dataclass(frozen=True)
class OrderedDropout:
    """The loss of one batch by labels, and with distillation that of the drawn network by the widest one."""

    criterion: fl.Criterion
    distil: bool

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of the nested networks; the width is drawn from torch's generator, as Dropout draws."""
        assert isinstance(net, fl.nested.Nested)
        drawn = int(torch.randint(len(net), ())) if len(net) > 1 else 0
        if not self.distil:
            return self.criterion(net.at(drawn, batch.inputs), batch.targets)
        teacher = net.at(0, batch.inputs)
        loss = self.criterion(teacher, batch.targets)
        return loss + fl.losses.distillation(net.at(drawn, batch.inputs), teacher) if drawn else loss
