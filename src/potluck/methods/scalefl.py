"""ScaleFL: resource-adaptive federated learning with heterogeneous clients.

Ilhan, Su, Liu. CVPR 2023. https://openaccess.thecvf.com/content/CVPR2023/papers/Ilhan_ScaleFL_Resource-Adaptive_Federated_Learning_With_Heterogeneous_Clients_CVPR_2023_paper.pdf.

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
       weights that HeteroFL gives it, exits aside; where most weights are in the stem, choose smaller `widths`. The
       code's values for ResNet-110 are the variant "as in the authors' code".
    2. Channels are rounded up, like those of all methods here, and blocks down. The code rounds channels down.
    3. An exit behind a feature map is three convolutions with a BatchNorm, if the net has any, and ReLU, then a mean
       over positions and a linear layer, as in the code's ResNet. Other features have a norm, a mean over positions
       and a linear layer.
    4. The divergence is summed over classes, where the code takes the mean: its gamma is gamma times the classes. It
       teaches from round `warmup` + 1 on; the code begins after a quarter of all rounds, and its commands for images
       leave gamma at 0. As in the code the deepest exit also learns from the others, unless teacher_learns=false.
    5. The code normalises by the statistics of the test batch. Here BatchNorm is static, see departures 1 and 2 of
       HeteroFL. What enters a norm is divided by the width in training and evaluation, as in the code.
    6. A client has the largest level that its capacity allows; the code deals levels at random, once.
    7. Local training defaults to Adam, like all methods here; the code has SGD with 0.1, which falls to a tenth at
       rounds 100 and 200, momentum 0.9, weight decay 5e-4, batches of 16 and 5 epochs.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Size, Tensor, nn
from torch.nn import functional as F

from potluck import (
    Batch,
    Client,
    ClientWork,
    Cohort,
    Criterion,
    Exit,
    Extras,
    Fit,
    GlobalPool,
    LocalTraining,
    Measure,
    Member,
    Message,
    Need,
    Schema,
    Server,
    StagedNet,
    SubModel,
    Weights,
    WidthSlices,
    above,
    at_least,
    at_most,
    batch_norms,
    buffers_of,
    count,
    leading,
    leading_share,
    like,
    linear_exit,
    load,
    mean_statistics,
    mean_where_covered,
    on_client,
    outline,
    parameters_of,
    require,
    select,
    staged,
    with_scaler,
)

Share = Annotated[float, above(0), at_most(1)]


@dataclass(frozen=True)
class State:
    """The global network: its weights and its exits', and BatchNorm statistics measured for the whole network."""

    weights: Weights
    statistics: Weights


@dataclass(frozen=True)
class ScaleFL(WidthSlices[State]):
    """Hyper-parameters of ScaleFL: those of `WidthSlices`, and its own.

    Attributes:
        levels: the capacities that a level is for.
        widths: the share of the channels of each level.
        depths: the share of the blocks of each level, behind which there is an exit.
        gamma: weight of the loss by which the deepest exit teaches the others.
        temperature: T.
        warmup: rounds before the deepest exit teaches.
        teacher_learns: whether the deepest exit has a gradient of that loss.
    """

    variants = {
        "as in the authors' code": {
            "levels": (1.0, 0.75, 0.5, 0.25),
            "widths": (1.0, 0.75, 0.7, 0.7),
            "depths": (1.0, 46 / 54, 38 / 54, 30 / 54),
            "gamma": 0.0,
        },
        "constant teacher": {"teacher_learns": False},
        "dynamic": {"assignment": "dynamic"},
    }

    predicts_with_exits = True
    default_capacities = (1.0, 0.75, 0.5, 0.25)
    training: LocalTraining = LocalTraining()
    levels: tuple[Share, ...] = (1.0, 0.75, 0.5, 0.25)
    widths: tuple[Share, ...] = (1.0, 0.85, 0.7, 0.375)
    depths: tuple[Share, ...] = (1.0, 0.75, 0.5, 0.25)
    gamma: Annotated[float, at_least(0)] = 0.05
    temperature: Annotated[float, above(0)] = 3.0
    warmup: Annotated[int, at_least(0)] = 0
    teacher_learns: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("widths", "depths"):
            found: tuple[float, ...] = getattr(self, name)
            require(len(found) == len(self.levels), name, f"one for each of {len(self.levels)} levels", found)
        whole = (1.0, 1.0) in zip(self.widths, self.depths, strict=True)
        require(whole, "widths", "a level with all channels and all blocks", self.widths)

    def needs(self) -> frozenset[Need]:
        teaches = Need.CLASSES if self.gamma and len(self.levels) > 1 else Need.ONE_OUTPUT
        return super().needs() | {Need.SPLIT_MODEL, Need.DEPTH_PREFIXES, teaches}

    def init(self, server: Server) -> State:
        self.warn_of_weak_clients(server)
        return State(parameters_of(self.part(server, server.input_shape, 1.0, 1.0)), buffers_of(server.build()))

    def round(self, state: State, cohort: Cohort, server: Server) -> State:
        rates = {i: self.rate(server.roster[i], server) for i in cohort.ids}
        parts = {r: self.submodel(server, r) for r in set(rates.values())}
        held = {i: parts[r] for i, r in rates.items()}
        messages = {i: Message(weights=select(state.weights, held[i]), rate=r) for i, r in rates.items()}
        replies = cohort.stream(self.local_update, messages)
        weights = mean_where_covered(replies, held, state.weights)
        full = Message(weights={name: tensor for name, tensor in weights.items() if not name.startswith("exits.")})
        measured = cohort.ask(self.measure, {i: full for i in held if i not in replies.failures})
        return State(weights, mean_statistics(measured, state.statistics))

    def replies(self, handler: str, member: Member, message: Message, server: Server) -> Schema:
        if handler == "local_update":
            return Schema(weights=like(message["weights"]))
        statistics = {name: t for name, t in server.about(None, outline).items() if name not in message["weights"]}
        return Schema(statistics=like(statistics) if statistics else None, batches=count(member.examples, least=0))

    @on_client
    def local_update(self, client: Client, message: Message) -> ClientWork:
        net = self.narrow_net(client, message)
        gamma = self.gamma if client.round > self.warmup else 0.0
        objective = ExitsLoss(client.criterion, gamma, self.temperature, self.teacher_learns)
        yield Fit(net, objective, client.train, self.training)
        return Message(weights=parameters_of(net))

    @on_client
    def measure(self, client: Client, message: Message) -> ClientWork:
        """Statistics of the new global network, without early exits, on this client's data."""
        net = load(client.build(), message["weights"], partial=True)
        batches = yield Measure(net, client.train, self.training.batch_size)
        return Message(statistics=buffers_of(net) or None, batches=batches)

    def global_model(self, state: State, server: Server) -> nn.Module | None:
        weights = {name: tensor for name, tensor in state.weights.items() if not name.startswith("exits.")}
        return load(server.build(), {**weights, **state.statistics})

    def submodel(self, server: Server, rate: float) -> SubModel:
        net = self.part(server, server.input_shape, *self.scale(rate))
        return leading({name: tensor.shape for name, tensor in net.named_parameters()})

    def narrow_net(self, client: Client, message: Message) -> nn.Module:
        net = self.part(client, client.train.input_shape, *self.scale(message["rate"]))
        return load(net, message["weights"], partial=True)

    def scale(self, level: float) -> tuple[float, float]:
        """s_l and e_l."""
        number = self.levels.index(level)
        return self.widths[number], self.depths[number]

    def part(self, party: Server | Client, input_shape: tuple[int, ...], width: float, depth: float) -> StagedNet:
        """The part of the network of this width and depth, with its exits."""
        net = party.build(width=width)
        scaled = net if width == 1 else with_scaler(net, width, input_shape, always=True)
        return leading_share(party, staged(scaled), input_shape, depth, self.depths, convolutional_exit)


@dataclass(frozen=True)
class ExitsLoss:
    """A client's loss, a mean over its exits with the weights 1 to m: by labels, and to what the deepest one says."""

    criterion: Criterion
    gamma: float
    temperature: float
    teacher_learns: bool

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """Of one batch; with one exit it is the task's loss, bit for bit."""
        outputs = list(staged(net).exit_outputs(batch.inputs).values())
        deepest = outputs[-1] if self.teacher_learns else outputs[-1].detach()
        losses = [self.criterion(z, batch.targets) for z in outputs]
        if self.gamma:
            taught = [self.gamma * divergence(z, deepest, self.temperature) for z in outputs[:-1]]
            losses = [*(loss + more for loss, more in zip(losses, taught, strict=False)), losses[-1]]
        weighted = [number * loss for number, loss in enumerate(losses, start=1)]
        return torch.stack(weighted).sum() / (len(outputs) * (len(outputs) + 1) / 2)


def divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) of softened predictions; mean over the batch, with a gradient in both."""
    student, target = F.log_softmax(logits / temperature, 1), F.log_softmax(teacher / temperature, 1)
    return temperature**2 * F.kl_div(student, target, reduction="batchmean", log_target=True)


def convolutional_exit(net: StagedNet, features: Size, outputs: int) -> Exit:
    """Three convolutions of one width and a linear layer behind a feature map; behind other features `linear_exit`."""
    if len(features) != 3:
        return linear_exit(net, features, outputs)
    channels, normed = features[0], bool(batch_norms(net))
    layers: list[nn.Module] = []
    for _ in range(3):
        norm = [nn.BatchNorm2d(channels)] if normed else []
        layers += [nn.Conv2d(channels, channels, 3, padding=1, bias=not normed), *norm, nn.ReLU()]
    return Exit(nn.Sequential(*layers, GlobalPool()), nn.Linear(channels, outputs))
