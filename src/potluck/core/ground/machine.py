"""This machine's memory, so that requests beyond it are refused before memory is allocated; and what a folder takes."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from potluck.core.ground.errors import PotluckError

_NO_LIMIT = 2**60


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


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that could be allocated now, with freeable ones, within the containers' limits; None if unknown.

    A container has its limit less what it uses; the machine has swap besides.

    Args:
        root: of the file system to read, for tests.
    """
    return min([*_of_machine(root), *_of_containers(root)], default=None)


def all_memory() -> int | None:
    """Bytes of memory that this machine has, whoever uses them; None if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not a Unix-like system
        return None


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder and below it."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it has gone meanwhile
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _of_machine(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        yield (kibibytes["MemAvailable"] + kibibytes.get("SwapFree", 0)) * 1024
    except (OSError, LookupError, ValueError):
        if (whole := all_memory()) is not None:
            yield whole


def _of_containers(root: Path) -> Iterator[int]:
    """Available bytes of each control group of this process, file caches counted as free."""
    groups = root / "sys/fs/cgroup"
    for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for place in _places(root, groups if names[0] == "memory.max" else groups / "memory"):
            try:
                limit, used = ((place / name).read_text().strip() for name in names)
                if limit.isdigit() and int(limit) < _NO_LIMIT:
                    yield int(limit) - int(used) + _cached(place)
            except (OSError, ValueError):
                continue


def _places(root: Path, groups: Path) -> list[Path]:
    """This process's control group and its parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = next((line.split(":")[2] for line in lines if line.split(":")[1:2] in ([""], ["memory"])), "/")
    place = groups / own.lstrip("/")
    return [group for group in (place, *place.parents) if group.is_relative_to(groups)]


def _cached(place: Path) -> int:
    stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
    return int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
