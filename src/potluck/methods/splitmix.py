"""SplitMix: efficient split-mix federated learning for on-demand and in-situ customization.

Hong, Wang, Wang, Zhou. ICLR 2022. https://openreview.net/forum?id=_QLmakITKg. Algorithms 1 and 2.

The wide network is split into thin base networks that share nothing. In a round a client trains as many of them as its
capacity allows, and every base is averaged over the clients that trained it. To predict, any number of bases is mixed:
their logits are averaged.

Symbols
    r         atom, the width of a base network
    B         bases, how many there are
    f_b       one network of a `Mix`
    theta_b   the entries of state.weights that begin with "b."
    b_k       budget, how many bases client k trains
    n_k       len(client.train)

Wire
    down      weights at most |weights|, statistics at most |statistics|
    up        weights at most |weights|, tracked at most |statistics|, examples 1

Limits
    atom=1.0 equals fedavg on capacity=1.0
    atom=1.0 counts a twin as twice the data on capacity=1.0
    training.lr=0.0 stays at rest

Departures from the paper
    1. The code draws a base's initial weights as those of a layer 1/r times as wide. Here they are that layer's: base b
       begins as the b-th block of channels of the full network. Numbers that do not depend on the width, such as the
       last layer's biases, begin equal in all bases.
    2. Widths round up as everywhere here, and the code's round down. Numbers of bases round down in both; here a
       quotient that misses a whole number by a rounding error only, as 0.3 / 0.1 does, counts as that number.
    3. The code's experiments keep no running statistics of BatchNorm: it predicts with those of the test batches, or
       measures them on a client's training data. Here a client measures them so for the bases that it predicts with.
       Those of the global model are tracked in training and averaged like weights, as the code can do.
    4. The scaler is left out of networks with norms, which undo it; the code has it there too.
    5. Local training defaults to Adam like all methods here; the code has SGD with momentum 0.9, weight decay 5e-4, and
       a rate that falls by steps (`training.schedule`).
    6. A client predicts with the first b_k bases, as in the code; the code can also sort them by validation accuracy.
    7. Adversarial training, with two BatchNorms in each base, is left out.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from potluck import fl

_ROUNDING = 1e-9


@dataclass(frozen=True)
class State:
    """The base networks: weights, and BatchNorm statistics measured for them; and the bases whose turn is to come."""

    weights: fl.Weights
    statistics: fl.Weights
    waiting: list[int]


class Mix(nn.ModuleDict):
    """Base networks by number, which predict together."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean of their logits."""
        return torch.stack([base(x) for base in self.values()]).mean(0)


@dataclass(frozen=True)
class SplitMix(fl.Method[State]):
    """Hyper-parameters of SplitMix.

    Attributes:
        training: a client's local training.
        atom: width of a base network, as a share of the full one's channels.
        scaler: whether what leaves each layer of a network without norms is divided by `atom` in training, as in
            HeteroFL.
        mask: whether logits of classes that a batch lacks are set to 0 in its loss, as in the code's experiments in
            which clients lack classes.
        combine: how the clients' values of a weight become one.
    """

    family = "parts"

    training: fl.LocalTraining = fl.LocalTraining()
    atom: Annotated[float, fl.above(0), fl.at_most(1)] = 0.125
    scaler: bool = True
    mask: bool = False
    combine: fl.Aggregate = fl.Aggregate()

    aligns_classes = True
    default_capacities = (1.0, 0.5, 0.25, 0.125)
    variants = {
        "masked": {"mask": True},
        "unscaled": {"scaler": False},
    }

    @property
    def keeps_model(self) -> bool:
        """Every round starts from the bases that are sent."""
        return False

    @property
    def bases(self) -> int:
        """B, the number of base networks."""
        return int(1 / self.atom + _ROUNDING)

    def budget(self, capacity: float) -> int:
        """b_k, the number of bases within a capacity; at least one."""
        return min(max(int(capacity / self.atom + _ROUNDING), 1), self.bases)

    def needs(self) -> frozenset[fl.Need]:
        masked = {fl.Need.CLASSES} if self.mask else set[fl.Need]()
        return frozenset({fl.Need.ONE_ARCHITECTURE, fl.Need.WIDTH_SLICES, *masked})

    def init(self, server: fl.Server) -> State:
        most = max(size for shape in map(Tensor.size, fl.weights.weights_of(server.build()).values()) for size in shape)
        if self.atom * most < 1 - _ROUNDING:
            raise fl.ConfigError(
                f"method.atom: found {self.atom:g}, narrower than one of {most} channels, the most that any layer has;"
                f" expected at least {1 / most:.3g}"
            )
        fl.width.warn_below(self.atom, server, self, "the width of a base network", "give method.atom a smaller value")
        net, full = self.mix(server, range(self.bases)), fl.weights.weights_of(server.build())
        for number, base in net.items():
            fl.load(base, block(full, base, int(number)), partial=True)
        return State(fl.parameters_of(net), fl.buffers_of(net), [])

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        trained, waiting = self.drawn(state.waiting, cohort.ids, server)
        weights = {i: rows_of(of_bases(state.weights, trained[i]), server.roster[i]) for i in trained}
        statistics = {i: of_bases(state.statistics, trained[i]) for i in trained}
        sent = {i: fl.Message(weights=weights[i], statistics=statistics[i] or None) for i in trained}
        replies = cohort.stream(self.local_update, sent)
        new = fl.submodels.mean_where_covered(
            replies,
            {
                i: fl.classes.own_rows(
                    fl.submodels.whole({**weights[i], **statistics[i]}), server.roster[i], name_in_base
                )
                for i in trained
            },
            {**state.weights, **state.statistics},
            self.combine,
            share=lambda reply: float(reply["examples"]),
            values=lambda reply: {**reply["weights"], **reply.get("tracked", {})},
        )
        return State({n: new[n] for n in state.weights}, {n: new[n] for n in state.statistics}, waiting)

    def drawn(
        self, waiting: list[int], ids: Iterable[fl.ClientId], server: fl.Server
    ) -> tuple[dict[fl.ClientId, list[int]], list[int]]:
        """Which bases each client trains (Alg. 2), the first by turns and the others at random; and who waits next."""

        def shuffled() -> list[int]:
            return torch.randperm(self.bases, generator=server.rng).tolist()

        trained: dict[fl.ClientId, list[int]] = {}
        for i in ids:
            (first, *waiting), others = waiting or shuffled(), shuffled()
            others.remove(first)
            trained[i] = [first, *others[: self.budget(server.roster[i].capacity) - 1]]
        return trained, waiting

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        tracked = fl.schema.like(message["statistics"]) if "statistics" in message else None
        return fl.Schema(
            weights=fl.schema.like(message["weights"]), tracked=tracked, examples=fl.schema.count(member.examples)
        )

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        net = self.received(client, message)
        for base in net.values() if self.scaler and not fl.batchnorm.norms_of(net) else ():
            fl.width.with_scaler(base, self.atom, client.train.input_shape)
        losses = [BaseLoss(client.criterion, base, self.mask) for base in net]
        yield fl.Fit(net, losses, client.train, self.training)
        return fl.Message(weights=fl.parameters_of(net), tracked=fl.buffers_of(net) or None, examples=len(client.train))

    def inference_message(self, state: State, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        bases = range(self.budget(server.roster[client_id].capacity))
        return fl.Message(weights=rows_of(of_bases(state.weights, bases), server.roster[client_id]))

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> Generator[fl.NormStatistics, Any, nn.Module]:
        """A mix with statistics measured on the client's own training data; a single base as it is."""
        net = self.received(client, message)
        yield fl.NormStatistics(net, client.train, self.training.batch_size)
        return net if len(net) > 1 else next(iter(net.values()))

    def global_model(self, state: State, server: fl.Server) -> nn.Module | None:
        return fl.load(self.mix(server, range(self.bases)), {**state.weights, **state.statistics})

    def received(self, client: fl.Client, message: fl.Message) -> Mix:
        """On the client, the bases that it was sent."""
        net = self.mix(client, numbers(message["weights"]))
        fl.load(net, {**message["weights"], **message.get("statistics", {})}, partial=True)
        return net

    def mix(self, party: fl.Server | fl.Client, bases: Iterable[int]) -> Mix:
        """These bases, frozen layers in place; weights that are trained, and buffers, are to be loaded."""
        net = Mix({str(number): fl.width.net_of(party, self.atom) for number in bases})
        if frozen := fl.weights.frozen_names(net):
            full = fl.weights.weights_of(fl.width.net_of(party))
            found = {f"{i}.{name}": t for i, base in net.items() for name, t in block(full, base, int(i)).items()}
            fl.load(net, {name: found[name] for name in frozen}, partial=True)
        return net


@dataclass(frozen=True)
class BaseLoss:
    """The loss of one base; those of several are added up."""

    criterion: fl.Criterion
    base: str
    mask: bool

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch."""
        logits = net.get_submodule(self.base)(batch.inputs)
        if not self.mask:
            return self.criterion(logits, batch.targets)
        classes = torch.arange(logits.shape[1], device=logits.device)
        return fl.losses.masked_cross_entropy(logits, batch.targets, (batch.targets[:, None] == classes).any(0))


def of_bases(weights: fl.Weights, bases: Iterable[int]) -> fl.Weights:
    """The entries of these bases."""
    prefixes = tuple(f"{base}." for base in bases)
    return {name: tensor for name, tensor in weights.items() if name.startswith(prefixes)}


def rows_of(weights: fl.Weights, member: fl.Member) -> fl.Weights:
    """What a client has of bases, with the rows of its own classes."""
    return weights if member.head is None else member.head.part_of(weights, name_in_base)


def name_in_base(name: str) -> str:
    """What a base itself calls the entry of this name."""
    return name.partition(".")[2]


def numbers(weights: fl.Weights) -> list[int]:
    """The bases that have entries, ascending."""
    return sorted({int(name.partition(".")[0]) for name in weights})


def block(full: fl.Weights, base: nn.Module, number: int) -> fl.Weights:
    """What a base is cut from: of each dimension that it has a part of, the part with this number, going around."""
    places: fl.submodels.SubModel = {
        name: tuple(
            (number * kept + torch.arange(kept)) % size if kept < size else slice(0, size)
            for kept, size in zip(tensor.shape, full[name].shape, strict=True)
        )
        for name, tensor in fl.weights.weights_of(base).items()
    }
    return fl.submodels.select(full, places)
