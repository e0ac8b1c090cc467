"""SlimFL: federated learning with superposition coding over slimmable neural networks.

Baek, Yun, Kwak, Jung, Ji, Bennis, Park, Kim. INFOCOM 2022. https://arxiv.org/abs/2112.02543.
Yun, Kwak, Baek, Jung, Ji, Bennis, Park, Kim. 2022. https://arxiv.org/abs/2203.14094.

Clients train networks of all widths at once, one inside the other, and send the widest over a radio channel, in two
parts: the half-wide network, which is coded so that it can be decoded over bad channels too, and the rest. What is
decoded of all the replies is averaged, so that a bad channel costs the rest of a reply, and not all of it.

Symbols
    theta     state.weights
    Xi_i      the leading slice at levels[i]
    w_i       weights[i], divided by the sum of those that a client uses
    F         the task's loss on a client's data
    n_L, n_R  how many replies were decoded up to a width, noted as "decoded-WIDTH"

Wire
    down      weights |slice|, statistics at most |statistics|, rate 1
    up        weights |slice|, tracked at most |statistics|
    with      assignment="dynamic" also: down weights at most |w|; up weights at most |w|

Limits
    levels=[1.0] weights=[1.0] decoded=[1.0] equals fedavg sharing.weighting="uniform" on capacity=1.0
    weights=[1.0,0.0] decoded=[1.0,1.0] equals fedavg sharing.weighting="uniform" on capacity=1.0 batchnorm=true
    decoded=[0.0,0.0] stays at rest
    training.lr=0.0 stays at rest

Departures from the paper
    1. Of the papers only the abstracts were at hand; equations and constants are those of summaries, and the
       probabilities and weights given here as defaults are Potluck's own.
    2. There is no radio. The server decodes a reply up to a width with the probability of that width in `decoded`; for
       this it draws one number for each client of the cohort, in every round anew, so that narrower widths are decoded
       with a wider one. In the paper channels fade, and the probabilities follow from powers and rates of transmission.
    3. A client sends its whole network, all bytes of which are counted as traffic, whatever is decoded; what is not
       decoded is never read. What the server sends is always received.
    4. Any number of widths can be nested, where the paper has two.
    5. In the paper every client trains the full width, the default here. A client of less capacity trains the widths
       within it (`assignment`), of which the widest learns from labels; the weights begin with that one's.
    6. The divergence from the widest network's predictions stands for the cross-entropy with them, which differs in the
       value but not in the gradient. `distil=false` is plain training of all widths on labels.
    7. BatchNorm has running statistics for each width; they are decoded with what the width adds, and averaged.
       Whole numbers (counters) give their maximum.
    8. A client predicts at the largest width that its capacity allows; the global network is that of the largest.
    9. Local training defaults to Adam like all methods here.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor, nn

from potluck import fl

Share = Annotated[float, fl.at_least(0), fl.at_most(1)]


@dataclass(frozen=True)
class State:
    """The global network, and BatchNorm statistics for each width, named "WIDTH/NAME"."""

    weights: fl.Weights
    statistics: fl.Weights


@dataclass(frozen=True)
class SlimFL(fl.nested.NestedWidths[State]):
    """Hyper-parameters of SlimFL: those of `WidthSlices`, see departure 5, and its own.

    Attributes:
        levels: the widths, the largest first.
        weights: of the losses, first that of a client's widest network, which must be above 0: no other learns from
            labels.
        decoded: for each of the levels the probability that a reply is decoded up to this width; never larger for a
            wider one. A client of less capacity sends, and has decoded, the levels within it.
        distil: whether narrower networks learn from the widest one's predictions; else from labels.
        combine: how the clients' values of a weight, or of a statistic, become one.
    """

    training: fl.LocalTraining = fl.LocalTraining()
    levels: tuple[Annotated[float, fl.above(0), fl.at_most(1)], ...] = (1.0, 0.5)
    weights: tuple[Annotated[float, fl.at_least(0)], ...] = (0.5, 0.5)
    decoded: tuple[Share, ...] = (0.7, 0.9)
    distil: bool = True
    combine: fl.Aggregate = fl.Aggregate()

    aligns_classes = True
    default_capacities = (1.0,)
    variants = {
        "three widths": {"levels": [1.0, 0.5, 0.25], "weights": [0.4, 0.3, 0.3], "decoded": [0.5, 0.7, 0.9]},
        "without distillation": {"distil": False},
        "good channels": {"decoded": [1.0, 1.0]},
        "median": {"combine.rule": "median"},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weights", "decoded"):
            found = getattr(self, name)
            fl.require(len(found) == len(self.levels), name, f"one number for each of {len(self.levels)} levels", found)
        fl.require(
            all(a > b for a, b in pairwise(self.levels)), "levels", "each smaller than the one before", self.levels
        )
        fl.require(self.weights[0] > 0, "weights", "a first one above 0, that of learning from labels", self.weights)
        probable = all(wide <= narrow for wide, narrow in pairwise(self.decoded))
        fl.require(probable, "decoded", "none smaller than the one before, which is of a wider level", self.decoded)

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | ({fl.Need.CLASSES} if self.distil and len(self.levels) > 1 else set())

    def init(self, server: fl.Server) -> State:
        self.warn_of_weak_clients(server)
        return State(*self.initial(server))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        rates = {i: self.rate(server.roster[i], server) for i in cohort.ids}
        channels = torch.rand(len(rates), generator=server.rng).tolist()
        heard = {i: self.heard(rate, channel) for (i, rate), channel in zip(rates.items(), channels, strict=True)}
        replies = cohort.stream(self.local_update, self.send(state, rates, server))
        merged = State(*self.merge(state, replies, rates, server, heard=heard))
        arrived = [widths for i, widths in heard.items() if i not in replies.failures]
        server.note(**{f"decoded-{level:g}": sum(level in widths for widths in arrived) for level in self.levels})
        return merged

    def heard(self, rate: float, channel: float) -> list[float]:
        """What is decoded of a reply of this rate: widths, the largest first.

        Args:
            rate: the widest that is sent.
            channel: drawn uniformly from [0, 1).
        """
        certain = zip(self.levels, self.decoded, strict=True)
        return [level for level, share in certain if level <= rate and channel < share]

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        return fl.Schema(**self.expected(message))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        nets = self.receive(client, message)
        objective = SuperpositionLoss(client.criterion, self.weights, self.distil)
        yield fl.Fit(nets, objective, client.train, self.training, trainable=("0.",))
        return self.reply(nets, message)


@dataclass(frozen=True)
class SuperpositionLoss:
    """sum_i w_i F(theta * Xi_i), in which the widest network learns from labels and teaches the others."""

    criterion: fl.Criterion
    weights: tuple[float, ...]
    distil: bool

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of the nested networks on one batch; those of weight 0 are left out."""
        assert isinstance(net, fl.nested.Nested)
        weights = self.weights[: len(net)]
        teacher = net.at(0, batch.inputs)
        loss = weights[0] / sum(weights) * self.criterion(teacher, batch.targets)
        for place, weight in enumerate(weights):
            if place and weight:
                outputs = net.at(place, batch.inputs)
                own = (
                    fl.losses.distillation(outputs, teacher) if self.distil else self.criterion(outputs, batch.targets)
                )
                loss = loss + weight / sum(weights) * own
        return loss
