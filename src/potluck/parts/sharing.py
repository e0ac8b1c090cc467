"""Averaging of weights: across architectures layer by layer, or within each architecture.

Every method that averages weights holds a `Sharing` among its hyper-parameters. Two methods are compared under the same
aggregation if theirs are equal; the defaults are not: FedAvg weighs by examples as its paper does, others equally.

The server keeps weights by group: groups of clients by name, each with one dict of tensors from which its members pick
the layers they own. Replies that come one at a time (`cohort.stream`) are added up one at a time.
"""

from collections.abc import Callable, Container, Generator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from potluck.core.federation import ClientId, Member, Roster
from potluck.core.ground.fields import Checked, Never, Only
from potluck.core.message import Message
from potluck.core.method import ClientWork, Method, Need, on_client
from potluck.core.nets.batchnorm import forget_statistics, measure_statistics, unlearnt
from potluck.core.nets.weights import (
    RunningMean,
    Weights,
    buffers_of,
    check_same_shapes,
    learnt_of,
    load,
    parameters_of,
    pick,
    zeros_like,
)
from potluck.core.requests.beside_training import NormStatistics
from potluck.core.requests.fit import LocalTraining, Request
from potluck.core.roles import Arriving, Client, Cohort, Replies, Server
from potluck.core.schema import Kind, Path, Schema, count, like
from potluck.core.summed import Summed, ToSum, Weighing
from potluck.parts.classes import MeanByClass, axes_of, owned_part
from potluck.parts.means import Aggregate, Gathered
from potluck.parts.summing import summed_layers

GroupWeights = dict[str, Weights]
"""Weights by group of clients, and by name."""

GroupNumbers = dict[str, dict[str, float]]
"""A number for each layer, by group of clients and by name."""

Entry = Callable[[Member], Any] | Mapping[str, Any] | Tensor | float | str | None
"""An entry of messages: a value, None for no entry, or a function from the receiving member to one."""

Share = Callable[[Member, Message], float | Mapping[str, float]]
"""A function from a member and its reply to its weight in a mean, one for all layers or one for each layer's name."""

NamesOf = Callable[[nn.Module], Container[str]]
"""A function from a network to the names of some of its tensors."""


def no_names(net: nn.Module) -> Container[str]:
    """None of a network's tensors."""
    return ()


@dataclass(frozen=True)
class Sharing(Checked):
    """How weights are averaged.

    Attributes:
        scope: "layer" averages each layer over all clients that own it, whatever their architecture
            (FedIN's revision, eq. 19); "architecture" averages among clients of one architecture (eq. 20, 21);
            "model" demands that there is only one architecture; "none" averages nothing: messages carry no weights,
            and clients keep their models from round to round.
        weighting: "samples" weighs clients by training examples (FedAvg, eq. 21), "uniform" equally (eq. 19, 20).
        buffers: BatchNorm's running statistics are averaged like weights ("average"), stay at each client
            ("local"), or are neither sent nor kept ("drop"). Where a net is read or evaluated and none were sent or
            learnt, they are measured on the client's own training data: always under "drop", and under "local" at a
            client that has never trained.
        combine: how clients' tensors are combined; `weighting` applies to rules that weigh.
    """

    scope: Literal["layer", "architecture", "model", "none"] = "layer"
    weighting: Literal["samples", "uniform"] = "samples"
    buffers: Literal["average", "local", "drop"] = "average"
    combine: Aggregate = Aggregate()

    @property
    def averages(self) -> bool:
        """Whether clients average weights."""
        return self.scope != "none"

    def needs(self) -> frozenset[Need]:
        """What this scope needs of the federation: layers that can be averaged."""
        by_scope = {
            "layer": {Need.NESTED_LAYERS},
            "model": {Need.ONE_ARCHITECTURE},
            "architecture": set[Need](),
            "none": set[Need](),
        }
        return frozenset(by_scope[self.scope])

    def needs_company(self) -> frozenset[Need]:
        """What it needs for clients to have something to average, if weights are all that a method exchanges."""
        by_scope = {"layer": {Need.SHARED_LAYERS}, "architecture": {Need.SHARED_ARCHITECTURES}}
        return frozenset(by_scope.get(self.scope, set[Need]()))

    def initial(self, server: Server, own: NamesOf = no_names, draw: str = "") -> GroupWeights:
        """The run's initial weights; a layer of several architectures comes from the largest. Nothing under "none".

        So under "layer" smaller architectures of a nested family begin otherwise than with methods that do not average
        across architectures; one value must serve all.

        Args:
            server: builds the networks.
            own: the names of a network's tensors that are not averaged.
            draw: the name of another draw of weights, see `Server.build`.

        Raises:
            ValueError: clients that average with each other have a layer of the same name in different shapes.
        """
        pool: GroupWeights = {}
        members = {member.base: member for member in server.roster.values() if self.averages}
        for member in sorted(members.values(), key=lambda m: (-_size(m), m.base)):
            net = server.build(member.base, draw=draw)
            mine = {name: tensor for name, tensor in learnt_of(net).items() if name not in own(net)}
            group = pool.setdefault(self.group(member), {})
            for name in [name for name in mine if name in group]:
                check_same_shapes(name, [mine[name].shape, group[name].shape])
            group.update({name: tensor for name, tensor in mine.items() if name not in group})
        return pool

    def zeros(self, pool: GroupWeights, roster: Roster) -> GroupWeights:
        """Zeros for each trained layer of the pool: how control variates and dual variables begin."""
        trained = self.owners(roster)
        return {g: zeros_like({n: w for n, w in pool[g].items() if n in trained[g]}) for g in pool}

    def group(self, member: Member) -> str:
        """The name of the group that a client averages with."""
        return member.base if self.scope == "architecture" else "all"

    def owned(self, pool: GroupWeights, member: Member) -> Weights:
        """What a client's network has of tensors by group; of a head with its own classes their rows."""
        return pick(owned_part(pool[self.group(member)], member), member.shapes)

    def send(self, pool: GroupWeights, cohort: Cohort, server: Server, **more: Entry) -> dict[ClientId, Message]:
        """A message for each client of the cohort with the weights it owns, and buffers if they are shared.

        Args:
            pool: the server's weights.
            cohort: the receivers.
            server: the server, for its roster.
            more: entries that are added, as values or as functions of the member; None for no entry.
        """
        return {id: self.message(pool, server.roster[id], **more) for id in cohort.ids}

    def message(self, pool: GroupWeights, member: Member, **more: Entry) -> Message:
        """The message of `send` to one client."""
        added = {name: value(member) if callable(value) else value for name, value in more.items()}
        if not self.averages:
            return Message(**added)
        owned = self.owned(pool, member)
        weights = {name: tensor for name, tensor in owned.items() if name in member.parameters}
        buffers = {name: tensor for name, tensor in owned.items() if name in member.buffers}
        return Message(weights=weights, buffers=self._if_averaged(buffers), **added)

    def receive(self, client: Client, message: Message) -> None:
        """Load what was sent, and this client's own buffers if it keeps them."""
        if self.averages:
            buffers = client.state.get("buffers") if self.buffers == "local" else message.get("buffers")
            load(client.model, {**message["weights"], **(buffers or {})}, partial=True)

    def reply(self, client: Client, **more: Any) -> Message:
        """The answer with the trained weights, buffers if they are shared, and the number of examples.

        Args:
            client: after its training; its buffers go to its state if they are local, and are lost if dropped.
            more: entries that are added, or that replace these; None for no entry.
        """
        if not self.averages:
            return Message(**more)
        buffers = buffers_of(client.model)
        if self.buffers == "local":
            client.state["buffers"] = buffers
        elif self.buffers == "drop":
            forget_statistics(client.model)
        trained = {} if "weights" in more else {"weights": parameters_of(client.model)}
        return Message(**{**trained, "buffers": self._if_averaged(buffers), "examples": len(client.train), **more})

    def expected(self, member: Member, message: Message) -> dict[str, Kind | None]:
        """The schema of the entries of `reply`: tensors like those that were sent."""
        if not self.averages:
            return {}
        buffers = message.get("buffers") if self.buffers == "average" else None
        return {
            "weights": like(message["weights"]),
            "buffers": None if buffers is None else like(buffers),
            "examples": count(member.examples),
        }

    def merge(self, pool: GroupWeights, replies: Replies | Arriving, roster: Roster) -> GroupWeights:
        """The weights and buffers after averaging those of the replies; layers that no client sent are unchanged."""
        return self.means(replies, roster, "weights", "buffers").over(pool, "weights", "buffers")

    def mean(
        self,
        replies: Replies | Arriving,
        entry: str,
        roster: Roster,
        keep: GroupWeights,
        weight: Share | None = None,
    ) -> GroupWeights:
        """Group by group, the layer-wise mean of one entry of the replies over `keep`.

        Args:
            replies: read to their end. Under the plain mean none is kept, under other rules of `combine` all are.
            entry: tensors by name; a number stands for every layer that the client trains.
            roster: of the federation.
            keep: the value of layers that no client sent.
            weight: a client's weight in the mean; by `weighting` if None.
        """
        return self.means(replies, roster, **{entry: weight}).over(keep, entry)

    def means(self, replies: Replies | Arriving, roster: Roster, *plain: str, **weighted: Share | None) -> "Means":
        """The means of several entries at once: `plain` ones by `weighting`, others by weights of their own."""
        means = self.no_means(roster, *plain, **weighted)
        for id, reply in replies.items() if isinstance(replies, Replies) else self.combine.arriving(replies):
            means.add(id, reply)
            del reply  # before the next comes
        return means

    def no_means(self, roster: Roster, *plain: str, **weighted: Share | None) -> "Means":
        """Empty means, to which replies are added one by one; arguments as of `means`."""
        return Means(self, roster, {**dict.fromkeys(plain), **weighted})

    def owners(
        self,
        roster: Roster,
        among: Container[ClientId] | None = None,
        weight: Callable[[Member], float] = lambda member: 1.0,
    ) -> GroupNumbers:
        """By group, how many clients own each trained layer.

        Args:
            roster: of the federation.
            among: which clients count, such as replies; None for all.
            weight: the weight of a client.
        """
        owners: GroupNumbers = {}
        for member in roster.values():
            if among is None or member.id in among:
                layers = owners.setdefault(self.group(member), {})
                for name in sorted(member.parameters):
                    layers[name] = layers.get(name, 0.0) + weight(member)
        return owners

    def weight(self, member: Member, reply: Message) -> float:
        """A client's weight in the mean."""
        return float(reply["examples"]) if self.weighting == "samples" else 1.0

    def deploy(self, client: Client, message: Message) -> nn.Module:
        """The client's model filled from what was sent, ready to be evaluated."""
        self.receive(client, message)
        if self.averages and self.buffers != "average":
            inputs = (batch.inputs for batch in client.train.batches(64, client.rng))
            measure_statistics(client.model, inputs, None if self.buffers == "drop" else unlearnt(client.model))
        return client.model

    def ready(self, client: Client, net: nn.Module) -> Generator[NormStatistics, Any, nn.Module]:
        """The net, ready to be read in evaluation mode by the client's training, as a teacher is.

        For `teacher = yield from self.sharing.ready(client, net)` in a handler.

        Args:
            client: after `receive`.
            net: with weights that the client received, and the statistics of its model.
        """
        if not (self.averages and self.buffers == "average"):
            dropped = self.averages and self.buffers == "drop"
            yield NormStatistics(net, client.train, layers="all" if dropped else "unlearnt")
        return net

    def global_model(self, pool: GroupWeights, server: Server) -> nn.Module | None:
        """The one model of a federation with one architecture and shared buffers; None otherwise."""
        members = list(server.roster.values())
        if not self.averages or len({member.base for member in members}) > 1:
            return None
        if self.buffers != "average" and members[0].buffers:
            return None
        return load(server.build(members[0].base), pool[self.group(members[0])])

    def _if_averaged(self, buffers: Weights) -> Weights | None:
        return buffers if self.buffers == "average" and buffers else None


Averaging = Annotated[Sharing, Never("scope", "none", "one that averages")]
"""A `Sharing` that averages, as the annotation of a method's field."""

WholeModels = Annotated[
    Sharing,
    Only("scope", "architecture"),
    Only("buffers", "average", "since the server predicts with clients' models"),
]
"""A `Sharing` that leaves the server a whole model of each architecture, as the annotation of a method's field."""


class Means:
    """Group by group and layer by layer, the means of entries of replies, which are added one at a time.

    Under the plain mean it holds a running mean of each layer and nothing of the replies.

    Args:
        sharing: who averages with whom, and how.
        roster: of the federation.
        entries: to average, each with a client's weight; None for that of `sharing`.
    """

    def __init__(self, sharing: Sharing, roster: Roster, entries: Mapping[str, Share | None]) -> None:
        self._sharing = sharing
        self._roster = roster
        self._entries = entries
        by_class, members = axes_of(roster), roster.values()
        self._by_class = {
            (sharing.group(member), name): found
            for member in members
            for (base, name), found in by_class.items()
            if base == member.base
        }  # whoever has all classes averages with those who have some
        self._found: dict[str, dict[str, dict[str, RunningMean | Gathered | MeanByClass]]] = {e: {} for e in entries}

    def add(self, id: ClientId, reply: Message) -> None:
        """Add a client's reply; entries or layers that it lacks do not count.

        Raises:
            ValueError: a layer has another shape than at the clients before.
        """
        member = self._roster[id]
        for entry, share in self._entries.items():
            if (value := reply.get(entry)) is None:
                continue
            weight = (share or self._sharing.weight)(member, reply)
            layers = self._found[entry].setdefault(self._sharing.group(member), {})
            for name, tensor in _by_layer(value, member).items():
                share = weight[name] if isinstance(weight, Mapping) else weight
                if tensor.dim() and (found := self._by_class.get((self._sharing.group(member), name))) is not None:
                    running = layers.setdefault(name, MeanByClass(self._sharing.combine, *found))
                    assert isinstance(running, MeanByClass)
                    running.add(tensor, share, None if member.head is None else member.head.classes)
                    continue
                running = layers.setdefault(name, self._sharing.combine.running())
                assert not isinstance(running, MeanByClass)
                check_same_shapes(name, [tensor.shape, *([] if running.shape is None else [running.shape])])
                running.add(tensor, share)

    def over(self, keep: GroupWeights, *entries: str) -> GroupWeights:
        """The means of these entries over `keep`, the value of layers that no client sent.

        Raises:
            ValueError: a layer has another shape than in `keep`.
        """
        merged = dict(keep)
        for entry in entries:
            for group, layers in self._found[entry].items():
                before = merged.get(group, {})
                found = {
                    name: running.value(before.get(name)) if isinstance(running, MeanByClass) else running.value()
                    for name, running in layers.items()
                }
                for name in found.keys() & before.keys():
                    check_same_shapes(name, [found[name].shape, before[name].shape])
                merged[group] = {**before, **found}
        return merged

    def of(self, entry: str) -> GroupWeights:
        """The means of one entry, of the layers that some client sent."""
        return self.over({}, entry)

    def weights(self, entry: str) -> GroupNumbers:
        """By group, the sum of the clients' weights in the mean of each layer of an entry."""
        found = self._found[entry]
        return {group: {name: running.weight for name, running in found[group].items()} for group in found}

    def coverage(self, entry: str) -> dict[str, dict[str, float | Tensor]]:
        """The same; of layers with rows of classes a number for each row, that of the clients that have the class."""
        return {
            group: {name: one.held if isinstance(one, MeanByClass) else one.weight for name, one in layers.items()}
            for group, layers in self._found[entry].items()
        }


def _by_layer(value: Any, member: Member) -> Weights:
    """An entry's tensors by name; a number stands for every layer that the client trains."""
    if isinstance(value, (int, float)):
        return {name: torch.tensor(value, dtype=torch.float64) for name in sorted(member.parameters)}
    return value


class HasWeights(Protocol):
    """A method's state that holds the server's weights."""

    @property
    def weights(self) -> GroupWeights:
        """The server's weights, by group of clients."""
        ...


P = TypeVar("P", bound=HasWeights)


class SharesWeights(Method[P]):
    """A method whose `sharing` determines the weights with which clients start every round and are evaluated.

    It implements the inference half of the contract; the method declares the field `sharing`.
    """

    family = "weights"

    revises = ("weights", "buffers")

    sharing: Sharing

    summed_entries: ClassVar[tuple[str, ...]] = ()
    """Entries of replies, tensors by name, of which the server needs means alone, each by `weighing_of` it. Tensors
    that were not sent under the same entry and name are differences. Empty if it needs single replies."""

    mixes_layers: ClassVar[bool] = False
    """Whether what becomes of a layer depends on others too, and so on clients that lack it."""

    server_trains: ClassVar[bool] = False
    """Whether the server trains all layers in every round, also those that no client of the round owns."""

    @property
    def keeps_model(self) -> bool:
        """Whether clients' models are kept between rounds: only if nothing is averaged."""
        return not self.sharing.averages

    @property
    def exchanges_more(self) -> bool:
        """Whether clients learn of each other by more than averaged weights, as by features or by an ensemble.

        If not, a federation whose clients have no layers in common is refused.
        """
        return False

    def needs(self) -> frozenset[Need]:
        """What the scope of sharing needs, and without another exchange that there is something to share."""
        return self.sharing.needs() | (frozenset() if self.exchanges_more else self.sharing.needs_company())

    def replies(self, handler: str, member: Member, message: Message, server: Server) -> Schema | None:
        """The weights that the client was sent, trained, and its number of examples."""
        return Schema(**self.sharing.expected(member, message))

    @property
    def needs_single_replies(self) -> str:
        """Not where all is in `summed_entries`."""
        if not self.summed_entries:
            return super().needs_single_replies
        return "" if self.sharing.averages else "it averages nothing"

    def weighing_of(self, entry: str) -> Weighing:
        """What a client counts in the mean of an entry."""
        return "client" if self.sharing.weighting == "samples" else "one"

    def summed(self, handler: str, member: Member, message: Message, reply: Message, server: Server) -> ToSum:
        """The layers of `summed_entries`, among the clients that average with each other."""
        group, found = self.sharing.group(member), dict[Path, Summed]()
        for entry in self.summed_entries:
            keep, weighing = message.get(entry, {}), self.weighing_of(entry)
            found |= summed_layers(reply, entry, member, keep, weighing, group=group)
        return ToSum(found, reply["examples"])

    def inference_message(self, state: P, client_id: ClientId, server: Server) -> Message:
        """The weights that the client owns."""
        return self.sharing.message(state.weights, server.roster[client_id])

    @on_client
    def inference_model(self, client: Client, message: Message) -> nn.Module | Generator[Request, Any, nn.Module]:
        """The client's model, filled with them."""
        return self.sharing.deploy(client, message)

    def global_model(self, state: P, server: Server) -> nn.Module | None:
        """The one model of a federation with one architecture."""
        return self.sharing.global_model(state.weights, server)


@dataclass(frozen=True)
class Averaged:
    """The state of a server that averages: its weights, by group of clients."""

    weights: GroupWeights


@dataclass(frozen=True)
class Averages(SharesWeights[Averaged]):
    """A method whose server averages what clients have trained, and does nothing else: it writes `local_update` alone.

    Attributes:
        training: a client's local training.
        sharing: who averages with whom, with which weights.
    """

    summed_entries = ("weights", "buffers")

    training: LocalTraining = LocalTraining()
    sharing: Sharing = Sharing()

    def init(self, server: Server) -> Averaged:
        """The run's initial weights."""
        return Averaged(self.sharing.initial(server))

    def round(self, state: Averaged, cohort: Cohort, server: Server) -> Averaged:
        """Send, and average what comes back."""
        replies = cohort.stream(self.local_update, self.sharing.send(state.weights, cohort, server))
        return Averaged(self.sharing.merge(state.weights, replies, server.roster))

    @on_client
    def local_update(self, client: Client, message: Message) -> ClientWork:
        """Receive, train, and reply."""
        raise NotImplementedError


def norm(weights: GroupWeights) -> float:
    """The L2 norm of all tensors of all groups together."""
    tensors = [tensor for group in weights.values() for tensor in group.values()]
    return float(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]).norm())


def _size(member: Member) -> int:
    return sum(shape.numel() for shape in member.shapes.values())
