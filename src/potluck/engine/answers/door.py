"""The single check of all clients' answers, from any machine: an answer that does not fit is that client's failure.

Nothing of a refused answer is kept, neither the reply nor the client's new state, and the round continues as if the
client had not answered.
"""

import math
from collections.abc import Mapping
from typing import Any

from potluck.core.federation import Federation, Member
from potluck.core.ground.inputs import positions_of
from potluck.core.ground.notes import Notes
from potluck.core.ground.text import one_line
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.roles import Failure, Server
from potluck.core.schema import (
    LARGEST,
    Kind,
    Layers,
    Look,
    Misfit,
    NotFinite,
    Schema,
    Undeclared,
    number,
    optional,
    text,
)
from potluck.core.summed import with_stand_ins
from potluck.core.tasks.task import Sums
from potluck.engine.client.runtime import EvalResult, EvaluatedPart
from potluck.engine.client.session import Answer

_MOST_LOSSES = 1000
_MODEL_NAME = 64  # characters
_NOTE_SHOWN = 80  # characters
_LARGEST_SUM = 1e300  # finite; the task itself checks the values of its sums


class Door:
    """Checks replies and evaluation results.

    Args:
        method: declares the schema of replies.
        largest: the largest number in a reply.
    """

    def __init__(self, method: Method[Any], largest: float = LARGEST) -> None:
        self._method = method
        self._largest = largest

    def expected(self, handler: str, member: Member, message: Message, server: Server) -> Kind:
        """The schema of a client's reply to a message."""
        declared = self._method.replies(handler, member, message, server)
        return Undeclared(member) if declared is None else declared

    def admit(self, answer: Answer, expected: Kind) -> Message:
        """The reply in an answer; its tensors share the memory of the answer's payload.

        In the place of what the client has kept back for secure sums stand tensors that tell nothing.

        Raises:
            Misfit: it does not fit the schema; `NotFinite` if the client's numbers have diverged.
        """
        reply = _opened(answer.payload, expected)
        if answer.withheld:
            reply = with_stand_ins(reply, answer.withheld, expected, most_bytes(expected))
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

    def check_evaluation(self, result: EvalResult, sizes: Mapping[EvaluatedPart, int], federation: Federation) -> None:
        """Check that an evaluation result is possible.

        Args:
            result: the client's result.
            sizes: the number of examples of each requested part.
            federation: its task defines the sums, and which are impossible.

        Raises:
            Misfit: it is not.
        """
        look = Look(_LARGEST_SUM)
        text(_MODEL_NAME).check(result.model, "the model's name", look)
        if not result.model.isalnum():
            raise Misfit("the model's name has other characters than letters and digits")
        task, said = federation.task, expected_sums(sizes, federation)
        _check_length(result.payload, said)
        sums = _sums_of(result)
        said.check(sums, "its evaluation", look)
        positions = positions_of(federation.input_shape) if task.by_position else 1
        for part, found in sums.items():
            counts = {name: tensor.double() for name, tensor in found.items()}  # huge ones do not wrap around
            if wrong := task.impossible(counts, sizes[part], positions):
                raise Misfit(f"its evaluation: {part}: {wrong}")


def refusal(client: int, handler: str, misfit: Misfit) -> Failure:
    """The failure for an answer that does not fit."""
    kind = "divergence" if isinstance(misfit, NotFinite) else "misfit"
    return Failure(client, handler, str(misfit), kind=kind)


def expected_sums(sizes: Mapping[EvaluatedPart, int], federation: Federation) -> Schema:
    """What an evaluation result holds: the task's sums of each part that has examples.

    Args:
        sizes: the number of examples of each requested part.
        federation: its task defines the sums.
    """
    form = Layers(federation.task.zeros(federation.num_classes))
    # A client may have no copy of the common test set.
    return Schema(**{part: optional(form) if part == "common" else form for part, size in sizes.items() if size})


def most_bytes(kind: Kind) -> int:
    """The most bytes that an encoded value of this type may take: its payload, and room for names and shapes."""
    return math.ceil(kind.nbytes * 1.125) + 2**20


def _opened(payload: bytes, kind: Kind) -> Message:
    _check_length(payload, kind)
    try:
        return Message.decode(payload, views=True)
    except Exception as error:  # any exception over received bytes is their sender's failure
        raise Misfit(f"{type(error).__name__}: {error}") from error


def _sums_of(result: EvalResult) -> Mapping[EvaluatedPart, Sums]:
    try:
        return result.sums
    except Exception as error:
        raise Misfit(f"{type(error).__name__}: {error}") from error


def _check_length(payload: bytes, kind: Kind) -> None:
    if len(payload) > (most := most_bytes(kind)):
        raise Misfit(f"its answer has {len(payload)} bytes; expected at most {most}")
