"""Clients' calls with what they take: memory, processor time, and bytes of messages."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from potluck.core.federation import ClientId
from potluck.core.ground.rng import Key, isolated
from potluck.core.message import Message
from potluck.core.nets.weights import weights_of
from potluck.engine.client.runtime import ClientRuntime, Job, Outcome
from potluck.engine.client.session import Answer, Call
from potluck.engine.executors import Executor, Inner, Pending
from potluck.engine.executors.workers import import_optimizers
from potluck.engine.numerics.allocator import free_at_once
from potluck.engine.numerics.footprint import peak, settled


@dataclass(frozen=True)
class Meter:
    """What one call took.

    Attributes:
        memory: bytes that the process held at most, beyond a floor; None where the system does not tell.
        seconds: of the processor.
        down: bytes of the message.
        up: bytes of the reply.
        kept: bytes of the client's state afterwards.
    """

    memory: int | None
    seconds: float
    down: int
    up: int
    kept: int


@dataclass(frozen=True)
class MeteredAnswer(Answer):
    """An answer with what the call took."""

    meter: Meter = Meter(None, 0.0, 0, 0, 0)


def metered(host: ClientRuntime, call: Call, floor: int | None = None) -> Outcome:
    """Carry out a call and meter it.

    Args:
        host: whose client is called.
        call: the call.
        floor: bytes that do not count as the client's; by default all that the process holds before the call, without
            the message and the state that came with it.
    """
    held = settled()
    if held is not None:
        held = held - len(call.payload) - len(call.record or b"") if floor is None else floor
    started = time.process_time()
    outcome = host.execute(call)
    seconds = time.process_time() - started
    if not isinstance(outcome, Answer):
        return outcome
    most = None if held is None else peak() - held
    meter = Meter(most, seconds, len(call.payload), len(outcome.payload), len(outcome.record or b""))
    return MeteredAnswer(**{spec.name: getattr(outcome, spec.name) for spec in fields(Answer)}, meter=meter)


class Metered(Inner):
    """One client after another in the calling process, each metered; evaluations are not.

    Every call has a runtime of its own, so that what was built for other clients is built again for this one.

    Args:
        fresh: makes a runtime.
    """

    def __init__(self, fresh: Callable[[], ClientRuntime]) -> None:
        self._fresh = fresh
        self._process: int | None = None

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks."""
        return (self._one(host, task.make()) for task in tasks)

    def together(self, host: ClientRuntime, jobs: Iterable[Job]) -> list[Outcome]:
        """One outcome a job."""
        return [self._one(host, job) for job in jobs]

    def _one(self, host: ClientRuntime, job: Job) -> Outcome:
        if not isinstance(job, Call):
            return host.execute(job)
        if self._process != os.getpid():  # a fork begins anew
            self._process = os.getpid()
            free_at_once()
            warm()
        return metered(self._fresh(), job)


class Metering(Executor):
    """An executor of metered calls, and whoever is told what each took.

    Args:
        inner: carries them out.
        tell: called with the client and its call's meter.
    """

    def __init__(self, inner: Executor, tell: Callable[[ClientId, Meter], None]) -> None:
        self._inner, self._tell = inner, tell
        self.trusted = inner.trusted

    def start(self, host: ClientRuntime) -> None:
        """Prepare the inner executor."""
        self._inner.start(host)

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks."""
        for outcome in self._inner.run(host, tasks):
            if isinstance(outcome, MeteredAnswer):
                self._tell(outcome.client, outcome.meter)
            yield outcome
            del outcome

    def absent(self, clients: Iterable[ClientId]) -> Mapping[ClientId, str]:
        """Those that the inner executor cannot reach."""
        return self._inner.absent(clients)

    def close(self) -> None:
        """Close the inner executor."""
        self._inner.close()


def warm() -> None:
    """Have torch load, once for all calls, what it loads at a first training step, and see it in memory."""
    import_optimizers()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    with isolated(Key(("warm",))):
        nn.functional.cross_entropy(net(torch.ones(4, 3, 8, 8)), torch.zeros(4, dtype=torch.int64)).backward()
    Message.decode(Message(weights=weights_of(net)).encode())
