"""What methods share whose clients train the leading blocks of the server's one net, with an exit behind each level.

Kim, Yu, Kim, Yoon. DepthFL. ICLR 2023. https://openreview.net/forum?id=pf8RIZTMU58.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeVar

from torch import Size, nn

from potluck.core.federation import ClientId, Member, Roster
from potluck.core.ground.fields import above, at_most, require
from potluck.core.ground.inputs import InputShape
from potluck.core.message import Message
from potluck.core.method import Method, Need
from potluck.core.nets.weights import Weights, buffers_of, load, parameters_of
from potluck.core.requests.fit import LocalTraining
from potluck.core.roles import Client, Server
from potluck.core.schema import Schema, like
from potluck.models.contract import STAGES
from potluck.models.stages import stages_of
from potluck.parts.classes import rows_for
from potluck.parts.exits import (
    ExitBuilder,
    LeadingNames,
    leading_names,
    leading_share,
    small_exit,
    with_rows_of_exits,
)
from potluck.parts.width import level_within, warn_below


class WholeNet(Protocol):
    """A method's state that holds the one net with all its exits."""

    @property
    def weights(self) -> Weights:
        """What is trained of it."""
        ...

    @property
    def buffers(self) -> Weights:
        """BatchNorm's statistics."""
        ...


D = TypeVar("D", bound=WholeNet)


@dataclass(frozen=True)
class DepthLevels(Method[D]):
    """A method whose clients train as many leading blocks as their capacity allows. The messages are filled here.

    Attributes:
        training: a client's local training.
        levels: shares of the blocks that clients may train; the net has an exit behind each.
    """

    family = "parts"
    revises = ("weights", "buffers")
    predicts_with_exits = True
    default_capacities = (1.0, 0.75, 0.5, 0.25)

    training: LocalTraining = LocalTraining()
    levels: tuple[Annotated[float, above(0), at_most(1)], ...] = (1.0, 0.75, 0.5, 0.25)

    def __post_init__(self) -> None:
        require(len(self.levels) > 0, "levels", "at least one share of the blocks", self.levels)

    @property
    def keeps_model(self) -> bool:
        """Every round starts from what is sent."""
        return False

    def needs(self) -> frozenset[Need]:
        """One net for all, of which leading blocks are nets."""
        return frozenset({Need.ONE_ARCHITECTURE, Need.SPLIT_MODEL, STAGES, Need.DEPTH_PREFIXES})

    def member(self, server: Server, id: ClientId) -> Member:
        """A client, of which it is known where all that it is sent has its own classes."""
        return with_rows_of_exits(server.roster[id], server, lambda server, _: self.net(server, max(self.levels)))

    def roster(self, server: Server) -> Roster:
        """All clients, as `member` knows them."""
        return {id: self.member(server, id) for id in server.roster}

    def whole(self, server: Server) -> nn.Module:
        """The net with all its exits, as it begins; warns of clients whose capacity lies below the smallest level."""
        warn_below(min(self.levels), server, self, "the smallest level", "give method.levels a smaller one")
        return self.net(server, max(self.levels))

    def replies(self, handler: str, member: Member, message: Message, server: Server) -> Schema:
        """The tensors that the client was sent, trained."""
        buffers = message.get("buffers")
        return Schema(weights=like(message["weights"]), buffers=None if buffers is None else like(buffers))

    def inference_message(self, state: D, client_id: ClientId, server: Server) -> Message:
        """The largest level that the client's capacity allows."""
        names = server.about(None, self.names)[level_within(self.levels, server.roster[client_id].capacity)]
        weights, buffers = (
            {name: tensor for name, tensor in whole.items() if name in names}
            for whole in (state.weights, state.buffers)
        )
        return Message(weights=rows_for(weights, self.member(server, client_id)), buffers=buffers or None)

    def filled(self, client: Client, message: Message) -> nn.Module:
        """On the client, its part of the net with what it was sent."""
        net = self.net(client, level_within(self.levels, client.capacity))
        load(net, {**message["weights"], **(message.get("buffers") or {})})
        return net

    def reply(self, net: nn.Module) -> Message:
        """A client's answer: its part, trained."""
        return Message(weights=parameters_of(net), buffers=buffers_of(net) or None)

    def exit_behind(self, shapes: Sequence[Size]) -> ExitBuilder:
        """What makes an exit; `shapes` are those of one example's features at all places."""
        return small_exit

    def net(self, party: Server | Client, level: float) -> nn.Module:
        """The leading share of the net's blocks, with the exits behind them."""
        full, data = (party.build(), party) if isinstance(party, Server) else (party.model, party.train)
        build = self.exit_behind([*stages_of(full).shapes(data.input_shape).values()])
        return leading_share(party, full, data.input_shape, level, self.levels, build)

    def names(self, net: nn.Module, input_shape: InputShape) -> dict[float, LeadingNames]:
        """By level, the names of its tensors."""
        return {level: leading_names(net, level) for level in self.levels}
