"""Why a round is lost: it changes neither the server's state nor any client's."""

from collections.abc import Iterable

from potluck.core.ground.errors import PotluckError
from potluck.core.roles import Failure


class Lost(PotluckError):
    """Fewer clients than the quorum answered."""


class Deserted(Lost):
    """Fewer clients than the quorum were there to the end, which says nothing against those that were."""


class Spoilt(Lost):
    """Everybody diverged but the client whose reply had stood out."""


class StateDiverged(Lost):
    """The server's half of a round diverged, and the run continues."""


def check_attended(asked: int, quorum: int, failures: Iterable[Failure]) -> None:
    """Check that a quorum of the clients asked was there, whatever it answered.

    Raises:
        Deserted: it was not.
    """
    absent = [failure for failure in failures if failure.kind == "absence"]
    if (here := asked - len(absent)) < (least := min(quorum, asked)):
        raise Deserted(f"{here} of {asked} clients were there to the end, and {least} are needed; {absent[0]}")
