"""What stands between the replies of an exchange and a server that is to learn their sums alone."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.core.roles import Failure
from potluck.core.schema import Kind
from potluck.engine.rounds.report import ExchangePlace

SECURE_SUMS = "secure sums"
"""Under which traffic counts what sums take; no entry of a message has this name."""


@dataclass(frozen=True)
class Exchanged:
    """An exchange whose replies are to be summed.

    Attributes:
        handler: its name.
        replies: by client, those that fit and count.
        failed: the clients that were asked and have none.
        messages: what each was sent.
        expected: the schema of each reply.
        place: of the exchange in the run; its report counts what the sums come to.
    """

    handler: str
    replies: Mapping[ClientId, Message]
    failed: Collection[ClientId]
    messages: Mapping[ClientId, Message]
    expected: Mapping[ClientId, Kind]
    place: ExchangePlace


@dataclass(frozen=True)
class Disclosed:
    """What a server gets of an exchange.

    Attributes:
        replies: by client, with means in the place of tensors of which it needs sums alone.
        left: why others have not come into the sums, so that their replies do not count.
        refusal: why nothing was summed, so that nobody's reply counts; empty if something was.
        bytes_down: by client, what was sent for the sums, also to those who have failed.
        bytes_up: by client, what it sent, by entry: of its reply what is in the clear, and what it answered for sums.
    """

    replies: Mapping[ClientId, Message]
    left: Mapping[ClientId, Failure] = field(default_factory=dict[ClientId, Failure])
    refusal: str = ""
    bytes_down: Mapping[ClientId, int] = field(default_factory=dict[ClientId, int])
    bytes_up: Mapping[ClientId, Mapping[str, int]] = field(default_factory=dict[ClientId, Mapping[str, int]])


class SumsReplies(Protocol):
    """Makes of an exchange's replies what the server gets."""

    def __call__(self, exchanged: Exchanged) -> Disclosed:
        """What the server gets of this exchange."""
        ...
