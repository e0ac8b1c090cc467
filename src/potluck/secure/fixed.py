"""Numbers in fixed point: whole multiples of a small unit, whose sums are exact and can be masked."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import Checked, above, at_least, at_most, require

Words = NDArray[Any]
"""Unsigned whole numbers modulo 2^32 or 2^64, which wrap around."""

Units = NDArray[np.int64]
"""Whole numbers of units."""

_DOUBLE = 53  # bits of a double's fraction: larger whole numbers are not exact


@dataclass(frozen=True)
class FixedPoint(Checked):
    """How numbers become whole ones.

    Attributes:
        largest: the largest number in size; a client clips its own larger ones to it.
        bits: bits behind the point: the unit is 2^-bits, and a number is rounded to the nearest multiple of it.
        weight: the most that one client may weigh, such as the largest number of examples.
    """

    largest: Annotated[float, above(0)] = 64.0
    bits: Annotated[int, at_least(1), at_most(48)] = 24
    weight: Annotated[int, at_least(1)] = 1

    def __post_init__(self) -> None:
        most = 2.0 ** (_DOUBLE - self.bits)
        require(
            self.largest <= most, "largest", f"at most {most:g} with {self.bits} bits behind the point", self.largest
        )

    def word(self, clients: int) -> int:
        """How many bits a word has in which the sum of so many clients fits: 32 or 64.

        Raises:
            ConfigError: it fits in neither.
        """
        most = clients * self.weight * max(1, math.ceil(self.largest * 2**self.bits))
        for word in (32, 64):
            if most < 2 ** (word - 1):
                return word
        raise ConfigError(
            f"secure sums: found {clients} clients that weigh up to {self.weight:,}, numbers up to {self.largest:g} and"
            f" {self.bits} bits behind the point, whose sum may need {most.bit_length() + 1} bits; expected at most 64:"
            " lower largest, bits or weight"
        )

    def units(self, values: Tensor) -> tuple[Units, int]:
        """Numbers in units, flat, and how many had to be clipped.

        Raises:
            ValueError: a number is NaN or infinite.
        """
        numbers = values.detach().double().numpy().reshape(-1)
        if not np.isfinite(numbers).all():
            raise ValueError("a number that is to be summed is not finite")
        clipped = int((np.abs(numbers) > self.largest).sum())
        return np.rint(np.clip(numbers, -self.largest, self.largest) * 2.0**self.bits).astype(np.int64), clipped


def to_words(units: Units, word: int) -> Words:
    """The same numbers modulo 2^word."""
    return units.astype(f"<u{word // 8}")


def to_units(words: Words) -> Units:
    """What the words stand for, if that lies between -2^(word - 1) and 2^(word - 1)."""
    return words.view(words.dtype.str.replace("u", "i")).astype(np.int64)
