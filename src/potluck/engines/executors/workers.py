"""Clients on all cores: one process a core, one thread each, forked from this one.

A worker inherits method, federation and data as they are in memory, so nothing of them is sent or copied; calls and
answers are bytes and go through pipes. What a client computes does not depend on which worker it is given to, so the
results are those of the sequential executor to the last bit.
"""

import os
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler

import torch

from potluck.core.roles import Failure
from potluck.engines.executors import Executor, Task
from potluck.engines.host import Call, ClientHost, Job, Outcome


class WorkerLost(RuntimeError):
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
    """One process, this end of its pipe, and the place of the task that it works on."""

    process: BaseProcess
    pipe: Connection
    place: int | None = None

    @property
    def epitaph(self) -> str:
        """How the process ended."""
        self.process.join()
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"its worker process {how}" + ("; is there enough memory?" if code == -signal.SIGKILL else "")


class Workers(Executor):
    """Forked processes that take the longest task first.

    Args:
        count: of processes.
    """

    def __init__(self, count: int) -> None:
        self._count = count
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
        left = sorted(range(len(tasks)), key=lambda place: (-tasks[place].cost(), place), reverse=True)
        jobs: dict[int, Job] = {}
        done: dict[int, Outcome] = {}
        try:
            for place in range(len(tasks)):
                while place not in done:
                    self._hand_out(left, tasks, jobs)
                    self._collect(jobs, done)
                yield done.pop(place)
        finally:
            if jobs:  # the caller gave up
                self.close()

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
        self._workers = []

    def _hand_out(self, left: list[int], tasks: Sequence[Task], jobs: dict[int, Job]) -> None:
        """Give every idle worker the longest task that is left."""
        for worker in self._workers:
            if worker.place is None and left:
                worker.place = left.pop()
                jobs[worker.place] = tasks[worker.place].make()
                worker.pipe.send(jobs[worker.place])

    def _collect(self, jobs: dict[int, Job], done: dict[int, Outcome]) -> None:
        """Wait for at least one worker, and take what they have."""
        busy = {worker.pipe: worker for worker in self._workers if worker.place is not None}
        for pipe in wait(list(busy)):
            worker = busy[pipe]  # pyright: ignore[reportArgumentType]
            place = worker.place
            assert place is not None
            worker.place = None
            job = jobs.pop(place)
            try:
                outcome = worker.pipe.recv()
            except (EOFError, ConnectionError):
                outcome = self._mourned(worker, job)
            if isinstance(outcome, BaseException):
                raise outcome
            done[place] = outcome

    def _mourned(self, worker: _Worker, job: Job) -> Outcome:
        """Another worker in a dead one's place; the failure of its client."""
        assert self._host is not None
        worker.pipe.close()
        epitaph = worker.epitaph
        self._workers[self._workers.index(worker)] = self._fork(self._host)
        if isinstance(job, Call):
            return Failure(job.client, self._host.full_name(job.handler), epitaph)
        raise WorkerLost(f"judging client {job.client}: {epitaph}")

    def _fork(self, host: ClientHost) -> _Worker:
        context = get_context("fork")
        here, there = context.Pipe()
        ours = [here, *(worker.pipe for worker in self._workers)]
        process = context.Process(target=_work, args=(host, there, ours), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of forking beside other threads. Those who choose workers have asked `why_not`;
            # a worker that replaces a dead one starts beside the progress bar's thread, which holds no lock of ours.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        there.close()
        return _Worker(process, here)


def import_optimizers() -> None:
    """Have torch load what its first optimiser step loads, a second's work, once for all workers."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight], fused=True).step()


def _work(host: ClientHost, pipe: Connection, others: list[Connection]) -> None:
    """A worker's life: carry out jobs until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the keyboard speaks to the process that forked us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()  # or we would keep their pipes open when that process is gone
    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            outcome = host.carry_out(job)
        except Exception as error:
            outcome = _sendable(error)
        pipe.send(outcome)


def _sendable(error: Exception) -> Exception:
    """The error with its traceback as a note; in words, if it is of a kind that cannot be sent."""
    error.add_note(f"In a worker process:\n{traceback.format_exc()}")
    try:
        sent = ForkingPickler.dumps(error)
        ForkingPickler.loads(sent)  # some leave and do not arrive # pyright: ignore[reportAttributeAccessIssue]
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
