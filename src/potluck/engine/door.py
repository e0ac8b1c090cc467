"""The one door by which clients' answers come in, from whichever machine: what does not fit is that client's failure.

Of what is refused here nothing is kept, neither the reply nor what the client would have kept, and the other replies
count as if it had not answered.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from potluck.core.federation import Member
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.notes import Notes
from potluck.core.roles import Failure, Server
from potluck.core.schema import (
    LARGEST,
    Kind,
    Look,
    Misfit,
    NotFinite,
    Schema,
    Tensors,
    Undeclared,
    number,
    optional,
    text,
)
from potluck.core.text import one_line
from potluck.core.tree import unpack
from potluck.engine.client.runtime import EvalResult, Part
from potluck.engine.client.session import Answer

_MOST_LOSSES = 1000
_MODEL_NAME = 64  # characters
_NOTE_SHOWN = 80  # characters


class Door:
    """Looks at what comes in.

    Args:
        method: which says what replies may hold.
        largest: the largest number that one may hold.
    """

    def __init__(self, method: Method[Any], largest: float = LARGEST) -> None:
        self._method = method
        self._largest = largest

    def expected(self, handler: str, member: Member, message: Message, server: Server) -> Kind:
        """What a client may answer to a message."""
        declared = self._method.replies(handler, member, message, server)
        return Undeclared(member) if declared is None else declared

    def admit(self, answer: Answer, expected: Kind) -> Message:
        """The reply that an answer carries; its tensors lie in the answer's payload.

        Raises:
            Misfit: it is not what was expected; `NotFinite` if the client's numbers have diverged.
        """
        reply = _opened(answer.payload, expected)
        look = Look(self._largest)
        if len(answer.losses) > _MOST_LOSSES:
            raise Misfit(f"it reports {len(answer.losses)} losses; expected at most {_MOST_LOSSES}")
        for loss in answer.losses:
            number(-self._largest, self._largest).check(loss, "its loss", look)
        for name, value in answer.notes.items():
            number(-self._largest, self._largest).check(value, f"its note {one_line(name, _NOTE_SHOWN)}", look)
        try:
            Notes().add(answer.notes)
        except ValueError as error:
            raise Misfit(str(error)) from error
        expected.check(reply, "", look)
        return reply

    def check_evaluation(self, result: EvalResult, sizes: Mapping[Part, int], classes: int) -> None:
        """Refuse what a client says of its model if it cannot be true.

        Args:
            result: what it says.
            sizes: by part that was asked for, how many examples are in it.
            classes: of the task.

        Raises:
            Misfit: it cannot be true.
        """
        look = Look(self._largest)
        text(_MODEL_NAME).check(result.model, "the model's name", look)
        if not result.model.isalnum():
            raise Misfit("the model's name has other characters than letters and digits")
        share = number(0, 1)
        shares = {part: optional(share) if part == "common" or not size else share for part, size in sizes.items()}
        Schema(**shares).check(result.shares, "accuracy", look)
        said = Tensors(torch.int64, (sizes.get("common", 0),), 0, classes - 1)
        common = _unpacked(result.payload, said)
        if common is not None:
            said.check(common, "classes of the common test set", look)


def refusal(client: int, handler: str, misfit: Misfit) -> Failure:
    """What becomes of an answer that does not fit."""
    kind = "divergence" if isinstance(misfit, NotFinite) else "misfit"
    return Failure(client, handler, str(misfit), kind=kind)


def most_bytes(kind: Kind) -> int:
    """How long bytes may be that hold something of this kind: its payload, and room for names and shapes."""
    return math.ceil(kind.nbytes * 1.125) + 2**20


def _opened(payload: bytes, kind: Kind) -> Message:
    _check_length(payload, kind)
    try:
        return Message.decode(payload, views=True)
    except Exception as error:  # whatever foreign bytes do to a decoder is their sender's failure
        raise Misfit(f"{type(error).__name__}: {error}") from error


def _unpacked(payload: bytes, kind: Kind) -> Any:
    _check_length(payload, kind)
    try:
        return unpack(payload)
    except Exception as error:
        raise Misfit(f"{type(error).__name__}: {error}") from error


def _check_length(payload: bytes, kind: Kind) -> None:
    if len(payload) > (most := most_bytes(kind)):
        raise Misfit(f"its answer has {len(payload)} bytes; expected at most {most}")
