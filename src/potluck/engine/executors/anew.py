"""Workers that are started anew instead of forked, for a device: a fork of a process that uses one cannot use it too.

The new process has read nothing of this one's memory, so method, federation and data are sent to it, pickled. They go
to a process that this one started, through a socket that nobody else has.
"""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from types import ModuleType
from typing import Protocol

import cloudpickle

from potluck.core.ground.discovery import FILE_PREFIX
from potluck.core.ground.errors import ConfigError
from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.executors import Inner
from potluck.engine.executors.channel import Channel
from potluck.engine.executors.worker import work
from potluck.engine.frames import receive, send

_BEGIN = "from potluck.engine.executors.anew import main; main()"


class Started:
    """A new Python, with what `multiprocessing` offers of a process; Ctrl-C in the terminal does not reach it."""

    def __init__(self, there: socket.socket) -> None:
        number = there.fileno()
        path = os.pathsep.join(place for place in sys.path if isinstance(place, str))
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", _BEGIN, str(number)],
            pass_fds=[number],
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,
        )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._popen.pid

    @property
    def exitcode(self) -> int | None:
        """How it ended, minus the signal's number for a signal; None while it runs."""
        return self._popen.poll()

    def kill(self) -> None:
        """End it at once."""
        self._popen.kill()

    def join(self) -> None:
        """Wait until it has ended."""
        self._popen.wait()


def pickled(host: ClientRuntime, inner: Inner) -> bytes:
    """What a new process needs.

    Raises:
        ConfigError: something of it cannot be sent to another process.
    """
    take_along_files(cloudpickle)
    try:
        return cloudpickle.dumps((host, inner))
    except Exception as error:
        raise ConfigError(
            "run.executor: found 'workers', which are started anew beside an accelerator, and the method or the"
            f" federation cannot be sent to another process: {type(error).__name__}: {error}; expected 'sequential'"
        ) from error


def begun(package: bytes, count: int) -> list[tuple[Started, Channel]]:
    """New processes that know the host, and this side's ends of their channels."""
    pairs = [socket.socketpair() for _ in range(count)]
    processes = [Started(there) for _, there in pairs]
    for here, there in pairs:
        there.close()
        with suppress(ConnectionError):  # it died at once, which is noticed when it has work
            send(here, package)
    return [(process, Channel(here)) for process, (here, _) in zip(processes, pairs, strict=True)]


class _Pickler(Protocol):
    """What `cloudpickle` offers, and Ray's copy of it."""

    def register_pickle_by_value(self, module: ModuleType) -> None:
        """Have what is in the module sent as it is, not by its name."""


def take_along_files(pickler: _Pickler) -> None:
    """Have methods and models from single files pickled by value, since another process cannot import them."""
    for name, module in list(sys.modules.items()):
        if name.startswith(FILE_PREFIX):
            pickler.register_pickle_by_value(module)


def main() -> None:
    """In the new process: learn the host, and carry out bundles."""
    end = socket.socket(fileno=int(sys.argv[1]))
    host, inner = cloudpickle.loads(receive(end))
    host.computing.make_ready()
    work(host, inner, Channel(end))
