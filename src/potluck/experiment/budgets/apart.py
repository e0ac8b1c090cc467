"""One client in a process of its own, as on a device: with its examples and its model, and with no other's.

That process is forked from one that runs `potluck.experiment.budgets.alone`, which holds what every node holds: Python,
torch and Potluck. The files that the experiment names come next, and what counts from then on is the client's own.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

from potluck.core.federation import ClientId, Federation
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import InputShape, by_name, each
from potluck.core.requests.examples import Examples
from potluck.core.tasks.task import Task
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Call
from potluck.engine.executors import Executor, Pending
from potluck.engine.executors.metered import Meter, MeteredAnswer
from potluck.experiment.settings.schema import Experiment

_PROGRAM = "potluck.experiment.budgets.alone"
_FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "MALLOC_TRIM_THRESHOLD_": str(2**17)}


class KilledError(Exception):
    """The client's process has ended before its call did."""


@dataclass(frozen=True)
class Opening:
    """What a client's process is told before anything counts: the experiment, and what its networks are for."""

    tree: Mapping[str, Any]
    num_classes: int
    input_shape: InputShape
    task: Task


@dataclass(frozen=True)
class Belongings:
    """What a client has of a federation to train with.

    Attributes:
        public: the examples that everybody has.
        capacity: of its model.
        classes: those of its outputs; None if it has all.
    """

    client: ClientId
    train: Examples
    validation: Examples
    public: Examples | None
    capacity: float
    classes: tuple[int, ...] | None

    @classmethod
    def of(cls, federation: Federation, client: ClientId) -> "Belongings":
        """What one of a federation's clients has."""
        site, own = federation.sites[client], federation.classes_of(client)
        public = None if federation.public is None else by_itself(federation.public)
        numbers = None if own is None else tuple(own.numbers)
        return cls(client, by_itself(site.train), by_itself(site.validation), public, site.capacity, numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of all its examples."""
        return sum(stored_bytes(found) for found in (self.train, self.validation, self.public) if found is not None)


class Origin:
    """The process that clients' processes are forked from, one at a time; it starts when first needed.

    Memory that a client frees counts no longer: it is given back at once, other than in runs, where keeping it is
    faster.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None

    def ask(self, said: Any) -> Any:
        """What the current client's process answers, or a new one if the last has ended.

        Raises:
            KilledError: it has ended.
            ConfigError: it refused.
        """
        channel = self._begun()
        try:
            tell(channel, said)
            kind, found = hear(channel)
        except (EOFError, ConnectionError) as error:
            self.close()
            raise KilledError("the process that measures has ended; is there enough memory?") from error
        if kind == "refused":
            raise ConfigError(found)
        if kind == "ended" and said is not None:
            how = f"was killed by {signal.Signals(-found).name}" if found < 0 else f"ended with code {found}"
            raise KilledError(f"its process {how}; is there enough memory?")
        return found

    @contextmanager
    def client(self, experiment: Experiment, federation: Federation, client: ClientId) -> Generator["Apart"]:
        """The executor that has this client in a process of its own, which ends with the block.

        Raises:
            KilledError: the process has ended.
            ConfigError: it could not begin.
        """
        try:
            yield Apart(self, experiment, federation, client)
        except KilledError:
            raise
        except BaseException:
            self.close()
            raise
        self.ask(None)

    def close(self) -> None:
        """End the processes."""
        if self._process is not None and self._channel is not None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
            self._process = self._channel = None

    def _begun(self) -> Connection:
        if self._channel is None:
            here, there = socket.socketpair()
            with there:
                # Ours are found by it too, however this process was started.
                ours = {**_FREED_AT_ONCE, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _PROGRAM, str(there.fileno())],
                    pass_fds=[there.fileno()],
                    env={**os.environ, **ours},
                    stdin=subprocess.DEVNULL,
                )
            self._channel = Connection(here.detach())
        return self._channel


class Apart(Executor):
    """Carries out one client's calls in a process of its own, and all others' in this one.

    Attributes:
        meters: what the client's calls took, in their order.
        floor: bytes of its process before it had anything of the client's; None where the system does not tell.
        gflops: the speed of training that its process has measured.
    """

    def __init__(self, origin: Origin, experiment: Experiment, federation: Federation, client: ClientId) -> None:
        self.meters: list[Meter] = []
        self._origin, self._client = origin, client
        asked = Opening(experiment.tree(), federation.num_classes, federation.input_shape, federation.task)
        self.floor, self.gflops = origin.ask(asked)
        origin.ask(Belongings.of(federation, client))

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks."""
        for task in tasks:
            job = task.make()
            if job.client != self._client or not isinstance(job, Call):
                yield host.execute(job)
                continue
            outcome: Outcome = self._origin.ask(job)
            if isinstance(outcome, MeteredAnswer):
                self.meters.append(outcome.meter)
            yield outcome


class _Whole(ForkingPickler):
    """Writes tensors as their numbers, not as memory that both sides share, as torch has processes do otherwise."""

    _extra_reducers: ClassVar[dict[Any, Any]] = {}


def tell(channel: Connection, said: Any) -> None:
    """Send what the other side, one of our own processes, then has for itself."""
    channel.send_bytes(_Whole.dumps(said))


def hear(channel: Connection) -> Any:
    """Receive what `tell` has sent."""
    return ForkingPickler.loads(channel.recv_bytes())  # pyright: ignore[reportAttributeAccessIssue]


def by_itself(examples: Examples) -> Examples:
    """The examples with tensors of their own, as on a machine that has no others."""
    if examples.rows is None:
        return examples
    rows = examples.rows
    return Examples(each(examples.inputs, lambda tensor: tensor[rows]), examples.labels, examples.preprocess)


def stored_bytes(examples: Examples) -> int:
    """Bytes of these examples alone, as they are stored."""
    tensors = (*by_name(examples.inputs).values(), examples.targets)
    return sum(tensor.nbytes for tensor in tensors) * len(examples) // max(1, len(examples.targets))
