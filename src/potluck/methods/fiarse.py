"""FIARSE: federated learning via importance-aware sub-model extraction.

Wu, Wang, Wang, Liu, Su, Gao. NeurIPS 2024. https://arxiv.org/abs/2407.19389. Algorithm 1. With `ladder`: Ma, Oh,
Park, Kim. ICML 2026. https://arxiv.org/abs/2512.05372.

There is one global network. A client trains its largest weights, as many as it can hold; the others are 0 to it. Which
they are changes with the weights, since a surrogate gradient also tells a weight how important it is. The server
averages each weight over the clients that held it.

Symbols
    x         state.weights
    gamma_k   density, the share of the weights that client k trains
    theta_k   thresholds, the smallest of the largest weights
    m_j       kept, 1 where |x_j| is at least theta_k
    eta_g     server_lr
    eta_l     training.lr

Wire
    down      weights at most |w|, masks at most |bits|
    up        weights at most |w|

Limits
    masks="fixed" equals fedavg sharing.weighting="uniform" on capacity=1.0
    ladder=[1.0] masks="fixed" equals fedavg sharing.weighting="uniform" on capacity=0.25
    training.lr=0.0 stays at rest
    server_lr=0.0 stays at rest

Departures from the paper
    1. A weight counts for every client that was sent it. The authors' code counts those in which it has changed, which
       differs for weights that have no gradient.
    2. A weight that falls below theta_k is 0 and has no gradient, as in the code. The code's mask is boolean, so that
       torch drops its gradient, the surrogate: `masks="followed"`. `masks="fixed"` keeps the mask of the round's
       start, which is FedAvg with sub-models.
    3. As in the code norms are not masked: every client trains theirs, and densities count the other weights. Norms are
       those of torch: BatchNorm, GroupNorm, InstanceNorm, LayerNorm and RMSNorm. `threshold="stage"` is the code's
       other choice: there a ResNet has one threshold for its first convolution, one for each of its four stages and
       one for its last layer. `threshold="layer"`, one for each module that has weights, is in neither.
    4. BatchNorm's statistics belong to a mask. They are tracked in training and thrown away; to predict, a client
       measures them on its own training data. The code's BatchNorm keeps none and takes those of the test batches.
    5. `ladder`, which is not in the paper, is the gradual restoration of FedGMR: at fixed rounds the least density
       rises, whatever a client's capacity, which is then that of its connection. In FedGMR clients are asynchronous.
    6. Masked weights save traffic and no computation: networks are multiplied as dense ones. A mask is a bit for each
       weight on the wire.
    7. Local training defaults to Adam, like all methods here; the paper has SGD, and so does the surrogate's analysis.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from potluck import fl

Masks = Literal["learnt", "followed", "fixed"]
Threshold = Literal["global", "stage", "layer"]


@dataclass(frozen=True)
class State:
    """The global network's weights."""

    weights: fl.Weights


@dataclass(frozen=True)
class FIARSE(fl.Method[State]):
    """Hyper-parameters of FIARSE. A client's density is its capacity.

    Attributes:
        training: a client's local training.
        threshold: whether a client's largest weights are those of the whole net ("global"); of each "stage" of a net in
            stages and of its head, of other nets of each of their children; or of each "layer".
        masks: whether masks follow the weights within a round and have the surrogate's gradient ("learnt"), follow them
            and have none ("followed"), or are those of its start ("fixed").
        server_lr: eta_g.
        ladder: densities that all clients have at least, one after the other; empty to leave them as they are.
        grow_every: rounds until the next density of the ladder.
        combine: how the clients' values of a weight become one.
    """

    family = "parts"

    variants = {
        "by layer": {"threshold": "layer"},
        "by stage": {"threshold": "stage"},
        "as released": {"masks": "followed"},
        "fixed masks": {"masks": "fixed"},
        "growing": {"ladder": [0.3, 0.6, 1.0], "grow_every": 1},
        "half steps": {"server_lr": 0.5},
    }
    aligns_classes = True
    default_capacities = (1.0, 0.25, 0.0625, 0.015625)

    training: fl.LocalTraining = fl.LocalTraining()
    threshold: Threshold = "global"
    masks: Masks = "learnt"
    server_lr: Annotated[float, fl.at_least(0)] = 1.0
    ladder: tuple[Annotated[float, fl.above(0), fl.at_most(1)], ...] = ()
    grow_every: Annotated[int, fl.at_least(1)] = 10
    combine: fl.Aggregate = fl.Aggregate()

    def __post_init__(self) -> None:
        rises = all(low < high for low, high in pairwise(self.ladder))
        fl.require(rises, "ladder", "densities that rise", self.ladder)

    @property
    def keeps_model(self) -> bool:
        """Every round starts from what is sent."""
        return False

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.ONE_ARCHITECTURE})

    def init(self, server: fl.Server) -> State:
        return State(fl.parameters_of(server.build()))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        kinds = {m.id: (m.architecture, self.density(m, server)) for m in server.members(cohort.ids)}
        own = {m.architecture: fl.classes.rows_for(state.weights, m) for m in server.members(cohort.ids)}
        submodels = {kind: self.submodel(own[kind[0]], kind[1], server) for kind in dict.fromkeys(kinds.values())}
        sent = {kind: message_of(own[kind[0]], submodel) for kind, submodel in submodels.items()}
        replies = cohort.stream(self.local_update, {i: sent[kind] for i, kind in kinds.items()})
        means = fl.submodels.CoverageMean(state.weights, self.combine)
        for i, reply in self.combine.arriving(replies):
            means.add(*fl.classes.of_all_classes(reply["weights"], submodels[kinds[i]], server.roster[i]))
            del reply  # before the next comes
        averaged = means.weights()
        if self.server_lr == 1:
            return State(averaged)
        return State(fl.weights.plus(state.weights, fl.weights.minus(averaged, state.weights), self.server_lr))

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        return fl.Schema(weights=fl.schema.like(message["weights"]))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        net, masks = sparse_net(client, message)
        own = fl.parameters_of(net)
        theta = self.least({name: own[name][mask].abs() for name, mask in masks.items()}, 1.0)
        extras = {"kept": masks, "thresholds": theta}
        yield fl.Fit(net, MaskedLoss(client.criterion, self.masks), client.train, self.training, extras=extras)
        trained = fl.parameters_of(net)
        return fl.Message(weights=fl.submodels.select(trained, {**fl.submodels.whole(trained), **masks}))

    def inference_message(self, state: State, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        member = server.roster[client_id]
        own = fl.classes.rows_for(state.weights, member)
        return message_of(own, self.submodel(own, self.density(member, server), server))

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> Generator[fl.NormStatistics, Any, nn.Module]:
        net, _ = sparse_net(client, message)
        yield fl.NormStatistics(net, client.train, self.training.batch_size)
        return net

    def global_model(self, state: State, server: fl.Server) -> nn.Module | None:
        net = server.build()
        return None if fl.buffers_of(net) else fl.load(net, state.weights)

    def density(self, member: fl.Member, server: fl.Server) -> float:
        """gamma_k in this round."""
        if not self.ladder:
            return member.capacity
        step = max(server.round - 1, 0) // self.grow_every
        return max(member.capacity, self.ladder[min(step, len(self.ladder) - 1)])

    def submodel(self, weights: Mapping[str, Tensor], density: float, server: fl.Server) -> fl.submodels.SubModel:
        """The largest weights, as masks by name; weights of one size come together."""
        sizes = {name: weights[name].abs() for name in server.about(None, maskable)}
        theta = self.least(sizes, density)
        return {**fl.submodels.whole(weights), **{name: size >= theta[name] for name, size in sizes.items()}}

    def least(self, sizes: fl.Weights, density: float) -> fl.Weights:
        """By name, the smallest of this share of the sizes, the largest, in all that shares the weight's threshold."""
        group = {name: compared_with(name, self.threshold) for name in sizes}
        compared: dict[str, list[Tensor]] = {}
        for name, size in sizes.items():
            compared.setdefault(group[name], []).append(size.flatten())
        found = {key: smallest_of_largest(torch.cat(all), density) for key, all in compared.items()}
        return {name: found[group[name]] for name in sizes}


@dataclass(frozen=True)
class MaskedLoss:
    """f(x * m(x)): the task's loss of the net whose small weights are left out."""

    criterion: fl.Criterion
    masks: Masks

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch."""
        own, thresholds = dict(net.named_parameters()), extras["thresholds"]
        large = {n: masked(own[n], kept, thresholds[n], self.masks) for n, kept in extras["kept"].items()}
        return self.criterion(fl.call_with(net, large, batch.inputs), batch.targets)


def masked(x: Tensor, kept: Tensor, theta: Tensor, masks: Masks) -> Tensor:
    """The masked x * m(x), with the surrogate dm / d|x| = 2 theta / (|x| + theta)^2 for what is kept."""
    size = x.detach().abs()
    large = x * (kept if masks == "fixed" else kept & (size >= theta))
    if masks != "learnt":
        return large
    slope = (1 + 2 * theta * size / (size + theta).square()).nan_to_num(1.0)  # 0 / 0 where both are 0
    return large.detach() + slope * (large - large.detach())  # the value of `large`, and `slope` times its gradient


def compared_with(name: str, threshold: Threshold) -> str:
    """The part of the net within which the weight of this name is compared with others."""
    if threshold == "global":
        return ""
    first, *rest = name.split(".")
    stage = ".".join([first, *rest[:1]]) if first == "stages" else first
    return stage if threshold == "stage" else name.rpartition(".")[0]


def smallest_of_largest(sizes: Tensor, density: float) -> Tensor:
    """The smallest of this share, rounded down, of the sizes (n,), the largest of them; of one at least."""
    count = max(1, int(density * len(sizes)))
    return sizes.kthvalue(len(sizes) - count + 1).values


def maskable(net: nn.Module, input_shape: fl.InputShape = ()) -> tuple[str, ...]:
    """Names of the trained weights that are not those of norms."""
    of_norms = {id(parameter) for norm in fl.batchnorm.norms_of(net) for parameter in norm.parameters()}
    return tuple(name for name, p in net.named_parameters() if p.requires_grad and id(p) not in of_norms)


def message_of(weights: Mapping[str, Tensor], submodel: fl.submodels.SubModel) -> fl.Message:
    """A sub-model, and where it lies."""
    masks = {name: fl.submodels.packed(place) for name, place in submodel.items() if isinstance(place, Tensor)}
    return fl.Message(weights=fl.submodels.select(weights, submodel), masks=masks)


def sparse_net(client: fl.Client, message: fl.Message) -> tuple[nn.Module, fl.Weights]:
    """On the client, the net of the weights that were sent, and 0 for the others; and the masks by name."""
    nothing = fl.weights.zeros_like(fl.parameters_of(client.model))
    masks = {name: fl.submodels.unpacked(bits, nothing[name].shape) for name, bits in message["masks"].items()}
    dense = fl.submodels.put(message["weights"], {**fl.submodels.whole(nothing), **masks}, nothing)
    return fl.load(client.model, dense, partial=True), masks
