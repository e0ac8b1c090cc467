"""Amounts as people write them: bytes, bits a second, seconds and operations a second."""

import math
import re
from collections.abc import Mapping

BYTE_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
BIT_UNITS = {"kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9}
TIME_UNITS = {"s": 1, "min": 60, "h": 3600}
SPEED_UNITS = {"MFLOP/s": 10**6, "GFLOP/s": 10**9, "TFLOP/s": 10**12}


def quantity(text: str, units: Mapping[str, int]) -> float | None:
    """The amount in text such as "32MiB" or "1.5 GB", in the smallest of the units' own; None if it is none above 0."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z/]+)", text.strip())
    if found is None or found[2] not in units:
        return None
    value = float(found[1]) * units[found[2]]
    return value if 0 < value < math.inf else None
