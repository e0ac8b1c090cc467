"""What Linux says of this machine, and of the CPU time that its processes have taken."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PROC = Path("/proc")
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, Any]:
    """The machine, before anything is measured on it."""
    models = _values(PROC / "cpuinfo", "model name")
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_values(PROC / "meminfo", "MemTotal")[0].split()[0]) / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": _commit(),
        "load_average_before": os.getloadavg(),
    }


def _values(path: Path, name: str) -> list[str]:
    """What stands behind `name :` in a file of /proc."""
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return [value.strip() for key, _, value in lines if key.strip() == name]


def _commit() -> str | None:
    """The repository's; marked where the files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


class Processes:
    """All processes at one moment: their parents, and the time that they have taken, in steps of 0.01 s."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._children: dict[int, list[int]] = {}
        for folder in PROC.iterdir():
            if folder.name.isdigit():
                self._read(folder)

    def _read(self, folder: Path) -> None:
        try:
            text = (folder / "stat").read_text()
        except OSError:  # it has just ended
            return
        fields = text.rpartition(")")[2].split()  # the name in parentheses may hold anything
        self._children.setdefault(int(fields[1]), []).append(int(folder.name))
        # User and system time, its own and that of children which have ended and been waited for.
        self._seconds[int(folder.name)] = sum(map(int, fields[11:15])) / TICKS_A_SECOND

    def tree(self, root: int) -> list[int]:
        """A process and all below it."""
        found = [root]
        for process in found:
            found += self._children.get(process, [])
        return found

    def cpu_seconds(self, root: int) -> float:
        """That a process and all below it have taken."""
        return sum(self._seconds.get(process, 0.0) for process in self.tree(root))
