"""InclusiveFL: no one left behind, by momentum knowledge distillation.

Liu, Wu, Wu, Wang, Lyu, Chen, Xie. KDD 2022. https://arxiv.org/abs/2202.08036.

Clients have models of several depths, each the lower part of the next, and average the layers that they share. A
shallow model's top layers have to do what many layers of a deeper one do; so into their update goes a share of what the
deeper model's layers, from there to its own top, have learnt in the mean.

Symbols
    i         a size: one architecture; i + 1 the next larger one that contains its blocks
    g_i       updates[i], the mean way of the clients of size i in this round
    L_i       tops, the last block of each of the size's rows of blocks
    m_i       momentum(...), the mean of g_(i+1) over its blocks from L_i to L_(i+1)
    beta      beta

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    beta=0.0 approaches fedavg
    beta=0.0 averages each layer over its owners on batchnorm=true
    beta=0.0 sharing.scope="architecture" equals fedavg sharing.scope="architecture"
    equals fedavg on architectures=1
    training.lr=0.0 stays at rest

Departures from the paper
    1. Of the paper only the introduction was at hand; the rest follows the authors' code, except for departures 2, 3
       and 4.
    2. In that code the momentum is switched off: it is mixed in only while it still has its initial value, a plain 0,
       after which it is a tensor; it is also overwritten instead of summed over layers, and refers to gradients that
       are zeroed before they are read. Here it is what the formula says, in every round.
    3. m_i is of the same round, so that it is not about weights of long ago; the code means that of the round before,
       `momentum="previous"`. A size of whose next larger one nobody has answered (in that round) has no momentum.
    4. Every layer is shared between the sizes by default, as the papers have it that use this as a baseline. In the
       code a size keeps its top layer and its classifier to itself, `shared="lower"`.
    5. Clients train by `training`, and g_i is the way that they went. In the code a client sends its gradient at the
       weights it was sent, for which the server has an AdamW by size with a falling rate.
    6. The paper's models are transformers, whose layers are one row of blocks. In a network whose stages are rows of
       blocks, as ResNets' are, or that has its blocks in several lists, each row has a top of its own. A tensor has no
       momentum if the blocks that m_i is over do not all have it in one shape, such as the first block of a stage that
       halves the image.
    7. BatchNorm's running statistics are averaged like those of FedAvg and have no momentum.
    8. A rule of `sharing.combine` acts among the clients of one size, and then among the sizes, so it protects only
       sizes with enough clients: "trimmed" with 0.2 drops nobody of fewer than five.
    9. Local training defaults to Adam, like all methods here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Annotated, Literal

from torch import nn

from potluck import fl

Rows = Mapping[str, Sequence[fl.stages.BlockTensors]]
"""Of one architecture, by row the blocks from the input on."""


@dataclass(frozen=True)
class State:
    """The server's weights.

    Attributes:
        weights: by group of clients, the layers that its sizes share; one that no size shares keeps its first value.
        own: by size, the layers that it keeps to itself.
        updates: by size, g_i of the last round, if its momentum is still to be used.
    """

    weights: fl.GroupWeights
    own: fl.GroupWeights
    updates: fl.GroupWeights


@dataclass(frozen=True)
class InclusiveFL(fl.SharesWeights[State]):
    """Hyper-parameters of InclusiveFL.

    Attributes:
        training: a client's local training.
        beta: share of the momentum in the update of a size's top blocks.
        momentum: the round whose momentum it is.
        shared: which layers the sizes of a group share: "all", or the "lower" ones, all but their top blocks and heads.
        sharing: who averages with whom, with which weights.
    """

    family = "parts"
    unguarded = "a rule acts among the clients of one size, and 'trimmed' drops none of three"

    variants = {
        "layers of its own": {"shared": "lower"},
        "as the code means it": {"shared": "lower", "momentum": "previous"},
        "by architecture": {"sharing.scope": "architecture"},
    }

    training: fl.LocalTraining = fl.LocalTraining()
    beta: Annotated[float, fl.at_least(0), fl.at_most(1)] = 0.2
    momentum: Literal["same", "previous"] = "same"
    shared: Literal["all", "lower"] = "all"
    sharing: fl.Averaging = fl.Sharing()

    @property
    def by_size(self) -> fl.Sharing:
        """How the clients of one size average."""
        return replace(self.sharing, scope="architecture")

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.SPLIT_MODEL, fl.contract.STAGES}

    def init(self, server: fl.Server) -> State:
        pool, own = self.sharing.initial(server), fl.GroupWeights()
        if self.shared == "lower":
            for size, member in sizes(server).items():
                layers = fl.weights.pick(pool[self.sharing.group(member)], member.shapes)
                own[size] = {n: w for n, w in layers.items() if n in server.about(size, apart)}
        return State(pool, own, {})

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        models = self._models(state, server)
        replies = cohort.stream(self.local_update, self.by_size.send(models, cohort, server))
        means = self.by_size.means(replies, server.roster, "weights", "buffers")
        trained = means.of("weights")  # homogeneous aggregation
        updates = {i: fl.weights.minus(weights, models[i]) for i, weights in trained.items()}  # g_i
        known = updates if self.momentum == "same" else state.updates
        for i, g in updates.items():
            larger = next_larger(i, server)
            if larger is not None and larger in known:
                m = momentum(g, server.about(i, rows), known[larger], server.about(larger, rows))
                trained[i] = fl.weights.plus(
                    trained[i], fl.weights.minus(m, g), self.beta
                )  # by beta m_i + (1 - beta) g_i
        shares = {size: max(by_layer.values()) for size, by_layer in means.weights("weights").items()}
        found = means.over(trained, "buffers")
        kept = {size: {name: found.get(size, own)[name] for name in own} for size, own in state.own.items()}
        return State(self._shared(state, found, shares, server), kept, updates if self.momentum == "previous" else {})

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        return self.sharing.reply(client)

    def inference_message(self, state: State, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        return self.by_size.message(self._models(state, server), server.roster[client_id])

    def global_model(self, state: State, server: fl.Server) -> nn.Module | None:
        return self.by_size.global_model(self._models(state, server), server)

    def _models(self, state: State, server: fl.Server) -> fl.GroupWeights:
        """By size, the weights that it picks its layers from."""
        groups = {size: self.sharing.group(member) for size, member in sizes(server).items()}
        return {size: {**state.weights[group], **state.own.get(size, {})} for size, group in groups.items()}

    def _shared(
        self, state: State, found: fl.GroupWeights, shares: Mapping[str, float], server: fl.Server
    ) -> fl.GroupWeights:
        """Heterogeneous aggregation: each layer's mean over the sizes that share it."""
        pool: fl.GroupWeights = {}
        for group, keep in state.weights.items():
            ours = [size for size in found if self.sharing.group(sizes(server)[size]) == group]
            layers = [{n: w for n, w in found[size].items() if n not in state.own.get(size, {})} for size in ours]
            pool[group] = fl.weights.mean_where_present(
                layers, [shares[size] for size in ours], keep, self.sharing.combine
            )
        return pool


def sizes(server: fl.Server) -> dict[str, fl.Member]:
    """One client of each architecture, from the smallest on."""
    members = {member.architecture: member for member in server.roster.values()}
    weight = {size: sum(shape.numel() for shape in member.shapes.values()) for size, member in members.items()}
    return {size: members[size] for size in sorted(members, key=lambda size: (weight[size], size))}


def next_larger(size: str, server: fl.Server) -> str | None:
    """The next larger architecture that has the top blocks of this one; None for the largest."""
    ordered, top = sizes(server), tops(server.about(size, rows))
    needed = {name: shape for name, shape in ordered[size].shapes.items() if name in top}
    after = list(ordered)[list(ordered).index(size) + 1 :]
    return next((other for other in after if needed.items() <= ordered[other].shapes.items()), None)


def momentum(g: fl.Weights, own: Rows, larger: fl.Weights, theirs: Rows) -> fl.Weights:
    """m_i of each tensor of the top blocks for which it is defined.

    Args:
        g: the size's update.
        own: its rows.
        larger: the update of the next larger size.
        theirs: its rows.
    """
    found: fl.Weights = {}
    for row, (*_, top) in own.items():
        names = {name: own for own, name in top.items()}
        above = list(dropwhile(lambda block, top=top: not {*top.values()} <= {*block.values()}, theirs.get(row, [])))
        for name in [name for name in g if name in names]:
            layers = [larger.get(block.get(names[name], "")) for block in above]
            same = [layer for layer in layers if layer is not None and layer.shape == g[name].shape]
            if 0 < len(same) == len(above):
                found[name] = fl.weights.mean(same, [1.0] * len(same))
    return found


def rows(net: nn.Module, input_shape: fl.InputShape = ()) -> Rows:
    """A net's rows: the blocks of each stage or list that has several, and all other blocks together."""
    return fl.stages.stages_of(net).rows


def tops(found: Rows) -> frozenset[str]:
    """The names of the weights of each row's last block."""
    return frozenset(name for row in found.values() for name in row[-1].values())


def apart(net: nn.Module, input_shape: fl.InputShape = ()) -> frozenset[str]:
    """The names of the weights that a size may keep to itself: of its top blocks and its head."""
    return tops(rows(net)) | fl.split(net).last_names()
