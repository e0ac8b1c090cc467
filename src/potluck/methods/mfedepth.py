"""m-FeDepth: memory-adaptive depth-wise heterogeneous federated learning with auxiliary classifiers.

Zhang, Dai, Wang, Xing, Chen, Sun. 2023. https://arxiv.org/abs/2303.04887. Algorithm 1, second learning strategy.

As FeDepth, but a piece is supervised through a small classifier of its own behind its last block, instead of a link to
the network's classifier. The auxiliary classifiers are averaged like weights, each over the clients that trained it,
and are never used to predict. Mutual distillation is FeDepth's `models`.

Symbols
    W         state.weights
    theta_j   the stages from piece.start to before piece.stop
    phi_j     exits, by the name of the block that they follow
    p_k       len(client.train)
    mu, w^t   mu and extras["sent"], of FedProx; phi_j has the term too

Wire
    down      weights |w|, buffers |b|, exits |exits|
    up        weights |w|, buffers |b|, exits at most |exits|, examples 1
    with      assignment="dynamic" slack=1.5 also: down capacity 1; up weights at most |w|

Limits
    equals fedavg on capacity=1.0 architectures=1
    equals fedepth on capacity=1.0
    mu=0.1 equals fedprox mu=0.1 on capacity=1.0
    mu=1e-9 approaches mfedepth on capacity=0.75 optimizer="sgd"
    mu=0.1 buffer=true approaches mfedepth mu=0.1 buffer=false on capacity=0.7
    assignment="dynamic" equals mfedepth on capacity=0.75
    buffer=true approaches mfedepth buffer=false on capacity=0.7
    counts a twin as twice the data on capacity=0.75
    training.lr=0.0 stays at rest

Departures from the paper
    1. Departures 1 to 5 and 7 to 13 of FeDepth. The estimate counts the net's own classifier with every piece.
    2. The paper says "auxiliary classifiers" and no more. As in the authors' code each is a batch norm, a mean over
       positions and a linear layer, without ReLU; nets without batch norm have none there. In transformers it is a
       layer norm, the net's own pooling and a linear layer; the pooling of one without stages is a mean over tokens.
    3. Every block but the last can have one; the code has them where its own pieces end.
    4. A classifier is averaged over the clients that trained it. The code multiplies those of the groups that did by
       fixed factors, which is the same where every group has equally many clients in the cohort; the classifier behind
       block 6 has no factor there, and is averaged with copies that nobody trained.
    5. The norms of auxiliary classifiers keep no running statistics: they never predict.
    6. The last piece has the net's own classifier, with a ReLU behind its norm where the net has one. In the code the
       last classifier is like the others, without.
    7. The code's slips in which stages the smallest budgets train are not followed.
    8. The paper never says what m-FeDepth is. "A variant of FeDepth" that uses mutual knowledge distillation would suit
       the letter; but its Table 2 has m-FeDepth also under budgets with which no client can train two nets, and in the
       authors' code the second method is the one with several classifiers.
"""

from dataclasses import dataclass
from functools import partial

from torch import nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """The server's weights, and the auxiliary classifiers, both by group of clients."""

    weights: fl.GroupWeights
    exits: fl.GroupWeights


@dataclass(frozen=True)
class MFeDepth(fl.depthwise.DepthWise, fl.SharesWeights[State]):
    """Hyper-parameters of m-FeDepth: those of FeDepth's `DepthWise`."""

    aligns_classes = True
    variants = {
        "bypass": {"partial": "bypass"},
        "without a buffer": {"buffer": False},
        "two models": {"models": 2},
        "proximal": {"mu": 0.1},
        "dynamic": {"assignment": "dynamic", "slack": 1.5},
    }

    sharing: fl.Averaging = fl.Sharing()

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {
            fl.Need.SPLIT_MODEL,
            fl.contract.STAGES,
            fl.Need.ONE_OUTPUT,
            fl.Need.ONE_INPUT,
            *([fl.Need.CLASSES] if self.models > 1 else []),
        }

    def init(self, server: fl.Server) -> State:
        self.check_budgets(server)
        members = {member.base: member for member in server.roster.values()}
        exits: fl.GroupWeights = {}
        for architecture, member in sorted(members.items()):
            own = fl.parameters_of(self.all_exits(server, server.build(architecture)))
            exits[self.sharing.group(member)] = own | exits.get(self.sharing.group(member), {})
        return State(self.sharing.initial(server), exits)

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        exits, roster = state.exits, {i: self.member(server, i) for i in server.roster}

        def own_exits(member: fl.Member) -> fl.Weights:
            return dict(fl.classes.rows_for(exits[self.sharing.group(member)], roster[member.id]))

        sent = self.send(state.weights, cohort, server, exits=own_exits)
        replies = cohort.stream(self.local_update, sent)
        means = self.sharing.means(replies, roster, "weights", "buffers", "exits")
        return State(weights=means.over(state.weights, "weights", "buffers"), exits=means.over(exits, "exits"))

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        return fl.Schema(
            **self.expected(member, message), exits=fl.schema.optional(fl.schema.some_of(message["exits"]))
        )

    def member(self, server: fl.Server, id: fl.ClientId) -> fl.Member:
        """A client, of which it is known where its exits have its own classes."""
        return fl.exits.with_rows_of_exits(server.roster[id], server, self.all_exits)

    def all_exits(self, server: fl.Server, net: nn.Module) -> nn.ModuleDict:
        """The auxiliary classifiers of a net, with outputs for all classes."""
        return auxiliary_classifiers(server, net, self.estimate(net, server.input_shape))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        memory = self.estimate(client.model, client.train.input_shape)
        exits = auxiliary_classifiers(client, client.model, memory)
        fl.load(
            exits,
            fl.weights.pick(message["exits"], {name: tensor.shape for name, tensor in exits.state_dict().items()}),
        )
        capacity = message.get("capacity", client.capacity)
        del message  # its weights are in the nets now, and this client's memory is short
        used = nn.ModuleDict()

        def lead_out(net: fl.stages.Stages, piece: fl.memory.Piece, memory: fl.memory.MemoryModel) -> nn.Module:
            """phi_j(theta_j(z)); the last piece has the net's own classifier."""
            if piece.stop == len(net.stages) - memory.after:
                return net.to_outputs(piece.start, piece.stop, piece.stop)
            last = net.stages[piece.stop - 1]
            used[last] = exits[last]
            return net.to_exit(piece.start, piece.stop, exits[last])

        reply = yield from self.learn(client, capacity, memory, lead_out)
        return fl.Message(**reply, exits=fl.parameters_of(used) or None)


def auxiliary_classifiers(party: fl.Server | fl.Client, net: nn.Module, memory: fl.memory.MemoryModel) -> nn.ModuleDict:
    """An exit behind every block but the last, by the name of the block's last stage."""
    behind = [memory.parts[stop - 1] for _, stop in memory.blocks[:-1]]
    return fl.exits.new_exits(
        party, net, {part.name: part.output for part in behind}, partial(fl.exits.small_exit, track=False)
    )
