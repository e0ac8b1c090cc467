"""Local training of one net piece by piece, as memory allows: what FeDepth and m-FeDepth have in common.

Zhang et al. 2023. https://arxiv.org/abs/2303.04887, Algorithm 1. The symbols are those of `potluck.methods.fedepth`,
the departures too.
"""

import copy
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from potluck.core.batchnorm import keep_statistics, measure_statistics
from potluck.core.errors import ConfigError
from potluck.core.examples import Batch, Examples
from potluck.core.federation import Criterion, Member
from potluck.core.fit import Extras, Fit, FitReport, LocalTraining
from potluck.core.inference import predict
from potluck.core.message import Message
from potluck.core.modes import mode
from potluck.core.roles import Client, Server
from potluck.core.schema import Kind, optional, some_of
from potluck.core.sharing import Sharing
from potluck.core.weights import Weights, load, weights_of
from potluck.losses import distillation
from potluck.memory import SLACK, MemoryModel, Piece, between, bypassed
from potluck.models.contract import StagedNet

Exit = Callable[[StagedNet, Piece, MemoryModel], nn.Module]
"""Makes of a piece the net of its sub-problem, from the piece's input to logits."""


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

    def expected(self, member: Member, message: Message) -> dict[str, Kind | None]:
        """What the entries of the reply may hold: blocks that do not fit are left out."""
        kinds = self.sharing.expected(member, message)
        sent = {entry: some_of(message[entry]) for entry in ("weights", "buffers") if kinds[entry] is not None}
        return {**kinds, **{entry: optional(kind) for entry, kind in sent.items()}}

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
class AfterFinished:
    """The task's loss of a sub-problem whose input is computed for each batch by the finished pieces."""

    criterion: Criterion

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """Of a batch that has not passed the finished pieces."""
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
        """Of the net called `name` among the nets."""
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
