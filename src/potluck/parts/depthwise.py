"""Local training of a net piece by piece within a memory budget, shared by FeDepth and m-FeDepth.

Zhang et al. 2023. https://arxiv.org/abs/2303.04887, Algorithm 1. The symbols are those of `potluck.methods.fedepth`,
the departures too.

A client's budget is `slack` times its capacity times the estimate for the whole net, at the batch size and with the
optimiser of its training. The tensors that its round holds at once fit into the budget: trained weights, their
gradients, the optimiser's moments, activations, and z_j. Not counted are the data set, the whole network's weights, and
whatever else `potluck.parts.memory` lists. Evaluation is not part of a round, and has its own batch size. If several
clients are stacked in one process, it holds the sum of their budgets.
"""

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from potluck.core.batchnorm import batch_norms, keep_statistics, measure_statistics
from potluck.core.errors import ConfigError
from potluck.core.examples import Batch
from potluck.core.federation import Criterion, Member
from potluck.core.fields import Checked, above, at_least
from potluck.core.fit import Extras, Fit, FitReport, LocalTraining
from potluck.core.message import Message
from potluck.core.roles import Client, Server
from potluck.core.schema import Kind, optional, some_of
from potluck.core.weights import Weights, frozen_of, load, parameters_of
from potluck.models.contract import StagedNet, in_stages
from potluck.parts.activations import Buffer, outputs
from potluck.parts.losses import distillation
from potluck.parts.memory import (
    SCENARIOS,
    SLACK,
    MemoryModel,
    Piece,
    between,
    bypassed,
    parameter_copies,
    size_text,
)
from potluck.parts.sharing import Sharing

SubProblem = Callable[[StagedNet, Piece, MemoryModel], nn.Module]
"""Builds the net of a piece's sub-problem, from the piece's input to logits."""


@dataclass(frozen=True)
class DepthWise(Checked):
    """Local training piece by piece, of FeDepth and m-FeDepth.

    Attributes:
        training: of each sub-problem; every piece has all the epochs.
        sharing: who averages with whom.
        partial: the treatment of leading blocks that do not fit, "freeze" or "bypass", see departure 7.
        buffer: whether the finished pieces' output is computed once and kept, in memory if the budget has room for it
            and otherwise in a temporary file, or computed again for every batch.
        slack: budgets are multiplied by it.
        models: nets that a client of capacity 1 trains together, of which it sends one; 2 in the paper's Surplus. Its
            budget is multiplied by them.
    """

    training: LocalTraining = LocalTraining()
    sharing: Sharing = Sharing()
    partial: Literal["freeze", "bypass"] = "freeze"
    buffer: bool = True
    slack: Annotated[float, above(0)] = SLACK
    models: Annotated[int, at_least(1)] = 1

    default_capacities: ClassVar[tuple[float, ...]] = SCENARIOS["fair"]

    def estimate(self, net: StagedNet, input_shape: tuple[int, ...]) -> MemoryModel:
        """The memory estimate for training this net, with the batches and the optimiser of `training`."""
        return MemoryModel.of(net, input_shape, self.training.batch_size, parameter_copies(self.training))

    def budget(self, capacity: float, memory: MemoryModel) -> float:
        """A client's budget in bytes."""
        return self.slack * capacity * memory.whole

    def check_budgets(self, server: Server) -> None:
        """Check, before training, that every client can train at least one piece.

        Raises:
            ConfigError: one cannot; says the least capacity that would suffice, or what else prevents it.
        """
        first_alike: dict[tuple[str, float], Member] = {}
        for member in server.roster.values():
            first_alike.setdefault((member.architecture, member.capacity), member)
        nets = {name: in_stages(server.build(name)) for name in dict.fromkeys(name for name, _ in first_alike)}
        memories = {name: self.estimate(net, server.input_shape) for name, net in nets.items()}
        for (name, capacity), member in first_alike.items():
            try:
                self._check_budget(capacity, nets[name], memories[name])
            except ValueError as error:
                raise ConfigError(f"client {member.id}, capacity {capacity:g} of {name}: {error}") from error

    def _check_budget(self, capacity: float, net: StagedNet, memory: MemoryModel) -> None:
        """Raise ValueError if a client of this capacity has no piece to train or no path to it."""
        budget = self.budget(capacity, memory)
        try:
            pieces = memory.pieces(budget)
        except ValueError as error:
            least = math.ceil(1000 * memory.costs[-1] / (self.slack * memory.whole)) / 1000
            raise ValueError(f"{error}; federation.capacities of at least {least:g} would suffice") from error
        _check_apart(net, pieces)
        start = pieces[0].start
        if start > 0 and self.partial == "bypass":
            bypassed(net, pieces, memory)
        elif (least := 2 * memory.forward(start)) > budget:  # BatchNorm needs at least two examples
            raise ValueError(
                f"budget of {size_text(budget)}: too small for the forward pass of the blocks that are not trained;"
                f" expected at least {size_text(least, enough=True)}"
            )

    def expected(self, member: Member, message: Message) -> dict[str, Kind | None]:
        """The schema of the reply's entries: blocks that do not fit may be absent."""
        kinds = self.sharing.expected(member, message)
        sent = {entry: some_of(message[entry]) for entry in ("weights", "buffers") if kinds.get(entry) is not None}
        return {**kinds, **{entry: optional(kind) for entry, kind in sent.items()}}

    def learn(self, client: Client, memory: MemoryModel, lead_out: SubProblem) -> Generator[Fit, FitReport, Message]:
        """Alg. 1, l. 11-17: the sub-problems (1) one after the other; the reply.

        Args:
            client: with the weights it was sent.
            memory: the estimate for its model.
            lead_out: builds the net of a piece's sub-problem, from the piece's input to logits.
        """
        net = in_stages(client.model)
        if self.models > 1 and client.capacity == 1:
            yield from learn_mutually(client, self.models, self.training)
            return self.sharing.reply(client)
        budget = self.budget(client.capacity, memory)
        pieces = memory.pieces(budget)
        frozen = between(net, 0, pieces[0].start)
        if len(frozen) and self.partial == "bypass":
            net, pieces, memory, frozen = *bypassed(net, pieces, memory), nn.Sequential()
        elif len(frozen) and self.sharing.buffers != "average":  # layers that are not trained here send no statistics
            size = max(2, memory.at_once(len(frozen), budget))
            measure(frozen, (batch.inputs for batch in client.train.batches(size, client.rng)))
        plan = Plan(net, pieces, memory, budget)
        sub_problems = self._buffered(client, plan, lead_out) if self.buffer else self._anew(client, plan, lead_out)
        yield from sub_problems
        return without(self.sharing.reply(client), [name for name, _ in frozen.named_children()])

    def _buffered(self, client: Client, plan: "Plan", lead_out: SubProblem) -> Generator[Fit, FitReport]:
        """The sub-problems on z_j that is computed once."""
        done, size = 0, self.training.batch_size
        with Buffer(client.train) as z:
            for number, piece in enumerate(plan.pieces):
                last = between(plan.net, done, piece.start)
                if number > 0:
                    measure(last, (batch.inputs for batch in z.examples.batches(size, client.rng)))
                if len(last):
                    at_once = plan.memory.at_once(piece.start, plan.budget)
                    z.advance(last, size, at_once, in_memory=plan.has_room(piece, done, len(client.train)))
                done = piece.start
                sub_problem = lead_out(plan.net, piece, plan.memory)
                if parameters_of(sub_problem):  # otherwise it is entirely frozen
                    yield Fit(sub_problem, client.objective, z.examples, self.training, name=f"piece{number}")

    def _anew(self, client: Client, plan: "Plan", lead_out: SubProblem) -> Generator[Fit, FitReport]:
        """The sub-problems on z_j that is computed for each batch."""
        done, size = 0, self.training.batch_size
        for number, piece in enumerate(plan.pieces):
            before, finished = between(plan.net, 0, done), between(plan.net, 0, piece.start)
            if number > 0:
                at_once = plan.memory.at_once(done, plan.budget)
                batches = (batch.inputs for batch in client.train.batches(size, client.rng))
                measure(between(plan.net, done, piece.start), (outputs(before, x, at_once) for x in batches))
            done = piece.start
            sub_problem = lead_out(plan.net, piece, plan.memory)
            if parameters_of(sub_problem):  # otherwise it is entirely frozen
                objective = AfterFinished(client.criterion, plan.at_once_beside(piece))
                yield Fit(
                    sub_problem,
                    objective,
                    client.train,
                    self.training,
                    frozen={"finished": finished},
                    name=f"piece{number}",
                )


@dataclass(frozen=True)
class Plan:
    """A client's pieces of a net, by an estimate and within a budget in bytes."""

    net: StagedNet
    pieces: list[Piece]
    memory: MemoryModel
    budget: float

    def has_room(self, piece: Piece, done: int, examples: int) -> bool:
        """Whether a piece's inputs fit beside its training, and while they are computed from those at `done`."""
        inputs = examples * self.memory.example(piece.start)
        before = examples * self.memory.example(done) if done else 0
        making = before + self.memory.batch_size * self.memory.forward(piece.start)
        return inputs + max(making, self.memory.training(piece)) <= self.budget

    def at_once_beside(self, piece: Piece) -> int:
        """How many examples may pass the finished pieces at a time, with the piece's optimiser in memory."""
        return self.memory.at_once(piece.start, self.budget - self.memory.held(piece))


@dataclass(frozen=True)
class AfterFinished:
    """The task's loss of a sub-problem whose input is computed for each batch by the finished pieces."""

    criterion: Criterion
    at_once: int

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """The loss of a batch that has not passed the finished pieces; `at_once` of its examples do so at a time."""
        inputs, targets, _ = batch
        return self.criterion(net(outputs(extras["finished"], inputs, self.at_once)), targets)


@dataclass(frozen=True)
class Mutual:
    """One net's part of mutual distillation: its task's loss, and the mean KL(peer || net) of its peers."""

    name: str
    criterion: Criterion

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """The loss of the net called `name` among the nets."""
        inputs, targets, _ = batch
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
    """Train the client's model and its peers, which it keeps, on one another's predictions."""
    names = [f"peer{number}" for number in range(1, models)]
    peers = {name: client.module(name, lambda: drawn_afresh(client.twin())) for name in names}
    nets = nn.ModuleDict({"own": client.model, **peers})
    losses = [Mutual(name, client.criterion) for name in nets]
    yield Fit(nets, losses, client.train, training, turns=[(f"{name}.",) for name in nets])


def drawn_afresh(net: nn.Module) -> nn.Module:
    """The net with every layer that has `reset_parameters` re-initialised, unless it is frozen."""
    frozen = frozen_of(net)
    for module in net.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return load(net, frozen, partial=True)


def _check_apart(net: StagedNet, pieces: list[Piece]) -> None:
    """Raise ValueError if a weight is in several of the parts that are trained one after the other, or not at all."""
    bounds = [*dict.fromkeys([0, *(piece.start for piece in pieces), pieces[-1].stop])]
    parts: list[nn.Module] = [between(net, start, stop) for start, stop in pairwise(bounds)]
    if len(parts) == 1:  # all of the net
        return
    classifier = nn.ModuleList([between(net, bounds[-1], len(net.stages)), net.head])
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    seen: set[int] = set()
    for part in (*parts, classifier):
        own = {id(parameter) for parameter in part.parameters()}
        if shared := own & seen:
            raise ValueError(
                f"{min(names[parameter] for parameter in shared)} is in several of the pieces that are trained one by"
                " one; expected a capacity for the whole net, or a model whose stages share no weights"
            )
        seen |= own


def measure(stages: nn.Sequential, batches: Iterator[Tensor]) -> None:
    """Set BatchNorm's statistics, if there are any, to those of all batches."""
    if batch_norms(stages):
        measure_statistics(stages, batches)


def without(reply: Message, stages: list[str]) -> Message:
    """A reply without the weights and buffers of some stages."""
    prefixes = tuple(f"stages.{name}." for name in stages)
    left: dict[str, Weights | None] = {}
    for entry in ("weights", "buffers"):
        held: Weights = reply.get(entry, {})
        left[entry] = {name: w for name, w in held.items() if not name.startswith(prefixes)} or None
    return Message(**{**reply, **left})
