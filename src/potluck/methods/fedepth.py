"""FeDepth: memory-adaptive depth-wise heterogeneous federated learning.

Zhang, Dai, Wang, Xing, Chen, Sun. 2023. https://arxiv.org/abs/2303.04887. Algorithm 1.

Every client trains the whole network, as many consecutive blocks at a time as its memory holds: piece after piece,
the finished ones frozen, each one supervised through the classifier, to which a link without parameters leads. A
client's memory is its capacity, the share of what training the whole network at once takes. The paper's scenarios
are `federation.capacities` of [0.1667, 0.3333, 0.5, 1.0] (Fair), [0.125, 0.1667, 0.5, 1.0] (Lack), and those of Fair
with `models=2` (Surplus).

Symbols
    W         state.pool
    p_k       len(client.train)
    theta_j   the stages from piece.start to before piece.stop
    J_k       len(pieces)
    phi       the classifier: norms behind the last block, pooling, head
    z_j       data.inputs, the output of the finished pieces for every example of the client
    Pi_j      SkipLink
    M         models

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    equals fedavg on capacity=1.0 architectures=1
    equals fedavg on capacity=1.0
    buffer=true approaches fedepth buffer=false on capacity=0.5
    counts a twin as twice the data
    training.lr=0.0 stays at rest

Departures from the paper
    1. Pieces are packed by the paper's estimate within `slack` times the budget. Literally the paper's own pieces
       exceed its budgets by up to 4.2 %; with 1.05 all its five decompositions come out. Budgets are shares of the
       net's parameters and activations, the paper's of activations only, so capacity 1 is always one piece.
    2. The paper's estimate leaves the stem out; it is trained with the first block, as in the authors' code. A first
       stage that takes at least half of what the second does is no stem but a block, see `potluck.memory`.
    3. A finished piece normalises with statistics measured on the client's examples when it is frozen, and sends
       these back; its running statistics lag behind its weights where there are few steps. The authors' code has
       batch statistics everywhere, with which z_j would depend on which examples share a batch.
    4. Each sub-problem has a fresh optimiser of its own tensors. In the authors' code one optimiser with momentum and
       weight decay goes on moving the frozen ones.
    5. z_j is computed once from examples without augmentation; `buffer=false` passes every augmented batch.
    6. `link="subsample"` is that of the authors' code; the paper only says skip connection. Where a piece puts out
       more channels than the classifier reads, it drops the outer ones; from images to flat features it is the mean.
    7. Blocks that do not fit are frozen and their weights not sent back, so that they do not count in the mean
       (`partial="freeze"`, the paper's text). `partial="bypass"` is the authors' code: the stem leads straight to the
       first block that fits, is trained with it, and the blocks between count as they were sent.
    8. With `models` above 1 each loss has no 1 / M, as in the authors' code, and they step in turn, as in mutual
       learning (Zhang et al. 2018), each seeing its peers' last step. Peers start from weights drawn afresh and stay
       with their client; by a slip all clients share one in the code.
    9. Local training defaults to Adam like all methods here; the paper has SGD with 0.1, the code with 0.01, momentum
       0.9 and weight decay 5e-4, both with a cosine schedule over rounds.
"""

import copy
import functools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Size, Tensor, nn
from torch.nn import functional as F

from potluck.core.batchnorm import keep_statistics, measure_statistics
from potluck.core.errors import ConfigError
from potluck.core.examples import Batch, Examples
from potluck.core.federation import Criterion
from potluck.core.fit import Extras, Fit, FitReport, LocalTraining
from potluck.core.inference import predict
from potluck.core.message import Message
from potluck.core.method import ClientWork, Need, on_client
from potluck.core.modes import mode
from potluck.core.roles import Client, Cohort, Server
from potluck.core.sharing import Pool, SharesWeights, Sharing
from potluck.core.weights import Weights, load, weights_of
from potluck.losses import distillation
from potluck.memory import SLACK, MemoryModel, Piece, between, bypassed
from potluck.models.contract import StagedNet

Link = Literal["subsample", "average"]
Exit = Callable[[StagedNet, Piece, MemoryModel], nn.Module]


@dataclass(frozen=True)
class State:
    """The server's weights, by group of clients."""

    pool: Pool


@dataclass(frozen=True)
class DepthWise:
    """Local training piece by piece, of FeDepth and m-FeDepth.

    Attributes:
        training: of each sub-problem; every piece has all the epochs.
        sharing: who averages with whom.
        partial: what becomes of leading blocks that do not fit, "freeze" or "bypass", see departure 7.
        buffer: whether the finished pieces' output is computed once and kept, or anew for every batch.
        slack: budgets are multiplied by it.
        models: nets that a client of capacity 1 trains together, of which it sends one; 2 in the paper's Surplus.
    """

    training: LocalTraining = LocalTraining()
    sharing: Sharing = Sharing()
    partial: Literal["freeze", "bypass"] = "freeze"
    buffer: bool = True
    slack: float = SLACK
    models: int = 1

    def __post_init__(self) -> None:
        if not self.slack > 0:
            raise ValueError(f"slack: expected above 0, found {self.slack}")
        if self.models < 1:
            raise ValueError(f"models: expected at least 1, found {self.models}")

    def check_budgets(self, server: Server) -> None:
        """Refuse clients that could not train a single piece, before anybody trains.

        Raises:
            ConfigError: there is one; with the least memory that would do.
        """
        memories: dict[str, MemoryModel] = {}
        for member in server.roster.values():
            name = member.architecture
            if name not in memories:
                memories[name] = MemoryModel.of(staged(server.build(name)), server.input_shape)
            try:
                memories[name].pieces(self.slack * member.capacity * memories[name].whole)
            except ValueError as error:
                raise ConfigError(f"client {member.id}, capacity {member.capacity:g} of {name}: {error}") from error

    def learn(self, client: Client, lead_out: Exit) -> Generator[Fit, FitReport, dict[str, Any]]:
        """Alg. 1, l. 11-17: the sub-problems (1) one after the other; the entries of the reply.

        Args:
            client: with the weights it was sent.
            lead_out: makes of a piece the net of its sub-problem, from the piece's input to logits.
        """
        net = staged(client.model)
        if self.models > 1 and client.capacity == 1:
            yield from learn_mutually(client, self.models, self.training)
            return self.sharing.reply(client)
        memory = MemoryModel.of(net, client.train.input_shape)
        pieces = memory.pieces(self.slack * client.capacity * memory.whole)
        frozen = between(net, 0, pieces[0].start)
        if len(frozen) and self.partial == "bypass":
            net, pieces, frozen = *bypassed(net, pieces, memory), nn.Sequential()
        elif len(frozen) and self.sharing.buffers != "average":  # no statistics come for what is not trained here
            measure_statistics(frozen, inputs_behind(nn.Sequential(), client.train, client.rng))
        done, z = 0, client.train
        for number, piece in enumerate(pieces):
            before, last = between(net, 0, done), between(net, done, piece.start)
            if number > 0:
                measure_statistics(last, inputs_behind(nn.Sequential() if self.buffer else before, z, client.rng))
            done = piece.start
            sub_problem = lead_out(net, piece, memory)
            if self.buffer:
                z = passed(last, z, self.training.batch_size)
                yield Fit(sub_problem, client.objective, z, self.training)
            else:
                extras = {"finished": between(net, 0, piece.start)}
                yield Fit(sub_problem, AfterFinished(client.criterion), z, self.training, extras)
        return without(self.sharing.reply(client), [name for name, _ in frozen.named_children()])


@dataclass(frozen=True)
class FeDepth(DepthWise, SharesWeights[State]):
    """Hyper-parameters of FeDepth, after those of `DepthWise`.

    Attributes:
        link: how Pi_j meets the classifier's size of image: every s-th row and column ("subsample"), or means.
    """

    link: Link = "subsample"

    def needs(self) -> frozenset[Need]:
        return super().needs() | {Need.SPLIT_MODEL}

    def init(self, server: Server) -> State:
        self.check_budgets(server)
        return State(self.sharing.initial(server))

    def round(self, state: State, cohort: Cohort, server: Server) -> State:
        shares = {i: Message(**self.sharing.share(state.pool, server.roster[i])) for i in cohort.ids}
        replies = cohort.ask(self.local_update, shares)
        return State(self.sharing.merge(state.pool, replies, server.roster))  # Alg. 1, l. 9

    @on_client
    def local_update(self, client: Client, message: Message) -> ClientWork:
        self.sharing.receive(client, message)
        reply = yield from self.learn(client, functools.partial(linked, link=self.link))
        return Message(**reply)


def linked(net: StagedNet, piece: Piece, memory: MemoryModel, link: Link = "subsample") -> StagedNet:
    """phi(Pi_j(theta_j(z))): the piece, and behind it the link if it is not the last, and the classifier."""
    parts = list(net.stages.named_children())
    classifier = len(parts) - memory.after
    to_classifier = [] if piece.stop == classifier else [("skip link", SkipLink(memory.features, link))]
    chosen = [*parts[piece.start : piece.stop], *to_classifier, *parts[classifier:]]
    return StagedNet(dict(chosen), net.head, net.pool)


class SkipLink(nn.Module):
    """Pi_j without parameters: a block's output in the shape that the classifier reads.

    Rows and columns are sampled at equal distances, or averaged. Channels are filled up with zeros on both sides,
    and the outer ones dropped if there are too many. Before flat features an image becomes its mean over positions.

    Args:
        features: shape of one example at the classifier.
        link: "subsample" or "average".
    """

    def __init__(self, features: Size, link: Link) -> None:
        super().__init__()
        self.features = features
        self.link = link

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (batch, channels, ...) of a block to (batch, *features)."""
        found = tuple(x.shape[1:])
        if found == self.features:
            return x
        if x.dim() == 4 and len(self.features) == 1:
            x = x.mean((2, 3))
        if x.dim() != 1 + len(self.features) or x.dim() == 3:
            raise ValueError(f"block's output {found}: no skip link leads to features {tuple(self.features)}")
        if x.dim() == 4:
            height, width = self.features[1:]
            x = sampled(x, height, width) if self.link == "subsample" else F.adaptive_avg_pool2d(x, (height, width))
        lacking = self.features[0] - x.shape[1]
        positions = [0] * 2 * (x.dim() - 2)
        return F.pad(x, (*positions, lacking // 2, lacking - lacking // 2))


def sampled(x: Tensor, height: int, width: int) -> Tensor:
    """Rows and columns of x (batch, channels, ...) at equal distances: every s-th where s divides the size."""
    rows, columns = (torch.arange(n) * of // n for n, of in ((height, x.shape[2]), (width, x.shape[3])))
    return x[:, :, rows][..., columns]


@dataclass(frozen=True)
class AfterFinished:
    """The task's loss of a sub-problem whose input is computed for each batch by the finished pieces."""

    criterion: Criterion

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        inputs, targets = batch
        with mode(extras["finished"], training=False), torch.no_grad():
            z = extras["finished"](inputs)
        return self.criterion(net(z), targets)


@dataclass(frozen=True)
class Mutual:
    """One net's part of mutual distillation: its task's loss, and the mean KL(peer || net) of its peers."""

    name: str
    criterion: Criterion

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        inputs, targets = batch
        nets = dict(net.named_children())
        peers = [peer for name, peer in nets.items() if name != self.name]
        logits = nets[self.name](inputs)
        loss = self.criterion(logits, targets)
        for peer in peers:
            with torch.no_grad(), keep_statistics(peer):
                taught = peer(inputs)
            loss = loss + distillation(logits, taught) / len(peers)
        return loss


def learn_mutually(client: Client, models: int, training: LocalTraining) -> Generator[Fit, FitReport]:
    """Train the client's model and its peers, who stay in its state, on one another's predictions."""
    stored: dict[str, Weights] = client.state.get("peers", {})
    peers: dict[str, nn.Module] = {}
    for name in (f"peer{number}" for number in range(1, models)):
        peer = copy.deepcopy(client.model)
        peers[name] = load(peer, stored[name]) if name in stored else drawn_afresh(peer)
    nets = nn.ModuleDict({"own": client.model, **peers})
    losses = [Mutual(name, client.criterion) for name in nets]
    yield Fit(nets, losses, client.train, training, turns=[(f"{name}.",) for name in nets])
    client.state["peers"] = {name: weights_of(peer) for name, peer in peers.items()}


def drawn_afresh(net: nn.Module) -> nn.Module:
    """The net, with every layer that can be as torch starts it."""
    for module in net.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return net


def inputs_behind(finished: nn.Sequential, z: Examples, rng: torch.Generator) -> Iterator[Tensor]:
    """What finished stages put out, batch by batch in random order, for measuring the statistics of the next."""
    for inputs, _ in z.batches(64, rng):
        with mode(finished, training=False), torch.no_grad():
            yield finished(inputs)


def passed(finished: nn.Sequential, z: Examples, batch_size: int) -> Examples:
    """The examples behind finished stages, in evaluation mode and without gradients; as they are if there is none."""
    return Examples(predict(finished, z, batch_size), z.labels) if len(finished) else z


def without(reply: dict[str, Any], stages: list[str]) -> dict[str, Any]:
    """The entries of a reply without the weights and buffers of some stages."""
    prefixes = tuple(f"stages.{name}." for name in stages)
    for entry in ("weights", "buffers"):
        held: Weights = reply[entry] or {}
        reply[entry] = {name: w for name, w in held.items() if not name.startswith(prefixes)} or None
    return reply


def staged(net: nn.Module) -> StagedNet:
    """The net as one with stages, which `needs` has made sure of."""
    assert isinstance(net, StagedNet)
    return net
