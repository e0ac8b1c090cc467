"""Clients on all cores: one process a core, one thread each, forked from this one; beside an accelerator, started anew.

A forked worker inherits method, federation and data in memory, so none of them is sent or copied; calls and answers are
bytes and go through sockets. What a client computes does not depend on which worker runs it, on how many there are, or
on whether one is killed, so results equal those of the inner executor in this process to the last bit.
"""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import wait
from typing import Protocol

import torch

from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.executors import Executor, Inner, Pending
from potluck.engine.executors.anew import begun, pickled
from potluck.engine.executors.channel import Channel
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.work import Bundle, Work
from potluck.engine.executors.worker import work

log = logging.getLogger(__name__)

_TRIES = 2
"""How many times a bundle is tried, since a process may be killed from outside once."""

_LOOK_EVERY = 5.0
"""Seconds of silence from all workers after which a stopped one is named."""


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_fork() -> bool:
    """Whether this system can fork."""
    return "fork" in get_all_start_methods()


def why_not() -> str | None:
    """Why workers cannot be forked here, or would gain nothing; None if neither holds."""
    if cores() == 1:
        return "there is one core"
    if not can_fork():
        return "this system cannot fork"
    if torch.accelerator.is_available():
        return "torch has an accelerator, and a fork cannot train after a process that trained"
    if threading.active_count() > 1:
        return "other threads run in this process, whose locks a fork would copy"
    return None


class Process(Protocol):
    """A process that this one began, as `multiprocessing` shows it."""

    @property
    def pid(self) -> int | None:
        """Its number."""
        ...

    @property
    def exitcode(self) -> int | None:
        """How it ended, minus the signal's number for a signal; None while it runs."""
        ...

    def kill(self) -> None:
        """End it at once."""

    def join(self) -> None:
        """Wait until it has ended."""


@dataclass
class _Worker:
    """One process, this end of its channel, and its current bundle."""

    process: Process
    channel: Channel
    bundle: Bundle | None = None
    stopped: bool = False

    @property
    def exit_reason(self) -> str:
        """How the process ended, as text."""
        self.process.join()
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"its worker process {how}" + ("; is there enough memory?" if code == -signal.SIGKILL else "")

    def look(self) -> None:
        """Warn once if the process was stopped."""
        before, self.stopped = self.stopped, _is_stopped(self.process.pid)
        if self.stopped and not before and self.bundle:
            pid = self.process.pid
            log.warning(
                "worker process %s, at work for %s, was stopped, and the round waits for it: `kill -CONT %s`"
                " resumes it, `kill -KILL %s` gives its work to another",
                *(pid, self.bundle.clients, pid, pid),
            )


def _is_stopped(pid: int | None) -> bool:
    """Whether a child of this process is stopped; False if the system cannot tell."""
    if pid is None or not hasattr(os, "waitid"):
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


class Workers(Executor):
    """Processes that take the longest work first.

    Attributes:
        anew: whether they are started anew.

    Args:
        count: the number of processes.
        inner: the executor inside each process, which carries out bundle after bundle.
        anew: whether to start them anew, with what they need sent to them, instead of forking this process.
    """

    def __init__(self, count: int, inner: Inner | None = None, anew: bool = False) -> None:
        self._count = count
        self.anew = anew
        self._package = b""
        self._inner = Sequential() if inner is None else inner
        self._host: ClientRuntime | None = None
        self._workers: list[_Worker] = []

    def start(self, host: ClientRuntime) -> None:
        """Begin workers, unless this host's are running already.

        Raises:
            ConfigError: they are started anew, and the host cannot be sent to them.
        """
        if self._host is host and self._workers:
            return
        self.close()
        self._host = host
        if self.anew:
            self._package = pickled(host, self._inner)
            self._workers = self._started(self._count)
            return
        import_optimizers()
        for _ in range(self._count):
            self._workers.append(self._fork(host))  # each has to close the channels of those before it

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks, whatever the order in which they are done.

        Killing a process loses nothing: its bundle is carried out again. A job that kills one process after another is
        a failure.

        Raises:
            Exception: whatever a job raised.
        """
        self.start(host)
        work = Work(host, tasks, self._inner.at_once, _TRIES)
        try:
            for place in range(len(tasks)):
                while place not in work.done:
                    self._hand_out(work)
                    for worker in self._ready():
                        self._take_back(worker, work)
                yield work.done.pop(place)
        finally:
            if any(worker.bundle for worker in self._workers):  # the caller gave up
                self.close()

    def close(self) -> None:
        """End the processes, stopped ones included."""
        for worker in self._workers:
            worker.channel.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        self._workers = []

    def _hand_out(self, work: Work) -> None:
        """Give every idle worker the longest remaining bundle."""
        for worker in self._workers:
            if worker.bundle is None and (bundle := work.take()):
                worker.bundle = bundle
                with suppress(ConnectionError):  # it died while idle, which is noticed when its channel is read
                    worker.channel.send(bundle.jobs, worker.look)

    def _ready(self) -> list[_Worker]:
        """Wait until at least one busy worker has sent something or has died."""
        busy = {worker.channel.fileno(): worker for worker in self._workers if worker.bundle}
        found = wait(list(busy), _LOOK_EVERY)
        if not found:
            for worker in busy.values():
                worker.look()
        return [busy[number] for number in found if isinstance(number, int)]

    def _take_back(self, worker: _Worker, work: Work) -> None:
        """Store a worker's outcomes; replace the worker if it died."""
        bundle = worker.bundle
        assert bundle is not None
        try:
            found = worker.channel.receive(worker.look)
        except (EOFError, ConnectionError):
            self._replace(worker)
            work.lose(bundle, f"worker process {worker.process.pid}", worker.exit_reason)
            return
        worker.bundle, worker.stopped = None, False
        if isinstance(found[0], Exception):
            raise found[0]
        work.finish(bundle, found)

    def _replace(self, worker: _Worker) -> None:
        """Replace a dead worker."""
        assert self._host is not None
        worker.channel.close()
        (new,) = self._started(1) if self.anew else [self._fork(self._host)]
        self._workers[self._workers.index(worker)] = new

    def _started(self, count: int) -> list[_Worker]:
        found = begun(self._package, count)
        for _, channel in found:
            channel.limit(_LOOK_EVERY)
        return [_Worker(process, channel) for process, channel in found]

    def _fork(self, host: ClientRuntime) -> _Worker:
        context = get_context("fork")
        here, there = Channel.pair()
        ours = [here, *(worker.channel for worker in self._workers)]
        process = context.Process(target=work, args=(host, self._inner, there, ours), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of forking beside other threads. "auto" has checked `why_not`; users who choose
            # "workers" accept the risk. A replacement for a dead worker may be forked while the progress-bar thread
            # runs, which holds none of our locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        there.close()
        here.limit(_LOOK_EVERY)
        return _Worker(process, here)


def import_optimizers() -> None:
    """Load, once for all workers, what torch loads at a first optimiser step, which takes a second."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight], fused=True).step()
