"""The classes of a federation, as server and node tell them to each other: a count, and names, which are labels.

A server tells them with every message, so that a node numbers its own data as the federation does; a node tells those
of its data when it introduces itself.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from potluck.core.ground.errors import DataError
from potluck.core.ground.text import one_line
from potluck.data.dataset import MOST_CLASSES, Description
from potluck.data.federate import MatchedClasses
from potluck.flower.wire.schemas import LONGEST_NAME, Header

"""The most classes of a task."""

MOST_NAMES = 2**22
"""The most bytes of all names together, as JSON: 4 MiB, half of a header."""

_FORM = f"a name of 1 to {LONGEST_NAME} printable characters"


def _printable(name: str) -> str:
    if not name.isprintable():
        raise PydanticCustomError("printable", "expected {form}", {"form": _FORM})
    return name


ClassNames = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=LONGEST_NAME), AfterValidator(_printable)]],
    Field(max_length=MOST_CLASSES),
]


class Classes(Header):
    """What a server tells of its federation's classes.

    Attributes:
        count: the width of an output.
        names: in the order of their numbers; None if they have only numbers, or the task has no classes.
    """

    count: Annotated[int, Field(ge=1, le=MOST_CLASSES)]
    names: ClassNames | None

    def matched(self, own: Description) -> MatchedClasses:
        """The federation's classes, for a node whose own data are described.

        Raises:
            DataError: they are not `count` different names.
        """
        names = None if self.names is None else tuple(self.names)
        return MatchedClasses.matching(
            Description("the server's data set", own.input_shape, self.count, names, own.task),
        )


def told(matched: MatchedClasses) -> dict[str, Any]:
    """The entry of a message's header that `Classes` reads.

    Raises:
        DataError: the names cannot be told.
    """
    named = matched.classes and matched.common.classes is not None
    names = list(sendable(matched.classes, matched.common.name)) if named else None
    return {"count": matched.width, "names": names}


def sendable(names: Sequence[str], who: str) -> tuple[str, ...]:
    """The names, which the other side will accept.

    Raises:
        DataError: it will not; `who` has them.
    """
    for name in names:
        if not (name.isprintable() and 0 < len(name) <= LONGEST_NAME):
            raise DataError(f"{who}: class {one_line(repr(name), 80)}: expected {_FORM}; rename it")
    if (size := len(json.dumps(list(names)))) > MOST_NAMES:
        raise DataError(
            f"{who}: the names of its classes take {size} bytes; expected at most {MOST_NAMES}: shorten them"
        )
    return tuple(names)
