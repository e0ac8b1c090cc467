"""ScaleFL: resource-adaptive federated learning with heterogeneous clients.

Ilhan, Su, Liu. CVPR 2023. https://openaccess.thecvf.com/content/CVPR2023/html/Ilhan_ScaleFL_Resource-Adaptive_Federated_Learning_With_Heterogeneous_Clients_CVPR_2023_paper.html.

There is one global network with early exits. A client trains a part of it that is cut in two directions: the leading
channels of the layers up to an exit. It trains all exits up to that one, which is its deepest and teaches the others.
The server averages each weight over the clients that held it.

Symbols
    w         state.weights, of the whole network with all its exits
    s_l, e_l  the width and the depth of level l
    z_j, m    the outputs of exit j, and the number of exits that a client has
    gamma     gamma
    T         temperature

Wire
    down      weights at most |weights| + |w|, rate 1
    up        weights at most |weights|, statistics |b|, batches 1

Limits
    levels=[1.0] widths=[1.0] depths=[1.0] equals fedavg sharing.weighting="uniform" on capacity=1.0
    levels=[1.0] widths=[1.0] depths=[1.0] training.clip_norm=1.0 equals heterofl on capacity=1.0
    gamma=0.5 equals scalefl gamma=0.0 on capacity=0.25
    training.lr=0.0 stays at rest

Departures from the paper
    1. Its levels are those of a few networks. Here a level is a capacity, with a share of the channels and a share of
       the blocks, of any network in stages. With the defaults a client of a convolutional network has at most the
       weights that HeteroFL gives it, exits aside; where most weights are in the stem, choose smaller `widths`. With
       the variant "as in the authors' code" and `resnet110` with `shortcut = "B"` the parts are those of the code.
    2. Channels are rounded up, like those of all methods here, and blocks down. The code rounds channels down, so that
       its share of 0.7 is one of 0.6875 here.
    3. An exit behind a feature map is three convolutions with a BatchNorm, if the net has any, and ReLU, then a mean
       over positions and a linear layer, as in the code's ResNet. Other features have a norm, a mean over positions
       and a linear layer.
    4. The divergence is the code's, a mean over classes; to have its sum, as in the usual definition, multiply gamma by
       their number. gamma defaults to the code's value for text; its commands for images leave it at 0. The deepest
       exit teaches from round `warmup` + 1 on, in the code after a quarter of all rounds. As in the code it also learns
       from the others, unless teacher_learns=false.
    5. The code normalises by the statistics of the test batch. Here BatchNorm is static, see departures 1 and 2 of
       HeteroFL. What enters a norm is divided by the width in training and evaluation, as in the code, which leaves out
       those of shortcuts; of BatchNorm only its epsilon tells the difference.
    6. A client has the largest level that its capacity allows; the code deals levels at random, once.
    7. Local training defaults to Adam, like all methods here; the code has SGD with 0.1, which falls to a tenth at
       rounds 100 and 200, momentum 0.9, weight decay 5e-4, batches of 16 and 5 epochs.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from potluck import fl

Share = Annotated[float, fl.above(0), fl.at_most(1)]


@dataclass(frozen=True)
class State:
    """The global network: its weights and its exits', and BatchNorm statistics measured for the whole network."""

    weights: fl.Weights
    statistics: fl.Weights


@dataclass(frozen=True)
class ScaleFL(fl.width.WidthSlices[State]):
    """Hyper-parameters of ScaleFL: those of `WidthSlices`, and its own.

    Attributes:
        levels: the capacities that a level is for.
        widths: the share of the channels of each level.
        depths: the share of the blocks of each level, behind which there is an exit.
        gamma: weight of the loss by which the deepest exit teaches the others, a mean over classes.
        temperature: T.
        warmup: rounds before the deepest exit teaches.
        teacher_learns: whether the deepest exit has a gradient of that loss.
        combine: how the clients' values of a weight become one.
    """

    variants = {
        "as in the authors' code": {
            "levels": (1.0, 0.75, 0.5, 0.25),
            "widths": (1.0, 0.75, 0.6875, 0.6875),
            "depths": (1.0, 46 / 54, 38 / 54, 30 / 54),
            "gamma": 0.0,
        },
        "constant teacher": {"teacher_learns": False},
        "dynamic": {"assignment": "dynamic"},
        "median": {"combine.rule": "median"},
    }

    aligns_classes = True
    predicts_with_exits = True
    default_capacities = (1.0, 0.75, 0.5, 0.25)
    training: fl.LocalTraining = fl.LocalTraining()
    levels: tuple[Share, ...] = (1.0, 0.75, 0.5, 0.25)
    widths: tuple[Share, ...] = (1.0, 0.85, 0.7, 0.375)
    depths: tuple[Share, ...] = (1.0, 0.75, 0.5, 0.25)
    gamma: Annotated[float, fl.at_least(0)] = 0.05
    temperature: Annotated[float, fl.above(0)] = 3.0
    warmup: Annotated[int, fl.at_least(0)] = 0
    teacher_learns: bool = True
    combine: fl.Aggregate = fl.Aggregate()

    def __post_init__(self) -> None:
        super().__post_init__()
        fl.require(len(set(self.levels)) == len(self.levels), "levels", "each of them once", self.levels)
        for name in ("widths", "depths"):
            found: tuple[float, ...] = getattr(self, name)
            fl.require(len(found) == len(self.levels), name, f"one for each of {len(self.levels)} levels", found)
            whole = found[self.levels.index(max(self.levels))]
            fl.require(whole == 1, name, f"1 for the largest level, {max(self.levels):g}", found)

    def needs(self) -> frozenset[fl.Need]:
        teaches = fl.Need.CLASSES if self.gamma and len(self.levels) > 1 else fl.Need.ONE_OUTPUT
        return super().needs() | {fl.Need.SPLIT_MODEL, fl.contract.STAGES, fl.Need.DEPTH_PREFIXES, teaches}

    def init(self, server: fl.Server) -> State:
        self.warn_of_weak_clients(server)
        return State(fl.parameters_of(self.part(server, max(self.levels))), fl.buffers_of(server.build()))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        rates = {i: self.rate(server.roster[i], server) for i in cohort.ids}
        held = self.slices(rates, server)
        narrow = fl.submodels.select_each(state.weights, held)
        messages = {i: fl.Message(weights=narrow[i], rate=rate) for i, rate in rates.items()}
        replies = cohort.stream(self.local_update, messages)
        weights = fl.submodels.mean_where_covered(replies, held, state.weights, self.combine)
        full, present = without_exits(weights), [m for m in server.members(held) if m.id not in replies.failures]
        sent = {member.id: fl.Message(weights=fl.classes.rows_for(full, member)) for member in present}
        measured = cohort.ask(self.measure, sent)
        return State(weights, fl.width.mean_statistics(measured, state.statistics))

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        if handler == "local_update":
            return fl.Schema(weights=fl.schema.like(message["weights"]))
        statistics = {
            name: t for name, t in server.about(None, fl.weights.outline).items() if name not in message["weights"]
        }
        return fl.Schema(
            statistics=fl.schema.like(statistics) if statistics else None,
            batches=fl.schema.count(member.examples, least=0),
        )

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        net = self.narrow_net(client, message)
        gamma = self.gamma / client.num_classes if client.round > self.warmup else 0.0
        objective = ExitsLoss(client.criterion, gamma, self.temperature, self.teacher_learns)
        yield fl.Fit(net, objective, client.train, self.training)
        return fl.Message(weights=fl.parameters_of(net))

    @fl.on_client
    def measure(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        """Statistics of the new global network, without early exits, on this client's data."""
        net = fl.load(client.twin(), message["weights"], partial=True)
        batches = yield fl.NormStatistics(net, client.train, self.training.batch_size)
        return fl.Message(statistics=fl.buffers_of(net) or None, batches=batches)

    def global_model(self, state: State, server: fl.Server) -> nn.Module | None:
        return fl.load(server.build(), {**without_exits(state.weights), **state.statistics})

    def member(self, server: fl.Server, id: fl.ClientId) -> fl.Member:
        return fl.exits.with_rows_of_exits(
            server.roster[id], server, lambda server, _: self.part(server, max(self.levels))
        )

    def submodel(self, server: fl.Server, rate: float) -> fl.submodels.SubModel:
        width = self.widths[self.levels.index(rate)]
        narrow = server.build(width=width)
        kept = server.about(None, self.kept)[width] if fl.slicing.cut_by(narrow) else {}
        return fl.exits.slices_with_exits(self.part(server, rate), narrow, kept)

    def kept(self, net: nn.Module, input_shape: fl.InputShape) -> dict[float, fl.exits.Kept]:
        """By width, which channels a narrower net has where it has exits."""
        whole = fl.stages.stages_of(net)
        depths = {fl.exits.blocks_within(net, depth) for depth in self.depths}
        places = [place for number, place in enumerate(whole.blocks[:-1], start=1) if number in depths]
        widths = {width: fl.Scale(width).of for width in self.widths if width < 1}
        return {w: {place: whole.kept_at(place, of, input_shape) for place in places} for w, of in widths.items()}

    def narrow_net(self, client: fl.Client, message: fl.Message) -> nn.Module:
        return fl.load(self.part(client, message["rate"]), message["weights"], partial=True)

    def part(self, party: fl.Server | fl.Client, level: float) -> nn.Module:
        """The part of the network that a level has: s_l of its channels, e_l of its blocks, and the exits behind."""
        number = self.levels.index(level)
        net = fl.width.net_of(party, self.widths[number])
        shape = (party if isinstance(party, fl.Server) else party.train).input_shape
        part = fl.exits.leading_share(party, net, shape, self.depths[number], self.depths, fl.exits.convolutional_exit)
        return part if self.widths[number] == 1 else fl.width.with_scaler(part, self.widths[number], always=True)


@dataclass(frozen=True)
class ExitsLoss:
    """A client's loss, a mean over its exits with the weights 1 to m: by labels, and to what the deepest one says."""

    criterion: fl.Criterion
    gamma: float
    temperature: float
    teacher_learns: bool

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch; with one exit it is the task's loss, bit for bit."""
        *shallow, deepest = fl.stages.exit_outputs(net, batch.inputs).values()
        losses = [self.criterion(z, batch.targets) for z in (*shallow, deepest)]
        if self.gamma:
            for j, z in enumerate(shallow):
                taught = fl.losses.distillation(z, deepest, self.temperature, teacher_learns=self.teacher_learns)
                losses[j] = losses[j] + self.gamma * taught
        m = len(losses)
        return torch.stack([j * loss for j, loss in enumerate(losses, start=1)]).sum() / (m * (m + 1) / 2)


def without_exits(weights: fl.Weights) -> fl.Weights:
    """Those of the layers and of the network's own head."""
    return {name: tensor for name, tensor in weights.items() if not name.startswith("exits.")}
