"""A common network that travels, of which every client trains a copy beside its own model."""

from dataclasses import dataclass

from torch import nn

from potluck.core.federation import Member
from potluck.core.message import Message
from potluck.core.method import ClientWork, Method, on_client
from potluck.core.nets.weights import Weights, learnt_of, load
from potluck.core.requests.fit import LocalTraining
from potluck.core.roles import Client, Cohort, Replies, Server
from potluck.core.schema import Schema, count, like


@dataclass(frozen=True)
class Common:
    """The state of a server that has a common network: its weights, with its buffers."""

    common: Weights


@dataclass(frozen=True)
class CommonModel(Method[Common]):
    """A method whose clients train a copy of one common network beside their own model.

    It writes `local_update`, and in `merged` what the copies become. The network begins with weights drawn apart from
    the clients', all of which begin alike, so that it is no copy of an own one of its architecture.

    Attributes:
        training: a client's local training, of its own model and of its copy of the common one.
    """

    family = "common"
    revises = ("common",)

    training: LocalTraining = LocalTraining()

    def init(self, server: Server) -> Common:
        """The initial weights of the server's architecture."""
        return Common(learnt_of(server.build(draw="common")))

    def round(self, state: Common, cohort: Cohort, server: Server) -> Common:
        """Send it to all of the cohort, and merge what comes back."""
        replies = cohort.ask(self.local_update, Message(common=state.common))
        return Common(self.merged(state.common, replies, server))

    def merged(self, common: Weights, replies: Replies, server: Server) -> Weights:
        """What the network becomes.

        Args:
            common: what was sent.
            replies: with the clients' copies under "common".
            server: of the run.
        """
        raise NotImplementedError

    @on_client
    def local_update(self, client: Client, message: Message) -> ClientWork:
        """Train the own model and a copy of what was sent, and reply with the copy."""
        raise NotImplementedError

    def replies(self, handler: str, member: Member, message: Message, server: Server) -> Schema:
        """The copy, trained, and the client's number of examples."""
        return Schema(common=like(message["common"]), examples=count(member.examples))

    def global_model(self, state: Common, server: Server) -> nn.Module | None:
        """The common network."""
        return load(server.build(), state.common)
