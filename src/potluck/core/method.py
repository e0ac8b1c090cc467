"""The contract of a method: one frozen dataclass, the server's half in `round`, the clients' half in handlers."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn

from potluck.core.federation import ClientId, Member
from potluck.core.ground.fields import Checked
from potluck.core.message import Message
from potluck.core.needs import Need as Need
from potluck.core.requests.fit import Request
from potluck.core.roles import Client, Cohort, Server
from potluck.core.schema import Schema
from potluck.core.summed import ToSum

S = TypeVar("S")
ClientWork = Message | Generator[Request, Any, Message]
Handler = TypeVar("Handler", bound=Callable[..., Any])


def on_client(handler: Handler) -> Handler:
    """Mark a handler, which runs on the client: it may use `client` and `message`, and nothing of the server's."""
    handler.on_client = True  # type: ignore[attr-defined]
    return handler


def runs_on_client(handler: object) -> bool:
    """Whether a handler was marked with `on_client`."""
    return getattr(handler, "on_client", False)


@dataclass(frozen=True)
class Releases:
    """How many private releases a client has made in a run, under its method's privacy mechanism.

    Attributes:
        counted: releases that are certain.
        unheard: requests without an answer, each of which may have been another release.
    """

    counted: int = 0
    unheard: int = 0

    @property
    def at_most(self) -> int:
        """The number to account for: no fewer than were made."""
        return self.counted + self.unheard

    def __str__(self) -> str:
        times = f"{self.at_most} time{'' if self.at_most == 1 else 's'}"
        unheard = f"{self.unheard} request{' was' if self.unheard == 1 else 's were'} not answered"
        return f"at most {times} ({self.counted} for certain, and {unheard})" if self.unheard else times


@dataclass(frozen=True)
class Method(Checked, Generic[S]):
    """A federated algorithm. Fields are hyper-parameters; S is a frozen dataclass, the server's state between rounds.

    Hyper-parameters are checked against their annotations when a method is made, see `potluck.core.ground.fields`.

    The state may hold tensors, numbers, text and nested dicts and lists of them. `round` returns a new state
    and must not change the one it was given.
    """

    family: ClassVar[str] = "other"
    """Where lists and pages show the method: a key of `potluck.core.families.FAMILIES`."""

    default_capacities: ClassVar[tuple[float, ...]] = (1.0,)
    """Shares of the full model that clients can train, assigned in turn, if the configuration gives none."""

    builds_clients_models: ClassVar[bool] = True
    """Whether the server builds clients' networks, for their initial weights, their shapes or their replies. If False,
    clients on other machines may have networks unknown to the server."""

    aligns_classes: ClassVar[bool] = False
    """Whether clients may have outputs for classes of their own alone: what this method exchanges means the same class
    everywhere, and it asks nothing of a class that a client lacks."""

    needs_networks: ClassVar[bool] = True
    """Whether every client must have a network of PyTorch's. If False, all that is sent either way are rows, classes
    and predictions, so that a node may have a model of any kind, such as a forest."""

    predicts_with_exits: ClassVar[bool] = False
    """Whether exits have a part in predictions, see `potluck.parts.exits`; else they serve training alone."""

    unguarded: ClassVar[str] = ""
    """Why one lying client of five moves what the others are sent whatever rule `combine` has; empty if a robust rule
    keeps it from that."""

    revises: ClassVar[tuple[str, ...] | None] = None
    """Of replies that may be merged in a later round than that in which they were asked for: entries that are the
    client's new version of what it was sent under the same name, such as weights, and are then moved by as much as the
    server has moved since; () if there are none. None if the server reads a reply beside what it has sent."""

    sums_suffice: ClassVar[bool] = False
    """Whether its server needs nothing of clients' tensors but sums, which `summed` then names."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named options of the method: hyper-parameters by dotted key. The conformance suite also checks each of them."""

    @property
    def keeps_model(self) -> bool:
        """Whether a client's model is kept between rounds. False if every round starts from what is sent."""
        return True

    def needs(self) -> frozenset[Need]:
        """What this method, with these hyper-parameters, needs of the federation."""
        return frozenset()

    @property
    def releases_privately(self) -> bool:
        """Whether clients release anything under a privacy mechanism.

        If so, releases are counted, and two runs of one seed differ: private noise does not depend on the seed.
        """
        return False

    def init(self, server: Server) -> S:
        """The server's state before the first round; the same for the same seed."""
        raise NotImplementedError

    def round(self, state: S, cohort: Cohort, server: Server) -> S:
        """One round: ask the cohort, once or more, and return the next state."""
        raise NotImplementedError

    def replies(self, handler: str, member: Member, message: Message, server: Server) -> Schema | None:
        """The schema of a client's reply; a reply that does not fit counts as no reply.

        None declares nothing: numbers must then be finite, `examples` at most the client's number of examples, and the
        reply not much larger than its model.

        Args:
            handler: name of the handler that replies.
            member: the client.
            message: what it was sent.
            server: for facts about the federation; draws nothing.
        """
        return None

    @property
    def needs_single_replies(self) -> str:
        """Why sums over clients do not suffice its server, for secure sums; empty if they do, by the plain mean."""
        return "" if self.sums_suffice else "its server reads each client's own"

    def summed(self, handler: str, member: Member, message: Message, reply: Message, server: Server) -> ToSum:
        """What of a reply the server needs the sums of alone; if replies have the means in its place, it does the same.

        A client can tell it by itself: from what it was sent, its reply, and networks.

        Args:
            handler: name of the handler that replies.
            member: the client.
            message: what it was sent.
            reply: what it replies.
            server: for facts about networks and the round; its roster has this client alone. Draws nothing.
        """
        raise NotImplementedError

    def inference_message(self, state: S, client_id: ClientId, server: Server) -> Message:
        """What a client needs from the server to predict; empty by default."""
        return Message()

    @on_client
    def inference_model(self, client: Client, message: Message) -> nn.Module | Generator[Request, Any, nn.Module]:
        """The model that this client would deploy, and that is evaluated; its own by default.

        If clients keep their models, BatchNorm's statistics that are those of a new layer are then measured on the
        client's training data. It may yield requests such as `NormStatistics`, but must not train.
        """
        return client.model

    def global_model(self, state: S, server: Server) -> nn.Module | None:
        """The server's model, if the method has a single one for the whole task."""
        return None

    def privacy_statement(self, releases: Mapping[ClientId, Releases]) -> str | None:
        """The privacy that a run has spent, or why none can be stated; None if the method makes no such claim.

        Args:
            releases: by client, for those that made, or may have made, some.
        """
        return None


@dataclass(frozen=True)
class Nothing:
    """The state of a server that keeps nothing."""


@dataclass(frozen=True)
class Stateless(Method[Nothing]):
    """A method whose server keeps nothing between rounds; what is learnt stays at the clients."""

    def init(self, server: Server) -> Nothing:
        """Nothing."""
        return Nothing()
