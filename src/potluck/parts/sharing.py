"""Who averages weights with whom: across architectures layer by layer, or within each architecture.

Every method that averages weights holds a `Sharing` among its hyper-parameters. Two methods are compared under the same
aggregation if theirs are equal; the defaults are not: FedAvg weighs by examples as its paper does, others equally.

The server's weights are a pool: groups of clients by name, each with one dict of tensors from which its members pick
the layers they own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import nn

from potluck.core.batchnorm import measure_statistics
from potluck.core.federation import ClientId, Member, Roster
from potluck.core.fields import Checked
from potluck.core.message import Message
from potluck.core.method import Method, Need, on_client
from potluck.core.roles import Client, Replies, Server
from potluck.core.schema import Kind, Schema, count, like
from potluck.core.weights import (
    Weights,
    buffers_of,
    check_same_shapes,
    learnt_of,
    load,
    mean_where_present,
    parameters_of,
    pick,
)
from potluck.parts.means import Mean

Pool = dict[str, Weights]


@dataclass(frozen=True)
class Sharing(Checked):
    """How weights are averaged.

    Attributes:
        scope: "layer" averages each layer over all clients that own it, whatever their architecture
            (FedIN's revision, eq. 19); "architecture" averages among clients of one architecture (eq. 20, 21);
            "model" demands that there is only one architecture.
        weighting: "samples" weighs clients by training examples (FedAvg, eq. 21), "uniform" equally (eq. 19, 20).
        buffers: BatchNorm's running statistics are averaged like weights ("average"), stay at each client
            ("local"), or are neither sent nor kept ("drop": measured on the client's own training data
            when its model is evaluated).
        combine: how the tensors of several clients become one; `weighting` matters to the rules that weigh.
    """

    scope: Literal["layer", "architecture", "model"] = "layer"
    weighting: Literal["samples", "uniform"] = "samples"
    buffers: Literal["average", "local", "drop"] = "average"
    combine: Mean = Mean()

    def needs(self) -> frozenset[Need]:
        """What this scope asks of the federation."""
        by_scope = {
            "layer": {Need.NESTED_LAYERS},
            "model": {Need.ONE_ARCHITECTURE},
            "architecture": set[Need](),
        }
        return frozenset(by_scope[self.scope])

    def initial(self, server: Server) -> Pool:
        """The run's initial weights; a layer of several architectures comes from the largest.

        Raises:
            ValueError: clients that average with each other have a layer of the same name in different shapes.
        """
        pool: Pool = {}
        members = {member.architecture: member for member in server.roster.values()}
        for member in sorted(members.values(), key=lambda m: (-_size(m), m.architecture)):
            mine = learnt_of(server.build(member.architecture))
            group = pool.setdefault(self.group(member), {})
            for name in [name for name in mine if name in group]:
                check_same_shapes(name, [mine[name].shape, group[name].shape])
            group.update({name: tensor for name, tensor in mine.items() if name not in group})
        return pool

    def group(self, member: Member) -> str:
        """The name of the group that a client averages with."""
        return member.architecture if self.scope == "architecture" else "all"

    def share(self, pool: Pool, member: Member) -> dict[str, Weights | None]:
        """The entries of a message that bring a client the weights it owns, and buffers if they are shared."""
        owned = pick(pool[self.group(member)], member.shapes)
        weights = {name: tensor for name, tensor in owned.items() if name in member.parameters}
        others = member.parameters | member.frozen
        buffers = {name: tensor for name, tensor in owned.items() if name not in others}
        return {"weights": weights, "buffers": buffers if self.buffers == "average" and buffers else None}

    def receive(self, client: Client, message: Message) -> None:
        """Load what `share` sent, and this client's own buffers if it keeps them."""
        buffers = client.state.get("buffers") if self.buffers == "local" else message.get("buffers")
        load(client.model, {**message["weights"], **(buffers or {})}, partial=True)

    def reply(self, client: Client) -> dict[str, Any]:
        """The entries of a reply that carry the trained weights back."""
        return {
            "weights": parameters_of(client.model),
            "buffers": self.returned_buffers(client),
            "examples": len(client.train),
        }

    def expected(self, member: Member, message: Message) -> dict[str, Kind | None]:
        """What these entries may hold: what was sent, trained."""
        buffers = message.get("buffers") if self.buffers == "average" else None
        return {
            "weights": like(message["weights"]),
            "buffers": None if buffers is None else like(buffers),
            "examples": count(member.examples),
        }

    def returned_buffers(self, client: Client) -> Weights | None:
        """Buffers to send back; kept in the client's state instead if they are local."""
        buffers = buffers_of(client.model)
        if self.buffers == "local":
            client.state["buffers"] = buffers
        return buffers if self.buffers == "average" and buffers else None

    def merge(self, pool: Pool, replies: Replies, roster: Roster) -> Pool:
        """The pool after averaging the weights and buffers of the replies; what nobody sent is unchanged."""
        merged = self.mean(replies, "weights", roster, keep=pool)
        return self.mean(replies, "buffers", roster, keep=merged) if self.buffers == "average" else merged

    def mean(self, replies: Replies, entry: str, roster: Roster, keep: Pool) -> Pool:
        """Group by group, the layer-wise mean of one entry of the replies over `keep`."""
        merged = dict(keep)
        for group, members in _grouped(replies, roster, self.group).items():
            owned = [replies[member.id].get(entry) or {} for member in members]
            shares = [self.weight(replies[member.id]) for member in members]
            merged[group] = mean_where_present(owned, shares, keep.get(group, {}), self.combine)
        return merged

    def weight(self, reply: Message) -> float:
        """A client's weight in the mean."""
        return float(reply["examples"]) if self.weighting == "samples" else 1.0

    def deploy(self, client: Client, message: Message) -> nn.Module:
        """The client's model filled from what `share` sent, ready to be evaluated."""
        self.receive(client, message)
        if self.buffers == "drop":
            measure_statistics(client.model, (batch.inputs for batch in client.train.batches(64, client.rng)))
        return client.model

    def global_model(self, pool: Pool, server: Server) -> nn.Module | None:
        """The one model of a federation with one architecture and shared buffers; None otherwise."""
        members = list(server.roster.values())
        if len({member.architecture for member in members}) > 1:
            return None
        if self.buffers != "average" and members[0].buffers:
            return None
        return load(server.build(members[0].architecture), pool[self.group(members[0])])


class HasPool(Protocol):
    """A method's state that holds the server's weights."""

    @property
    def pool(self) -> Pool:
        """The server's weights, by group of clients."""
        ...


P = TypeVar("P", bound=HasPool)


class SharesWeights(Method[P]):
    """A method whose clients start every round, and are evaluated, with what the server's pool holds for them.

    Deriving from it fills the inference half of the contract; `sharing` is a field of the method's own.
    """

    sharing: Sharing
    keeps_model = False

    def needs(self) -> frozenset[Need]:
        """What the scope of sharing asks for."""
        return self.sharing.needs()

    def replies(self, handler: str, member: Member, message: Message, server: Server) -> Schema | None:
        """The weights that the client was sent, trained, and its number of examples."""
        return Schema(**self.sharing.expected(member, message))

    def inference_message(self, state: P, client_id: ClientId, server: Server) -> Message:
        """The weights that the client owns."""
        return Message(**self.sharing.share(state.pool, server.roster[client_id]))

    @on_client
    def inference_model(self, client: Client, message: Message) -> nn.Module:
        """The client's model, filled with them."""
        return self.sharing.deploy(client, message)

    def global_model(self, state: P, server: Server) -> nn.Module | None:
        """The one model of a federation with one architecture."""
        return self.sharing.global_model(state.pool, server)


class SharesOnRequest(Generic[P]):
    """The part of a method that averages weights where `sharing` says how, and leaves models alone where it is None."""

    sharing: Sharing | None

    def needs(self) -> frozenset[Need]:
        """What the scope of sharing asks for; nothing without."""
        return self.sharing.needs() if self.sharing else frozenset()

    def initial_pool(self, server: Server) -> Pool:
        """The weights that all start with."""
        return self.sharing.initial(server) if self.sharing else {}

    def share(self, pool: Pool, member: Member) -> dict[str, Any]:
        """Entries of a message that bring a client its weights."""
        return self.sharing.share(pool, member) if self.sharing else {}

    def receive(self, client: Client, message: Message) -> None:
        """Load them."""
        if self.sharing:
            self.sharing.receive(client, message)

    def trained(self, client: Client) -> dict[str, Any]:
        """Entries of a reply that carry the trained weights back."""
        return self.sharing.reply(client) if self.sharing else {}

    def expected(self, member: Member, message: Message) -> dict[str, Kind | None]:
        """What these entries may hold."""
        return self.sharing.expected(member, message) if self.sharing else {}

    def merged(self, pool: Pool, replies: Replies, server: Server) -> Pool:
        """The weights after averaging."""
        return self.sharing.merge(pool, replies, server.roster) if self.sharing else pool

    def inference_message(self, state: P, client_id: ClientId, server: Server) -> Message:
        """The client's weights, if they are shared."""
        return Message(**self.share(state.pool, server.roster[client_id]))

    @on_client
    def inference_model(self, client: Client, message: Message) -> nn.Module:
        """The client's model, filled with them."""
        return self.sharing.deploy(client, message) if self.sharing else client.model

    def global_model(self, state: P, server: Server) -> nn.Module | None:
        """The one model of a federation with one architecture, if weights are shared."""
        return self.sharing.global_model(state.pool, server) if self.sharing else None


def _grouped(replies: Replies, roster: Roster, group: Callable[[Member], str]) -> dict[str, list[Member]]:
    groups: dict[str, list[Member]] = {}
    for id in replies:
        groups.setdefault(group(roster[id]), []).append(roster[id])
    return groups


def _size(member: Member) -> int:
    return sum(shape.numel() for shape in member.shapes.values())
