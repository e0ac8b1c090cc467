"""The devices of a twin: what each can do, and whose it is."""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from potluck.core.federation import ClientId
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import Checked, above, at_least, below, require
from potluck.twin.availability import ALWAYS, Availability, daily, traces

MIB = 2**20
_Speed = Annotated[float, above(0)]
_Some = Annotated[float, at_least(0)]


@dataclass(frozen=True)
class TwinDevice(Checked):
    """What the devices of some clients can do.

    Attributes:
        clients: whose: a number, a span of numbers such as "0-49", several of them separated by commas, or "*" for all
            whose device no other entry says.
        gflops: sustained speed in training, in thousand million floating-point operations a second.
        down_mbit: bandwidth for what it receives, in Mbit/s; None takes no time.
        up_mbit: likewise for what it sends.
        latency_s: what each exchange takes besides, both ways together.
        watts: what it draws while it is at work, more than when it is not.
        available: "always"; hours of every day, such as "22-6" or "0-6.5, 20-24"; or a CSV file of spans, with the
            columns client, from_s and to_s, the whole of which is repeated.
        name: what it is called in tables.
        memory_mib: for tensors; work that takes more fails when it begins. None has room for any.
        gflops_later: as `gflops`, in a round's second exchange and those after it, for methods whose clients compute
            something else there than they train; None for the same.
    """

    clients: str = "*"
    gflops: _Speed = 10.0
    down_mbit: _Speed | None = None
    up_mbit: _Speed | None = None
    latency_s: _Some = 0.0
    watts: _Some = 0.0
    available: str = "always"
    name: str = ""
    memory_mib: _Speed | None = None
    gflops_later: _Speed | None = None

    def __post_init__(self) -> None:
        known = self.clients == "*" or bool(_numbers(self.clients))
        require(known, "clients", "'*', or numbers such as '3, 5-9'", self.clients)
        if self.available != "always" and not self.available.endswith(".csv"):
            daily(self.available)

    def has_room_for(self, memory: int) -> bool:
        """Whether so many bytes of tensors fit."""
        return self.memory_mib is None or memory <= self.memory_mib * MIB

    def seconds(self, flops: int, bytes_down: int, bytes_up: int, exchange: int = 1) -> tuple[float, float]:
        """What some work in an exchange of a round takes: to compute, and for what is received and sent."""
        sent = ((bytes_down, self.down_mbit), (bytes_up, self.up_mbit))
        carried = sum(count * 8e-6 / speed for count, speed in sent if speed is not None)
        gflops = self.gflops if exchange == 1 else self.gflops_later or self.gflops
        return flops / (gflops * 1e9), self.latency_s + carried


@dataclass(frozen=True)
class Twin(Checked):
    """A virtual clock beside the run: who is late, away or at work by it does not count.

    Attributes:
        devices: the clients' devices: a list of tables, or a CSV file whose columns are their keys.
        starts_at: the hour of the day at which the first round begins.
        server_gflops: the server's sustained speed; None has it compute in no time.
    """

    devices: tuple[TwinDevice, ...] = ()
    starts_at: Annotated[float, at_least(0), below(24)] = 0.0
    server_gflops: _Speed | None = None


class Fleet:
    """Every client's device.

    Args:
        devices: each client has the first one that names it, or else the one for all others.
        clients: the clients' numbers.
        base: the folder that names of traces are relative to.

    Raises:
        ConfigError: a client has no device, or a trace cannot be read or lacks a client.
    """

    def __init__(self, devices: Sequence[TwinDevice], clients: Sequence[ClientId], base: Path = Path()) -> None:
        self._base = base
        named = {client: device for device in reversed(devices) for client in _numbers(device.clients)}
        others = next((device for device in devices if device.clients == "*"), None)
        self._devices: dict[ClientId, TwinDevice] = {}
        for client in clients:
            device = named.get(client, others)
            if device is None:
                raise ConfigError(
                    f"run.twin.devices: client {client} has none; expected one whose clients are '*', for all others"
                )
            self._devices[client] = device

    def __getitem__(self, client: ClientId) -> TwinDevice:
        return self._devices[client]

    def availability(self, client: ClientId) -> Availability:
        """When a client's device is there."""
        return self._available[client]

    @cached_property
    def _available(self) -> Mapping[ClientId, Availability]:
        by_text: dict[str, Availability | dict[int, Availability]] = {"always": ALWAYS}
        found: dict[ClientId, Availability] = {}
        for client, device in self._devices.items():
            text = device.available
            if text not in by_text:
                by_text[text] = traces(self._base / text) if text.endswith(".csv") else daily(text)
            known = by_text[text]
            if isinstance(known, Mapping) and client not in known:
                raise ConfigError(f"{self._base / text}: found no span of client {client}; expected one of each client")
            found[client] = known[client] if isinstance(known, Mapping) else known
        return found


def read_devices(path: Path) -> list[dict[str, Any]]:
    """The devices in a CSV file, whose columns are keys of `TwinDevice`; what is left empty has its default.

    A column `device` may name a class of devices. A trace is looked for beside the file.

    Raises:
        ConfigError: it cannot be read, or has other columns.
    """
    keys = ["device", *(spec.name for spec in fields(TwinDevice))]
    texts = ("clients", "device", "available", "name")
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}; expected a CSV file of devices") from error
    found: list[dict[str, Any]] = []
    for number, row in enumerate(rows, start=2):
        if strange := [str(key) for key in row if key not in keys]:
            raise ConfigError(f"{path}: found the column {strange[0]!r}; expected some of {', '.join(keys)}")
        try:
            found.append({k: v if k in texts else float(v) for k, v in row.items() if v})
            if (trace := found[-1].get("available", "")).endswith(".csv"):
                found[-1]["available"] = str(path.parent / trace)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}; expected a number") from error
    if not found:
        raise ConfigError(f"{path}: found no device; expected a line for each, below the names of the columns")
    return found


def _numbers(text: str) -> list[int]:
    """The numbers in a text such as "3, 5-9"; none if it is no such text."""
    found: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if span is None:
            return []
        found += range(int(span[1]), int(span[2] or span[1]) + 1)
    return found
