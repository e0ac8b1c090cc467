"""The memory available to this process."""

import os
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 2**60


def available_bytes(root: Path = Path("/")) -> int | None:
    """Available bytes of the machine, or of the container if fewer; None if the system does not tell.

    Args:
        root: of the file system to read, for tests.
    """
    found = [*_of_machine(root), *_of_containers(root)]
    return min(found, default=None)


def _of_machine(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        yield next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        if {"SC_AVPHYS_PAGES", "SC_PAGE_SIZE"} <= set(getattr(os, "sysconf_names", ())):
            yield os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
