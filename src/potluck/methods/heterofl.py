"""HeteroFL: computation and communication efficient federated learning for heterogeneous clients.

Diao, Ding, Tarokh. ICLR 2021. https://arxiv.org/abs/2010.01264. Algorithm 1.

There is one global network. A client trains the leading channels of every hidden layer, as many as it can, and
the server averages each weight over the clients that held it.

Symbols
    W_g       state.weights
    r         rate, the share of channels that a client trains
    W_l       select(W_g, leading slices of the net at rate r)
    Y_k       present, the labels that client k holds

Wire
    down      weights |slice| + |w|, rate 1
    up        weights |slice|, labels classes * flag, statistics |b|, batches 1
    with      assignment="dynamic" also: down weights at most |w| + |w|; up weights at most |w|

Limits
    equals fedavg sharing.weighting="uniform" training.clip_norm=1.0 on capacity=1.0
    leave_out=[0.5] equals heterofl on capacity=1.0
    leave_out=[0.5] stays at rest on capacity=0.5
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
    7. `leave_out` is an ablation of the paper on FeDepth (https://arxiv.org/abs/2303.04887, Figure 2): sub-models of
       these levels do not count in the mean. Their clients train, measure statistics and are evaluated as ever.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """The global network: its weights, and BatchNorm statistics measured for them."""

    weights: fl.Weights
    statistics: fl.Weights


@dataclass(frozen=True)
class HeteroFL(fl.width.WidthSlices[State]):
    """Hyper-parameters of HeteroFL: those of `WidthSlices`, see departure 3, and its own.

    Attributes:
        leave_out: levels whose clients do not count in the mean of the weights.
        mask: whether logits of labels that a client lacks are set to 0 in its loss; the classifier's rows of
            such labels are left out of the mean in either case.
        combine: how the clients' values of a weight become one.
    """

    leave_out: tuple[float, ...] = ()
    mask: bool = True
    combine: fl.Aggregate = fl.Aggregate()

    aligns_classes = True
    sums_suffice = True
    variants = {
        "dynamic": {"assignment": "dynamic"},
        "unmasked": {"mask": False},
        "median": {"combine.rule": "median"},
        "without the half": {"leave_out": (0.5,)},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        some = set(self.leave_out) < set(self.levels)
        fl.require(some, "leave_out", f"some of the levels {self.levels}, not all", self.leave_out)

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | ({fl.Need.CLASSES} if self.mask else set())

    def init(self, server: fl.Server) -> State:
        self.warn_of_weak_clients(server)
        # Refuses, before anything trains, a network whose classifier is not known, or that cannot be cut to a level.
        server.about(None, fl.contract.classifier_of)
        for rate in self.levels:
            self.submodel(server, rate)
        net = server.build()
        return State(fl.parameters_of(net), fl.buffers_of(net))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        rates = {i: self.rate(server.roster[i], server) for i in cohort.ids}
        slices = self.slices(rates, server)
        narrow = fl.submodels.select_each(state.weights, slices)
        sent = {i: fl.Message(weights=narrow[i], rate=rate) for i, rate in rates.items()}
        replies = cohort.stream(self.local_update, sent)
        held = {i: slices[i] for i, rate in rates.items() if rate not in self.leave_out}
        head = server.about(None, fl.contract.classifier_of)

        def rows(i: fl.ClientId, reply: fl.Message) -> fl.submodels.RowMasks:
            labels: Tensor = reply["labels"]
            return fl.classes.rows_for(dict.fromkeys(head, labels), server.roster[i])

        weights = fl.submodels.mean_where_covered(replies, held, state.weights, self.combine, rows=rows)
        present = [member for member in server.members(rates) if member.id not in replies.failures]
        full = {member.id: fl.Message(weights=fl.classes.rows_for(weights, member)) for member in present}
        measured = cohort.ask(self.measure, full)
        return State(weights, fl.width.mean_statistics(measured, state.statistics))

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        if handler == "local_update":
            return fl.Schema(weights=fl.schema.like(message["weights"]), labels=fl.schema.booleans(server.num_classes))
        statistics = {
            name: t for name, t in server.about(None, fl.weights.outline).items() if name not in message["weights"]
        }
        return fl.Schema(
            statistics=fl.schema.like(statistics) if statistics else None,
            batches=fl.schema.count(member.examples, least=0),
        )

    def summed(
        self, handler: str, member: fl.Member, message: fl.Message, reply: fl.Message, server: fl.Server
    ) -> fl.ToSum:
        if handler == "measure":
            return fl.width.summed_statistics(reply)
        labels: Tensor = reply["labels"]
        rows = fl.classes.rows_for(dict.fromkeys(server.about(None, fl.contract.classifier_of), labels), member)
        found = self.summed_weights(member, message, reply, server, rows=rows)
        if message["rate"] in self.leave_out:
            found = {path: replace(one, place=None) for path, one in found.items()}
        return fl.ToSum(found)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        net = fl.width.with_scaler(self.narrow_net(client, message), message["rate"], client.train.input_shape)
        present = torch.bincount(client.train.labels, minlength=client.num_classes) > 0
        objective = masked if self.mask else client.objective
        yield fl.Fit(net, objective, client.train, self.training, extras={"present": present})
        return fl.Message(weights=fl.parameters_of(net), labels=present)

    @fl.on_client
    def measure(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        """Static BatchNorm, section 4.1: statistics of the new global model on this client's data."""
        net = fl.load(client.twin(), message["weights"], partial=True)
        batches = yield fl.NormStatistics(net, client.train, self.training.batch_size)
        return fl.Message(statistics=fl.buffers_of(net) or None, batches=batches)

    def global_model(self, state: State, server: fl.Server) -> nn.Module | None:
        return fl.load(server.build(), {**state.weights, **state.statistics})


def masked(net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
    """Section 4.2: cross-entropy over the labels that the client holds."""
    return fl.losses.masked_cross_entropy(net(batch.inputs), batch.targets, extras["present"])
