"""How a run's replies are summed securely."""

from dataclasses import dataclass
from typing import Annotated

from potluck.core.ground.fields import Checked, above, at_least, at_most
from potluck.secure.fixed import FixedPoint

_Bits = Annotated[int, at_least(1), at_most(48)]


@dataclass(frozen=True)
class SecureRule(Checked):
    """What secure sums are made of, see `potluck.secure`.

    Attributes:
        largest: the largest number in size that a client adds; its own larger ones are clipped to it, and counted.
        bits: bits behind the point, to which numbers are rounded.
        least: the least number of clients whose numbers are summed; what fewer have stays with them.
    """

    largest: Annotated[float, above(0)] = 64.0
    bits: _Bits = 24
    least: Annotated[int, at_least(3)] = 3

    def __post_init__(self) -> None:
        self.numbers(1)

    def numbers(self, weight: int) -> FixedPoint:
        """How numbers become whole ones where a client weighs so much at most.

        Raises:
            ConfigError: they would not be exact.
        """
        return FixedPoint(self.largest, self.bits, weight)
