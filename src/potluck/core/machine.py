"""This machine's free memory, so that requests beyond it are refused before memory is allocated."""

import os
from pathlib import Path

from potluck.core.errors import PotluckError

_PROC = Path("/proc/meminfo")
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_fits(needed: int, what: str, advice: str, error: type[PotluckError]) -> None:
    """Raise `error` if `needed` bytes are more than this machine has left.

    Args:
        needed: the least number of bytes that will be allocated.
        what: what needs them; opens the message.
        advice: what to do; ends the message.
        error: the type of error.
    """
    left = available_bytes()
    if left is not None and needed > left:
        found = f"at least {needed / 2**30:,.1f} GiB of memory needed, {left / 2**30:,.1f} GiB left"
        raise error(f"{what}: {found}; {advice}")


def available_bytes() -> int | None:
    """Bytes that could be allocated now, with freeable ones and swap, within a container's limit; None if unknown."""
    found = [*_linux_bytes(), *_container_bytes()] or _physical_bytes()
    return min(found, default=None)


def _linux_bytes() -> list[int]:
    try:
        lines = _PROC.read_text().splitlines()
    except OSError:
        return []
    kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return [(kibibytes["MemAvailable"] + kibibytes["SwapFree"]) * 1024]


def _container_bytes() -> list[int]:
    found: list[int] = []
    for place in _LIMITS:
        try:
            found.append(int(place.read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return found


def _physical_bytes() -> list[int]:
    try:
        return [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):  # not a Unix-like system
        return []
