"""How much of its machine's memory and disk a node gives its worker, whatever a server asks for."""

import re
import shutil
import sys
from pathlib import Path

from potluck.core.ground.errors import PotluckError
from potluck.core.ground.machine import all_memory, size_of

_SHARE = 0.75
"""Of the machine's memory, and of what is free on the disk, by default."""

_GIB = 2**30
_NO_MEMORY = re.compile(
    r"MemoryError|can't allocate memory|bad_alloc|Cannot allocate memory|Unable to allocate"
    r"|could not create a primitive"  # oneDNN's words, whatever it lacks
)


class NoRoom(PotluckError):
    """A node's owner has not given it so much disk."""


class Room:
    """What the folder for a node's state may take.

    Args:
        folder: the folder.
        most_gib: the most GiB of all files in it; None for any number.
    """

    def __init__(self, folder: Path, most_gib: float | None) -> None:
        self._folder, self._most = folder, most_gib

    def check(self, more: int = 0) -> None:
        """Check that there is room for so many bytes more.

        Raises:
            NoRoom: there is none; says what its owner can do.
        """
        if self._most is None:
            return
        needed = size_of(self._folder) + more
        if needed > self._most * _GIB:
            raise NoRoom(
                f"this node's limit of disk is reached: its state would take {needed / _GIB:.3g} GiB, and may"
                f" {self._most:.3g}; its owner can remove the folders of runs that are over, or give more: potluck join"
                " --most-disk-gib"
            )


def default_disk_gib(folder: Path) -> float:
    """What a state folder may take if nothing is said: what it has, and three quarters of what is free on its disk."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    return (size_of(folder) + _SHARE * shutil.disk_usage(there).free) / _GIB


def default_memory_gib(device: str) -> float | None:
    """What a worker may take if nothing is said: three quarters of the machine's memory; None where that is not known.

    Drivers of accelerators map more than they use, so that a worker with another device than the CPU has no limit then.
    """
    whole = all_memory()
    return None if whole is None or device != "cpu" else _SHARE * whole / _GIB


def limit_memory(most_gib: float | None) -> None:
    """Let this process have no more memory of its own than this, as long as it lives; on Linux."""
    if most_gib is None or sys.platform != "linux":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(most_gib * _GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def of_limits(reason: str, most_memory_gib: float | None) -> str:
    """The reason for a failure, in the words of the limit of memory if there is one and it was reached."""
    if most_memory_gib is None or not _NO_MEMORY.search(reason):
        return reason
    return (
        f"this node's limit of memory, {most_memory_gib:.3g} GiB, is reached; smaller batches or a smaller model need"
        f" less, and its owner can give more: potluck join --most-memory-gib ({reason})"
    )
