"""When clients that are late again and again are set aside."""

from dataclasses import dataclass
from typing import Annotated

from potluck.core.ground.fields import Checked, at_least, require

_Rounds = Annotated[int, at_least(1)]


@dataclass(frozen=True)
class AsideRule(Checked):
    """Whoever is late again and again is not drawn for some rounds.

    A client is late in a round for which it was drawn if its reply comes after the exchange has closed, or if it is
    still at work on what came too late before. With over-selecting, whoever is not among the first is late. After its
    rest it begins anew. As many clients as a round needs at the least are never set aside; those stay that were late
    less often, and of equals the one with the greater number.

    Attributes:
        late: in how many rounds.
        of: of how many of the last rounds for which the client was drawn.
        rest: for how many rounds the client is then not drawn; between machines its model is not evaluated either.
    """

    late: _Rounds = 3
    of: _Rounds = 5
    rest: _Rounds = 10

    def __post_init__(self) -> None:
        require(self.late <= self.of, "late", f"at most the {self.of} rounds that count", self.late)

    @property
    def words(self) -> str:
        """What is said of a client that is set aside."""
        return f"it was late in {self.late} or more of its last {self.of} rounds"
