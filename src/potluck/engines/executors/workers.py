"""Clients on all cores: one process a core, one thread each, forked from this one.

A worker inherits method, federation and data as they are in memory, so nothing of them is sent or copied; calls and
answers are bytes and go through sockets. What a client computes does not depend on which worker it is given to, so the
results are those of the sequential executor to the last bit.
"""

import os
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler

import torch

from potluck.core.errors import PotluckError
from potluck.core.roles import Failure
from potluck.engines.allocator import keep_freed_memory
from potluck.engines.executors import Executor, Task, longest_last, ready
from potluck.engines.executors.channel import Channel
from potluck.engines.executors.sequential import Sequential
from potluck.engines.host import ClientHost, Job, Outcome, Question


class WorkerLost(PotluckError, RuntimeError):
    """A worker process ended in the middle of a job that is no client's call."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_fork() -> bool:
    """Whether this system copies a process with all its memory."""
    return "fork" in get_all_start_methods()


def why_not() -> str | None:
    """Why workers cannot be forked here, or would gain nothing; None if they can and would."""
    if cores() == 1:
        return "there is one core"
    if not can_fork():
        return "this system cannot fork"
    if threading.active_count() > 1:
        return "other threads run in this process, whose locks a fork would copy"
    return None


@dataclass
class _Worker:
    """One process, this end of its channel, and what it works on: places of tasks, and their jobs."""

    process: BaseProcess
    channel: Channel
    bundle: dict[int, Job] = field(default_factory=dict[int, Job])

    @property
    def epitaph(self) -> str:
        """How the process ended."""
        self.process.join()
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"its worker process {how}" + ("; is there enough memory?" if code == -signal.SIGKILL else "")


class Workers(Executor):
    """Forked processes that take the longest work first.

    Args:
        count: of processes.
        inner: what each of them carries its jobs out with. It gets as many at a time as it can use, of one kind.
    """

    def __init__(self, count: int, inner: Executor | None = None) -> None:
        self._count = count
        self._inner = Sequential() if inner is None else inner
        self._host: ClientHost | None = None
        self._workers: list[_Worker] = []

    def start(self, host: ClientHost) -> None:
        """Fork, unless workers of this host are there already."""
        if self._host is host and self._workers:
            return
        self.close()
        self._host = host
        import_optimizers()
        self._workers = [self._fork(host) for _ in range(self._count)]

    def run(self, host: ClientHost, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks, whatever the order in which they are done.

        Raises:
            WorkerLost: a worker died over a question.
            Exception: whatever a job raised.
        """
        self.start(host)
        left = longest_last(tasks, self._inner.at_once)
        done: dict[int, Outcome] = {}
        try:
            for place in range(len(tasks)):
                while place not in done:
                    self._hand_out(left, tasks)
                    for worker in self._ready():
                        done |= self._outcomes(worker, left)
                yield done.pop(place)
        finally:
            if any(worker.bundle for worker in self._workers):  # the caller gave up
                self.close()

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.channel.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
        self._workers = []

    def _hand_out(self, left: list[list[int]], tasks: Sequence[Task]) -> None:
        """Give every idle worker the longest bundle that is left."""
        for worker in list(self._workers):
            if worker.bundle or not left:
                continue
            worker.bundle = {place: tasks[place].make() for place in left.pop()}
            with suppress(ConnectionError):  # it died while it was idle; whoever listens to it will notice
                worker.channel.send(list(worker.bundle.values()))

    def _ready(self) -> list[_Worker]:
        """Wait until at least one busy worker has something to say, or has died."""
        busy = {worker.channel.fileno(): worker for worker in self._workers if worker.bundle}
        return [busy[number] for number in wait(list(busy)) if isinstance(number, int)]

    def _outcomes(self, worker: _Worker, left: list[list[int]]) -> dict[int, Outcome]:
        """What a worker has, by place of the task. What a dead one had is left again, each task by itself."""
        bundle = worker.bundle
        try:
            found = worker.channel.receive()
        except (EOFError, ConnectionError):
            epitaph = self._replaced(worker)
            if len(bundle) > 1:
                left.extend([place] for place in bundle)
                return {}
            ((place, job),) = bundle.items()
            return {place: self._lost(job, epitaph)}
        worker.bundle = {}
        if isinstance(found[0], Exception):
            raise found[0]
        return dict(zip(bundle, found, strict=True))

    def _lost(self, job: Job, epitaph: str) -> Failure:
        if isinstance(job, Question) or self._host is None:
            raise WorkerLost(f"judging client {job.client}: {epitaph}")
        return Failure(job.client, self._host.full_name(job.handler), epitaph)

    def _replaced(self, worker: _Worker) -> str:
        """Put another worker in a dead one's place; how it ended."""
        assert self._host is not None
        worker.channel.close()
        self._workers[self._workers.index(worker)] = self._fork(self._host)
        return worker.epitaph

    def _fork(self, host: ClientHost) -> _Worker:
        context = get_context("fork")
        here, there = Channel.pair()
        ours = [here, *(worker.channel for worker in self._workers)]
        process = context.Process(target=_work, args=(host, self._inner, there, ours), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of forking beside other threads. "auto" has asked `why_not`, and who names workers
            # takes the risk; a dead one's successor starts beside the progress bar's thread, which has no lock of ours.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        there.close()
        return _Worker(process, here)


def import_optimizers() -> None:
    """Have torch load what its first optimiser step loads, a second's work, once for all workers."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight], fused=True).step()


def _work(host: ClientHost, inner: Executor, parent: Channel, others: list[Channel]) -> None:
    """A worker's life: carry out jobs until the parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the keyboard speaks to the process that forked us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()  # or we would keep their channels open when that process is gone
    torch.set_num_threads(1)
    keep_freed_memory()
    while True:
        try:
            tasks = [ready(job) for job in parent.receive()]
        except (EOFError, ConnectionError):
            return
        try:
            found = list(inner.run(host, tasks))
        except Exception as error:
            found = [_sendable(error)]
        parent.send(found)


def _sendable(error: Exception) -> Exception:
    """The error with its traceback as a note; in words, if it is of a kind that cannot be sent."""
    error.add_note(f"In a worker process:\n{traceback.format_exc()}")
    try:
        sent = ForkingPickler.dumps(error)
        ForkingPickler.loads(sent)  # some leave and do not arrive # pyright: ignore[reportAttributeAccessIssue]
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
