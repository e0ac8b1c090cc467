"""Notes: diagnostic numbers that a method reports. Nothing is computed from them."""

import math
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

from potluck.core.ground.errors import DivergenceError

MOST_NOTES = 32
"""The most notes of one party in a round."""

NOTE_NAME = r"[A-Za-z0-9_.\-]{1,64}"


class Notes(dict[str, float]):
    """The notes of one party in a round, by name."""

    def add(self, numbers: Mapping[str, Any]) -> None:
        """Add numbers; one of a name already there replaces it.

        Raises:
            ValueError: a name has other characters than letters, digits, `_`, `.` and `-`, or more than 64; a value is
                no number; or there are more than 32.
            DivergenceError: a number is NaN or infinite.
        """
        for name, number in numbers.items():
            if not re.fullmatch(NOTE_NAME, name):
                raise ValueError(f"note {name[:80]!r}: expected a name of 1 to 64 letters, digits, '_', '.' and '-'")
            if not isinstance(number, Real) or isinstance(number, bool):
                kind = type(number).__name__
                raise ValueError(f"note {name!r}: expected a number, found a {kind}; write float(...) of a tensor")
            if not math.isfinite(value := _as_float(number)):
                raise DivergenceError(f"note {name!r}: expected a finite number, found {value}")
            self[name] = value
            if len(self) > MOST_NOTES:
                raise ValueError(f"note {name!r}: expected at most {MOST_NOTES} notes a round, found one more")


def _as_float(number: Real) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer too large for a float
        return math.inf
