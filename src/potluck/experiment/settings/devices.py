"""Classes of devices that a table of budgets can name, with the source of every number: `devices.toml`."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from potluck.core.ground.discovery import unknown
from potluck.core.ground.fields import Checked

_FILE = "devices.toml"


@dataclass(frozen=True)
class Device(Checked):
    """A class of devices.

    Attributes:
        shows: what it is.
        memory_mib: that a training process may use.
        gflops: sustained speed in fp32.
        down_mbit: bandwidth for what it receives.
        up_mbit: bandwidth for what it sends.
        disk_mib: that may be used.
        sources: where each of the numbers is from, and what was made of it.
    """

    shows: str
    memory_mib: float
    gflops: float
    down_mbit: float
    up_mbit: float
    disk_mib: float
    sources: dict[str, str]

    @property
    def line(self) -> str:
        """The device and its numbers in one line."""
        memory, disk = f"{self.memory_mib / 1024:g} GiB", f"{self.disk_mib / 1024:g} GiB"
        bandwidth = f"{self.down_mbit:g}/{self.up_mbit:g} Mbit/s"
        return f"{self.shows}: {memory} of memory, {self.gflops:g} GFLOP/s, {bandwidth}, {disk} of disk"


@cache
def _devices() -> dict[str, Device]:
    tree = tomllib.loads((files(__package__ or "") / _FILE).read_text(encoding="utf-8"))
    shared = tree.pop("sources")
    for table in tree.values():
        table["sources"] = {key: shared.get(text, text) for key, text in table["sources"].items()}
    return {name: Device(**table) for name, table in tree.items()}


def list_devices() -> list[str]:
    """The names of the classes, from the weakest to the strongest of each kind."""
    return list(_devices())


def get_device(name: str) -> Device:
    """The class of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _devices():
        raise unknown("device", name, list_devices(), "potluck list devices")
    return _devices()[name]
