"""Local training of a net piece by piece within a memory budget, shared by FeDepth and m-FeDepth.

Zhang et al. 2023. https://arxiv.org/abs/2303.04887, Algorithm 1. The symbols are those of `potluck.methods.fedepth`,
the departures too.

A client's budget is `slack` times its capacity times the estimate for the whole net, at the batch size and with the
optimiser of its training. The tensors that its round holds at once fit into the budget: trained weights, their
gradients, the optimiser's moments, with FedProx's pull what was sent of them and the distance from it, activations, and
z_j. Not counted are the data set, the whole network's weights, and whatever else `potluck.parts.memory` lists.
Evaluation is not part of a round, and has its own batch size. If several clients are stacked in one process, it holds
the sum of their budgets.
"""

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from potluck.core.federation import ClientId, Criterion, Member
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import Checked, above, at_least
from potluck.core.ground.inputs import InputShape
from potluck.core.message import Message
from potluck.core.nets.batchnorm import batch_norms, keep_statistics, measure_statistics
from potluck.core.nets.weights import Weights, parameters_of
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import Extras, Fit, FitReport, LocalTraining
from potluck.core.roles import Client, Cohort, Server
from potluck.core.schema import Kind, optional, some_of
from potluck.models.stages import Stages, stages_of
from potluck.parts.activations import Buffer, outputs
from potluck.parts.losses import distillation, squared_distance
from potluck.parts.memory import (
    SCENARIOS,
    SLACK,
    MemoryModel,
    Piece,
    bypassed,
    parameter_copies,
    size_text,
)
from potluck.parts.sharing import Entry, GroupWeights, Sharing

SubProblem = Callable[[Stages, Piece, MemoryModel], nn.Module]
"""Builds the net of a piece's sub-problem, from the piece's input to logits."""

Loss = Callable[[nn.Module, Batch, Extras], Tensor]
"""An objective without observations."""


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
        mu: strength of FedProx's pull towards the weights that were sent, in every sub-problem; 0 for FedAvg. The
            budget then counts each trained weight twice more: as it was sent, and its distance from that.
        assignment: "capacity" gives a client the budget of its capacity in every round; "dynamic" draws for each client
            of the cohort the capacity of one of the federation's clients, all equally likely.
    """

    family: ClassVar[str] = "parts"

    training: LocalTraining = LocalTraining()
    sharing: Sharing = Sharing()
    partial: Literal["freeze", "bypass"] = "freeze"
    buffer: bool = True
    slack: Annotated[float, above(0)] = SLACK
    models: Annotated[int, at_least(1)] = 1
    mu: Annotated[float, at_least(0)] = 0.0
    assignment: Literal["capacity", "dynamic"] = "capacity"

    default_capacities: ClassVar[tuple[float, ...]] = SCENARIOS["fair"]

    def estimate(self, net: nn.Module, input_shape: InputShape) -> MemoryModel:
        """The memory estimate for training this net, with the batches and the optimiser of `training`, and the pull."""
        pull = 2 if self.mu else 0  # what was sent, and the way to it, which is kept for the backward pass
        copies = parameter_copies(self.training) + pull
        return MemoryModel.of(net, input_shape, self.training.batch_size, copies)

    def budget(self, capacity: float, memory: MemoryModel) -> float:
        """A client's budget in bytes."""
        return self.slack * capacity * memory.whole

    def capacities(self, server: Server) -> dict[ClientId, float]:
        """The capacity that each client has in this round.

        They are drawn for the whole roster, so that a client's does not depend on who else is in the cohort.
        """
        own = {id: member.capacity for id, member in server.roster.items()}
        if self.assignment == "capacity":
            return own
        drawn = torch.randint(len(own), (len(own),), generator=server.rng)
        return dict(zip(own, (list(own.values())[place] for place in drawn.tolist()), strict=True))

    def send(self, pool: GroupWeights, cohort: Cohort, server: Server, **more: Entry) -> dict[ClientId, Message]:
        """The messages of `Sharing.send`, with the round's capacities if they are drawn."""
        capacities = self.capacities(server) if self.assignment == "dynamic" else {}
        return self.sharing.send(pool, cohort, server, **more, capacity=lambda member: capacities.get(member.id))

    def check_budgets(self, server: Server) -> None:
        """Check, before training, that every client can train at least one piece with each capacity it may have.

        Raises:
            ConfigError: one cannot; says the least capacity that would suffice, or what else prevents it.
        """
        first_alike: dict[tuple[str, float], Member] = {}
        every = sorted({member.capacity for member in server.roster.values()})
        for member in server.roster.values():
            for capacity in every if self.assignment == "dynamic" else [member.capacity]:
                first_alike.setdefault((member.architecture, capacity), member)
        nets = {name: server.build(name) for name in dict.fromkeys(name for name, _ in first_alike)}
        memories = {name: self.estimate(net, server.input_shape) for name, net in nets.items()}
        for (name, capacity), member in first_alike.items():
            try:
                self._check_budget(capacity, stages_of(nets[name]), memories[name])
            except ValueError as error:
                raise ConfigError(f"client {member.id}, capacity {capacity:g} of {name}: {error}") from error

    def _check_budget(self, capacity: float, net: Stages, memory: MemoryModel) -> None:
        """Raise ValueError if a client of this capacity has no piece to train or no path to it."""
        budget = self.budget(capacity, memory)
        try:
            pieces = memory.pieces(budget)
        except ValueError as error:
            least = math.ceil(1000 * memory.costs[-1] / (self.slack * memory.whole)) / 1000
            raise ValueError(f"{error}; federation.capacities of at least {least:g} would suffice") from error
        _check_apart(net, pieces)
        self.check_pieces(net, pieces, memory)
        start = pieces[0].start
        if start > 0 and self.partial == "bypass":
            bypassed(net, pieces, memory)
        elif (least := 2 * memory.forward(start)) > budget:  # BatchNorm needs at least two examples
            raise ValueError(
                f"budget of {size_text(budget)}: too small for the forward pass of the blocks that are not trained;"
                f" expected at least {size_text(least, enough=True)}"
            )

    def check_pieces(self, net: Stages, pieces: list[Piece], memory: MemoryModel) -> None:
        """Raise ValueError if a sub-problem cannot be made of a piece; by default each can."""

    def expected(self, member: Member, message: Message) -> dict[str, Kind | None]:
        """The schema of the reply's entries: blocks that do not fit may be absent."""
        kinds = self.sharing.expected(member, message)
        sent = {entry: some_of(message[entry]) for entry in ("weights", "buffers") if kinds.get(entry) is not None}
        return {**kinds, **{entry: optional(kind) for entry, kind in sent.items()}}

    def learn(
        self, client: Client, capacity: float, memory: MemoryModel, lead_out: SubProblem
    ) -> Generator[Fit, FitReport, Message]:
        """Alg. 1, l. 11-17: the sub-problems (1) one after the other; the reply.

        Args:
            client: with the weights it was sent.
            capacity: that it has in this round.
            memory: the estimate for its model.
            lead_out: builds the net of a piece's sub-problem, from the piece's input to logits.
        """
        net = stages_of(client.model)
        if self.models > 1 and capacity == 1:
            yield from self._mutually(client)
            return self.sharing.reply(client)
        budget = self.budget(capacity, memory)
        pieces = memory.pieces(budget)
        untrained = frozenset[str]()
        if (start := pieces[0].start) and self.partial == "bypass":
            net, pieces, memory = bypassed(net, pieces, memory)
        elif start:
            untrained = net.names_between(0, start)
            if self.sharing.buffers != "average":  # layers that are not trained here send no statistics
                size = max(2, memory.at_once(start, budget))
                measure(net.between(0, start), (batch.inputs for batch in client.train.batches(size, client.rng)))
        plan = Plan(net, pieces, memory, budget, net.behind(pieces[-1].stop) if self.mu else {})
        sub_problems = self._buffered(client, plan, lead_out) if self.buffer else self._anew(client, plan, lead_out)
        yield from sub_problems
        return without(self.sharing.reply(client), untrained)

    def _buffered(self, client: Client, plan: "Plan", lead_out: SubProblem) -> Generator[Fit, FitReport]:
        """The sub-problems on z_j that is computed once."""
        done, size = 0, self.training.batch_size
        with Buffer(client.train) as z:
            for number, piece in enumerate(plan.pieces):
                last = plan.net.between(done, piece.start)
                if number > 0:
                    measure(last, (batch.inputs for batch in z.examples.batches(size, client.rng)))
                if piece.start > done:
                    at_once = plan.memory.at_once(piece.start, plan.budget)
                    z.advance(last, size, at_once, in_memory=plan.has_room(piece, done, len(client.train)))
                done = piece.start
                sub_problem = lead_out(plan.net, piece, plan.memory)
                if parameters_of(sub_problem):  # otherwise it is entirely frozen
                    yield self._fit(plan, number, sub_problem, client.objective, z.examples)

    def _anew(self, client: Client, plan: "Plan", lead_out: SubProblem) -> Generator[Fit, FitReport]:
        """The sub-problems on z_j that is computed for each batch."""
        done, size = 0, self.training.batch_size
        for number, piece in enumerate(plan.pieces):
            before, finished = plan.net.between(0, done), plan.net.between(0, piece.start)
            if number > 0:
                at_once = plan.memory.at_once(done, plan.budget)
                batches = (batch.inputs for batch in client.train.batches(size, client.rng))
                measure(plan.net.between(done, piece.start), (outputs(before, x, at_once) for x in batches))
            done = piece.start
            sub_problem = lead_out(plan.net, piece, plan.memory)
            if parameters_of(sub_problem):  # otherwise it is entirely frozen
                objective = AfterFinished(client.criterion, plan.at_once_beside(piece))
                yield self._fit(plan, number, sub_problem, objective, client.train, finished=finished)

    def _fit(self, plan: "Plan", number: int, net: nn.Module, loss: Loss, data: Examples, **frozen: nn.Module) -> Fit:
        """The training of a sub-problem, pulled towards the weights that were sent if `mu` says so."""
        extras: dict[str, Weights] = {}
        if self.mu:  # the classifier alone has moved since, with the pieces before
            own = parameters_of(net)
            extras = {"sent": own | {name: w for name, w in plan.classifier.items() if name in own}}
            loss = Pulled(loss, self.mu)
        return Fit(net, loss, data, self.training, extras=extras, frozen=frozen, name=f"piece{number}")

    def _mutually(self, client: Client) -> Generator[Fit, FitReport]:
        """Train the client's model and its peers, which it keeps, on one another's predictions.

        The model is pulled towards what was sent; its peers, which nobody sends, are not.
        """
        names = [f"peer{number}" for number in range(1, self.models)]
        peers = {name: client.module(name, partial(client.twin, draw=name)) for name in names}
        nets = nn.ModuleDict({"own": client.model, **peers})
        losses: list[Loss] = [Mutual(name, client.criterion) for name in nets]
        extras = {"sent": parameters_of(nn.ModuleDict({"own": client.model}))} if self.mu else {}
        if self.mu:
            losses[0] = Pulled(losses[0], self.mu)
        turns = [(f"{name}.",) for name in nets]
        yield Fit(nets, losses, client.train, self.training, extras=extras, turns=turns)


@dataclass(frozen=True)
class Plan:
    """A client's pieces of a net, by an estimate and within a budget in bytes.

    Attributes:
        classifier: its weights as they were sent, if something pulls to them.
    """

    net: Stages
    pieces: list[Piece]
    memory: MemoryModel
    budget: float
    classifier: Weights

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
class Pulled:
    """FedProx's loss of a sub-problem (Li et al. 2020, eq. 2): the loss + (mu / 2) |w - w^t|^2 over what it trains.

    The extras have w^t as "sent".
    """

    loss: Loss
    mu: float

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """Of one batch."""
        return self.loss(net, batch, extras) + self.mu / 2 * squared_distance(net, extras["sent"])


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


def _check_apart(net: Stages, pieces: list[Piece]) -> None:
    """Raise ValueError if a weight is in several of the parts that are trained one after the other, or not at all."""
    bounds = [*dict.fromkeys([0, *(piece.start for piece in pieces), pieces[-1].stop])]
    parts = [net.between(start, stop) for start, stop in pairwise(bounds)]
    if len(parts) == 1:  # all of the net
        return
    classifier = nn.ModuleList([net.between(bounds[-1], len(net.stages)), net.classifier])
    names = {id(parameter): name for name, parameter in net.net.named_parameters()}
    seen: set[int] = set()
    for part in (*parts, classifier):
        own = {id(parameter) for parameter in part.parameters()}
        if shared := own & seen:
            raise ValueError(
                f"{min(names[parameter] for parameter in shared)} is in several of the pieces that are trained one by"
                " one; expected a capacity for the whole net, or a model whose stages share no weights"
            )
        seen |= own


def measure(stages: nn.Module, batches: Iterator[Tensor]) -> None:
    """Set BatchNorm's statistics, if there are any, to those of all batches."""
    if batch_norms(stages):
        measure_statistics(stages, batches)


def without(reply: Message, names: frozenset[str]) -> Message:
    """A reply without these weights and buffers."""
    left: dict[str, Weights | None] = {}
    for entry in ("weights", "buffers"):
        held: Weights = reply.get(entry, {})
        left[entry] = {name: w for name, w in held.items() if name not in names} or None
    return Message(**{**reply, **left})
