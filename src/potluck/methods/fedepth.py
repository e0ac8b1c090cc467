"""FeDepth: memory-adaptive depth-wise heterogeneous federated learning.

Zhang, Dai, Wang, Xing, Chen, Sun. 2023. https://arxiv.org/abs/2303.04887. Algorithm 1.

Every client trains the whole network, as many consecutive blocks at a time as its memory holds: piece after piece,
the finished ones frozen, each one supervised through the classifier, to which a link without parameters leads. A
client's memory is its capacity, the share of what training the whole network at once takes. The paper's scenarios
are `federation.capacities` of [0.1667, 0.3333, 0.5, 1.0] (Fair, the default), [0.125, 0.1667, 0.5, 1.0] (Lack), and
those of Fair with `models=2` (Surplus). `potluck.parts.depthwise` says what a budget counts and what it does not;
benchmarks/results/fedepth_memory.md gives measurements.

Symbols
    W         state.weights
    p_k       len(client.train)
    theta_j   the stages from piece.start to before piece.stop
    J_k       len(pieces)
    phi       the classifier: norms behind the last block, pooling, head
    z_j       data.inputs, the output of the finished pieces for every example of the client
    Pi_j      SkipLink
    M         models
    mu, w^t   mu and extras["sent"], of FedProx

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1
    with      assignment="dynamic" slack=1.5 also: down capacity 1; up weights at most |w|

Limits
    equals fedavg on capacity=1.0 architectures=1
    equals fedavg on capacity=1.0
    mu=0.1 equals fedprox mu=0.1 on capacity=1.0
    mu=1e-9 approaches fedepth on capacity=0.75 optimizer="sgd"
    mu=0.1 buffer=true approaches fedepth mu=0.1 buffer=false on capacity=0.7
    assignment="dynamic" equals fedepth on capacity=0.75
    buffer=true approaches fedepth buffer=false on capacity=0.7
    counts a twin as twice the data on capacity=0.75
    training.lr=0.0 stays at rest

Departures from the paper
    1. Pieces are packed by the paper's estimate within `slack` times the budget. Literally the paper's own pieces
       exceed its budgets by up to 4.2 %; with 1.05 all its five decompositions come out. Budgets are shares of the
       net's parameters and activations, the paper's of activations only, so capacity 1 is always one piece. The
       estimate is for the training's own batches and counts gradients and the optimiser's moments; the paper's is for
       batches of 32, though it trains with 128, and counts parameters once. A block that was seen to keep more than
       its estimate counts as what it keeps; of the paper's net none does.
    2. The paper's estimate leaves the stem out; it is trained with the first block, as in the authors' code. A first
       stage that takes at least half of what the second does is no stem but a block, see `potluck.parts.memory`.
    3. A finished piece normalises with statistics measured on the client's examples when it is frozen, and sends
       these back; its running statistics lag behind its weights where there are few steps. The authors' code has
       batch statistics everywhere, with which z_j would depend on which examples share a batch.
    4. Each sub-problem has a fresh optimiser of its own tensors. In the authors' code one optimiser with momentum and
       weight decay goes on moving the frozen ones.
    5. z_j is computed once, from examples without augmentation, and lies in memory where the budget has room for it
       beside training and in a temporary file elsewhere, with the same bits. (A folder for temporary files that is
       itself in memory is no relief; TMPDIR names another.) The paper buffers where the budget permits, and computes
       anew elsewhere, as `buffer=false` does everywhere, with every augmented batch.
    6. `link="subsample"` is that of the authors' code; the paper only says skip connection. Where a piece puts out
       more channels than the classifier reads, it drops the outer ones; from images to flat features it is the mean.
    7. Blocks that do not fit are frozen and their weights not sent back, so that they do not count in the mean
       (`partial="freeze"`, the paper's text). `partial="bypass"` is the authors' code: the stem leads straight to the
       first block that fits, is trained with it, and the blocks between count as they were sent. In the code's
       Lack clients of 1/6 have this path too, though they train as in Fair: a slip, which is not followed.
    8. With `models` above 1 each loss has no 1 / M, as in the authors' code, and they step in turn, as in mutual
       learning (Zhang et al. 2018), each seeing its peers' last step; in the code both step at once. Peers start
       from weights drawn afresh and stay with their client; by a slip all clients share one in the code.
    9. Local training defaults to Adam, a constant rate, one epoch and batches of 16 like all methods here. The paper
       has SGD with 0.1, the code with 0.01, momentum 0.9 and weight decay 5e-4; both have ten epochs, batches of 128
       and a cosine over the rounds (`training.schedule`).
    10. Every sub-problem has all the epochs, as in the authors' code, so a client takes J_k times the steps of one that
       trains the whole net. The paper leaves the number open; its remark that J_k sub-problems cost about as much as
       the whole net holds for equally many updates of each weight, with z_j buffered, and counts no extra forward pass.
    11. The paper's inference from disk, piece by piece, is not carried out: models are evaluated whole, like all here.
    12. The paper says that FeDepth goes with "most FL algorithms, e.g., FedAvg and FedProx", and not how. With `mu` the
       loss of each sub-problem has FedProx's term, over the weights that the piece trains, phi among them, towards the
       round's W. Of nets that teach each other the one that is sent has it. FedDyn is not offered: its g_k remembers
       the gradient of one loss, and phi has a loss for each piece, other ones with other budgets. MOON is not: it
       compares features that the whole model makes, and of a piece but the last there are none.
    13. Budgets are a client's own and constant, as in the paper's experiments; it also speaks of budgets that vary "on
       the fly". `assignment="dynamic"` draws one for each client of the cohort in each round, from those of all
       clients; a client's own does not limit what is drawn.
"""

import functools
from dataclasses import dataclass

import torch
from torch import nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """The server's weights, by group of clients."""

    weights: fl.GroupWeights


@dataclass(frozen=True)
class FeDepth(fl.depthwise.DepthWise, fl.SharesWeights[State]):
    """Hyper-parameters of FeDepth, after those of `DepthWise`.

    Attributes:
        link: how Pi_j meets the classifier's size of image: every s-th row and column ("subsample"), or means.
    """

    aligns_classes = True
    variants = {
        "bypass": {"partial": "bypass"},
        "without a buffer": {"buffer": False},
        "averaging link": {"link": "average"},
        "two models": {"models": 2},
        "proximal": {"mu": 0.1},
        "dynamic": {"assignment": "dynamic", "slack": 1.5},
    }

    link: fl.links.Link = "subsample"

    def needs(self) -> frozenset[fl.Need]:
        classes = {fl.Need.CLASSES} if self.models > 1 else set[fl.Need]()
        return super().needs() | classes | {fl.Need.SPLIT_MODEL, fl.contract.STAGES, fl.Need.ONE_INPUT}

    def init(self, server: fl.Server) -> State:
        self.check_budgets(server)
        return State(self.sharing.initial(server))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.stream(self.local_update, self.send(state.weights, cohort, server))
        return State(self.sharing.merge(state.weights, replies, server.roster))  # Alg. 1, l. 9

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        return fl.Schema(**self.expected(member, message))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        capacity = message.get("capacity", client.capacity)
        del message  # its weights are in the model now, and this client's memory is short
        memory = self.estimate(client.model, client.train.input_shape)
        return (yield from self.learn(client, capacity, memory, functools.partial(linked, link=self.link)))

    def check_pieces(self, net: fl.stages.Stages, pieces: list[fl.memory.Piece], memory: fl.memory.MemoryModel) -> None:
        for given in [memory.parts[piece.stop - 1].output for piece in pieces[:-1]]:
            maps = [shape for shape in (given, memory.features) if len(shape) == 3]
            if given != memory.features and not all(net.has_maps(shape) for shape in maps):
                raise ValueError(f"block's output {tuple(given)}: no skip link leads from where channels come last")
            try:
                fl.links.SkipLink(memory.features, self.link)(torch.zeros(1, *given))
            except ValueError as error:
                raise ValueError(f"{error}; use mfedepth, which has none") from error


def linked(
    net: nn.Module | fl.stages.Stages,
    piece: fl.memory.Piece,
    memory: fl.memory.MemoryModel,
    link: fl.links.Link = "subsample",
) -> nn.Module:
    """phi(Pi_j(theta_j(z))): the piece, and behind it the link if it is not the last, and the classifier."""
    whole = fl.stages.stages_of(net)
    classifier = len(whole.stages) - memory.after
    to_classifier = None if piece.stop == classifier else fl.links.SkipLink(memory.features, link)
    return whole.to_outputs(piece.start, piece.stop, classifier, to_classifier)
