"""Devices that are slow on purpose: a share of a core, by Linux's own quota, and a link that takes its time."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PERIOD = 20_000  # microseconds
_GROUPS = Path("/sys/fs/cgroup")
_PIECE = 16 * 1024  # bytes that a link carries at once


@dataclass(frozen=True)
class Device:
    """What a node has.

    Attributes:
        cores: of a core, the share that all of its processes have together.
        down_mbit: bandwidth of what it receives, in Mbit/s.
        up_mbit: likewise of what it sends.
        latency_s: how long each byte is on its way.
    """

    name: str
    cores: float
    down_mbit: float
    up_mbit: float
    latency_s: float


class Quota:
    """A group of processes that have a share of a core together, for as long as the block lasts.

    Args:
        device: whose processes they are.

    Raises:
        SystemExit: this system lets nobody make such groups, or not this user.
    """

    def __init__(self, device: Device) -> None:
        first = (_GROUPS / "cpu" / "cpu.shares").exists()
        self._place = (_GROUPS / "cpu" if first else _GROUPS) / f"twin-nodes-{device.name}"
        limit = round(device.cores * _PERIOD)
        try:
            self._place.mkdir(exist_ok=True)
            if first:
                (self._place / "cpu.cfs_period_us").write_text(str(_PERIOD))
                (self._place / "cpu.cfs_quota_us").write_text(str(limit))
            else:
                (self._place / "cpu.max").write_text(f"{limit} {_PERIOD}")
        except OSError as error:
            raise SystemExit(
                f"{self._place}: {error.strerror}; expected Linux's control groups, version 1 or 2, with the controller"
                " cpu, and the right to make one: run this as root"
            ) from error

    def __enter__(self) -> "Quota":
        return self

    def __exit__(self, *raised: object) -> None:
        for _ in range(100):  # processes that were ended take a moment
            try:
                self._place.rmdir()
                return
            except OSError:
                time.sleep(0.1)

    def words(self, command: Sequence[str]) -> list[str]:
        """A command that carries out another one in the group."""
        return ["sh", "-c", f'echo $$ > {self._place}/cgroup.procs && exec "$@"', "sh", *command]

    @property
    def pids(self) -> list[int]:
        """The processes that are in the group now."""
        return [int(line) for line in (self._place / "cgroup.procs").read_text().split()]


class _Way:
    """One direction of a link: what is sent waits until the link has carried what was sent before."""

    def __init__(self, mbit: float, latency_s: float) -> None:
        self._seconds, self._latency = 8e-6 / mbit, latency_s
        self._free = 0.0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes, each piece when it has arrived at the other end."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        arriving = asyncio.create_task(_arrive(on_the_way, writer))
        try:
            while piece := await reader.read(_PIECE):
                self._free = max(time.monotonic(), self._free) + len(piece) * self._seconds
                on_the_way.put_nowait((self._free + self._latency, piece))
                await asyncio.sleep(self._free - time.monotonic())
        except ConnectionError:
            pass
        on_the_way.put_nowait((0.0, b""))
        await arriving


async def _arrive(on_the_way: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            moment, piece = await on_the_way.get()
            if not piece:
                break
            await asyncio.sleep(moment - time.monotonic())
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    writer.close()


async def _link(device: Device, port: int, server: int) -> None:
    down, up = (_Way(mbit, device.latency_s) for mbit in (device.down_mbit, device.up_mbit))

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_connection("127.0.0.1", server)
        await asyncio.gather(up.carry(reader, here), down.carry(there, writer))

    listening = await asyncio.start_server(connected, "127.0.0.1", port)
    async with listening:
        await listening.serve_forever()


def link(device: Device, port: int, server: int) -> "subprocess.Popen[bytes]":
    """Start a link from a port of this machine to that of the server, in a process of its own."""
    numbers = [str(value) for value in (device.down_mbit, device.up_mbit, device.latency_s, port, server)]
    return subprocess.Popen([sys.executable, __file__, *numbers])


if __name__ == "__main__":
    _down, _up, _latency = map(float, sys.argv[1:4])
    asyncio.run(_link(Device("", 1.0, _down, _up, _latency), int(sys.argv[4]), int(sys.argv[5])))
