"""FLANC: resource-adaptive federated learning with all-in-one neural composition.

Mei, Guo, Zhou, Patel. NeurIPS 2022. https://openreview.net/forum?id=wfel7CjOYk.

Clients train networks of different widths. The kernels of every inner convolution are mixed from a bank of filters,
which all widths share, by coefficients that each width has of its own. So every client trains every filter, however
narrow its network is.

Symbols
    B         "LAYER.bank.weight" in state.banks, (filters, channels, ...)
    A_p       "p/LAYER.coefficients.weight" in state.weights, of width p
    lambda    penalty
    E, eta    training.epochs, training.lr

Wire
    down      banks |banks|, weights at most |weights|, statistics at most |statistics|, rate 1
    up        banks |banks|, weights at most |weights|, tracked at most |statistics|

Limits
    levels=[1.0] equals fedavg sharing.weighting="uniform" on capacity=1.0 batchnorm=true
    training.lr=0.0 stays at rest

Departures from the paper
    1. Of the paper only the abstract and the authors' code were at hand; equations and constants are the code's.
    2. The code has a ResNet-18 and a small CNN; here any network is composed whose width can be cut. Composed are the
       convolutions whose kernel has more than one position, but not the first of the network, grouped ones, frozen
       ones, and those of the head: they are ordinary layers and belong to the width, as do linear layers. So of
       networks without such convolutions, as MLPs and MobileNetV2 are, widths share nothing. Banks have one size for
       all widths, so that networks of less than a quarter of the width can become larger than they were.
    3. As in the code the two convolutions of a residual block have banks of the channels that the block reads, with
       rows that are orthonormal together; here this holds of all convolutions that one module has side by side, if it
       is neither the whole network nor a list of layers. Others have banks of their own input's channels.
    4. Coefficients begin normal, of variance 2 over a layer's outputs, as in the code's ResNet; its CNN has torch's
       default. All else begins as the network's builder has it. The code's first convolution has the full width in
       networks of any width, and here the width of its network.
    5. Banks are averaged over all clients and all else within a width, equally weighted, as in the code. A width that
       nobody in the cohort has keeps its numbers. The code draws the widths of a cohort anew until it has each of them.
    6. `assignment="capacity"` gives a client the largest width that its capacity allows; "dynamic" draws one for each
       client of the cohort, as in the code.
    7. Local training defaults to Adam like all methods here; the code has SGD with momentum 0.9, weight decay 1e-4 and
       a rate that falls from 0.1 by steps (`training.schedule`).
    8. A client predicts at the largest width that its capacity allows, with that width's BatchNorm statistics, which
       are tracked in training and averaged. The global network is that of the largest width.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl


@dataclass(frozen=True)
class State:
    """The banks; the other weights and BatchNorm statistics of each width, named "WIDTH/NAME"."""

    banks: fl.Weights
    weights: fl.Weights
    statistics: fl.Weights


@dataclass(frozen=True)
class FLANC(fl.width.WidthSlices[State]):
    """Hyper-parameters of FLANC: those of `WidthSlices`, see departure 6, and its own.

    Attributes:
        filters: number of filters in a layer's bank, as a share of its outputs in the full network.
        channels: number of channels that a filter reads, as a share of those that the layer's block reads in the full
            network. A network's layers must have multiples of it at all levels.
        penalty: weight of the banks' distance from orthonormal rows.
        combine: how the clients' values of a number become one.
    """

    training: fl.LocalTraining = fl.LocalTraining()
    levels: tuple[Annotated[float, fl.above(0), fl.at_most(1)], ...] = (1.0, 0.75, 0.5, 0.25)
    filters: Annotated[float, fl.above(0)] = 0.25
    channels: Annotated[float, fl.above(0), fl.at_most(1)] = 0.125
    penalty: Annotated[float, fl.at_least(0)] = 10.0
    combine: fl.Aggregate = fl.Aggregate()

    aligns_classes = True
    default_capacities = (1.0, 0.75, 0.5, 0.25)
    variants = {
        "dynamic": {"assignment": "dynamic"},
        "without penalty": {"penalty": 0.0},
        "median": {"combine.rule": "median"},
    }

    def init(self, server: fl.Server) -> State:
        self.warn_of_weak_clients(server)
        banks, nets = self.new_banks(server.build(), server.rng), dict[float, nn.Module]()
        for level in sorted(set(self.levels)):
            try:
                net = nets[level] = fl.banks.composed(server.build(width=level), banks)
            except fl.ConfigError as error:
                advice = "choose a network whose channels double from block to block or stay, or other method.levels"
                raise fl.ConfigError(f"flanc: at width {level:g} {error}; {advice}") from error
            for layer in fl.banks.layers_of(net).values():
                spread = math.sqrt(2 / len(layer.coefficients.weight))
                nn.init.normal_(layer.coefficients.weight, std=spread, generator=server.rng)
        weights = fl.nested.by_width((level, fl.banks.own_weights(net, banks)) for level, net in nets.items())
        return State(banks, weights, fl.nested.by_width((level, fl.buffers_of(net)) for level, net in nets.items()))

    def new_banks(self, net: nn.Module, generator: torch.Generator) -> fl.Weights:
        """The banks for a full network, those of one block with rows that are orthonormal together."""
        banks = fl.Weights()
        for block in fl.banks.blocks_to_compose(net):
            channels = max(round(self.channels * next(iter(block.values())).in_channels), 1)
            shapes = {
                name: (max(round(self.filters * layer.out_channels), 1), channels, *layer.kernel_size)
                for name, layer in block.items()
            }
            for shape in dict.fromkeys(shapes.values()):
                names = [name for name in shapes if shapes[name] == shape]
                rows = torch.empty(len(names) * shape[0], *shape[1:])
                nn.init.orthogonal_(rows, generator=generator)
                banks |= dict(zip(names, rows.chunk(len(names)), strict=True))
        return {f"{name}{fl.banks.BANK}": bank.clone() for name, bank in banks.items()}

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        rates = {i: self.rate(server.roster[i], server) for i in cohort.ids}
        sent = {i: self.message(state, rate, server.roster[i]) for i, rate in rates.items()}
        replies = cohort.stream(self.local_update, sent)
        means = [
            fl.submodels.CoverageMean(keep, self.combine) for keep in (state.banks, state.weights, state.statistics)
        ]
        for i, reply in self.combine.arriving(replies):
            own = [fl.nested.by_width([(rates[i], found)]) for found in (reply["weights"], reply.get("tracked", {}))]
            for mean, tensors in zip(means, [reply["banks"], *own], strict=True):
                places = fl.submodels.leading({name: tensor.shape for name, tensor in tensors.items()})
                mean.add(tensors, fl.classes.own_rows(places, server.roster[i], lambda name: name.partition("/")[2]))
            del reply  # before the next comes
        return State(*(mean.weights() for mean in means))

    def message(self, state: State, rate: float, member: fl.Member | None = None) -> fl.Message:
        """The network of this width; a client's has the rows of its own classes."""
        weights = fl.nested.of_width(state.weights, rate)
        weights = weights if member is None else fl.classes.rows_for(weights, member)
        statistics = fl.nested.of_width(state.statistics, rate) or None
        return fl.Message(banks=state.banks, weights=weights, statistics=statistics, rate=rate)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        tracked = fl.schema.like(message["statistics"]) if "statistics" in message else None
        return fl.Schema(
            banks=fl.schema.like(message["banks"]), weights=fl.schema.like(message["weights"]), tracked=tracked
        )

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        net = self.net(client, message)
        yield fl.Fit(net, OrthogonalLoss(client.criterion, self.penalty), client.train, self.training)
        trained = fl.parameters_of(net)
        banks, weights = ({name: trained[name] for name in message[entry]} for entry in ("banks", "weights"))
        return fl.Message(banks=banks, weights=weights, tracked=fl.buffers_of(net) or None)

    def net(self, party: fl.Client | fl.Server, message: fl.Message) -> nn.Module:
        """The network of a message."""
        net = fl.banks.composed(fl.width.net_of(party, message["rate"]), message["banks"])
        return fl.load(net, {**message["weights"], **message.get("statistics", {})}, partial=True)

    def inference_message(self, state: State, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        member = server.roster[client_id]
        return self.message(state, fl.width.level_within(self.levels, member.capacity), member)

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        """The composed network of the client's width."""
        return self.net(client, message)

    def global_model(self, state: State, server: fl.Server) -> nn.Module | None:
        return self.net(server, self.message(state, max(self.levels)))


@dataclass(frozen=True)
class OrthogonalLoss:
    """The task's loss + lambda sum_B MSE(B B^T, I)."""

    criterion: fl.Criterion
    penalty: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch."""
        loss = self.criterion(net(batch.inputs), batch.targets)
        for layer in fl.banks.layers_of(net).values() if self.penalty else ():
            rows = layer.bank.weight.flatten(1)
            products = rows @ rows.T
            loss = loss + self.penalty * F.mse_loss(
                products, torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
            )
        return loss
