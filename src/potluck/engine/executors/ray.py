"""Clients on the machines of your own Ray cluster, in actors that hold data and modules (extra `ray`).

For simulations that outgrow one machine. Calls and answers are the same bytes as elsewhere, so results equal the
sequential executor's to the last bit. Losing a machine is no client's failure: its clients run elsewhere.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from potluck.core.ground.errors import ConfigError
from potluck.engine.client.runtime import ClientRuntime, Job, Outcome
from potluck.engine.executors import Executor, Inner, Pending
from potluck.engine.executors.anew import take_along_files
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.work import Bundle, Work
from potluck.engine.numerics.allocator import keep_freed_memory

_TRIES = 3
"""How many times a bundle is tried, since machines may be lost."""


class RayActors(Executor):
    """Actors on the Ray cluster at `RAY_ADDRESS`, or on a local one, that take the longest work first.

    Attributes:
        present: actors that have received their host.
        coming: actors still starting, by the reference that resolves when they are ready, which after the loss of a
            machine may be never.

    Args:
        count: the number of actors; None for one for each core of the cluster.
        inner: the executor inside each actor.

    Raises:
        ConfigError: Ray is not installed.
    """

    def __init__(self, count: int | None = None, inner: Inner | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("run.executor: found 'ray', but Ray is not installed: pip install 'potluck[ray]'")
        self._count = count
        self._inner = Sequential() if inner is None else inner
        self._host: ClientRuntime | None = None
        self._shared: Any = None
        self._began = False
        self.present: list[Any] = []
        self.coming: dict[Any, Any] = {}

    def start(self, host: ClientRuntime) -> None:
        """Send method, federation and data to the actors, unless they have them already."""
        if self._host is host and (self.present or self.coming):
            return
        self.close()
        ray = self._connected()
        take_along_files(ray.cloudpickle)
        self._host, self._shared = host, ray.put((host, self._inner))
        count = self._count or max(1, int(ray.cluster_resources().get("CPU", 1)))
        for _ in range(count):
            self.call_one()

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks, whatever the order in which they are done.

        Raises:
            Exception: the exception that a job raised.
        """
        self.start(host)
        flight = _Flight(self, Work(host, tasks, self._inner.at_once, _TRIES))
        for place in range(len(tasks)):
            yield flight.outcome(place)

    def close(self) -> None:
        """End the actors, and the cluster if it was started here."""
        actors = [*self.present, *self.coming.values()]
        if not actors:
            return
        ray = _ray()
        for actor in actors:
            ray.kill(actor)
        self.present, self.coming, self._shared = [], {}, None
        if self._began:
            ray.shutdown()
            self._began = False

    def call_one(self) -> None:
        """Request an actor on any machine with room; it may start only when a machine returns."""
        actor = _ray().remote(num_cpus=1)(_Actor).remote(self._shared)
        self.coming[actor.ready.remote()] = actor

    def receive(self, reference: Any) -> None:
        """Add an actor that was starting; request another if its machine was lost meanwhile."""
        actor = self.coming.pop(reference)
        try:
            _ray().get(reference)
        except _ray().exceptions.RayActorError:
            self.call_one()
        else:
            self.present.append(actor)

    def lose(self, actor: Any) -> None:
        """Request another actor to replace this one; the remaining ones continue meanwhile."""
        self.present.remove(actor)
        self.call_one()

    def _connected(self) -> Any:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics are sent
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a warning about a future default
        ray = _ray()
        if not ray.is_initialized():
            ray.init(log_to_driver=False, configure_logging=False, include_dashboard=False)
            self._began = True
        return ray


class _Actor:
    """Holds a host, and carries out jobs with it."""

    def __init__(self, shared: tuple[ClientRuntime, Inner]) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self._host, self._inner = shared

    def ready(self) -> None:
        """Return once the actor is ready.

        Raises:
            ConfigError: this machine cannot compute as the run is to.
        """
        self._host.computing.make_ready()

    def execute(self, jobs: list[Job]) -> list[Outcome]:
        """One outcome a job."""
        return self._inner.together(self._host, jobs)


class _Flight:
    """The work of one exchange, and which actor has which of its bundles."""

    def __init__(self, pool: RayActors, work: Work) -> None:
        self._pool = pool
        self._work = work
        self._busy: dict[Any, tuple[Any, Bundle]] = {}

    def outcome(self, place: int) -> Outcome:
        """The outcome of one task, awaited if need be."""
        while place not in self._work.done:
            self._hand_out()
            (reference, *_), _ = _ray().wait([*self._busy, *self._pool.coming], num_returns=1)
            if reference in self._busy:
                self._take(reference)
            else:
                self._pool.receive(reference)
        return self._work.done.pop(place)

    def _hand_out(self) -> None:
        """Give every idle actor the longest remaining bundle."""
        busy = [actor for actor, _ in self._busy.values()]
        for actor in self._pool.present:
            if actor not in busy and (bundle := self._work.take()):
                self._busy[actor.execute.remote(bundle.jobs)] = actor, bundle

    def _take(self, reference: Any) -> None:
        """Store an actor's outcomes; replace the actor if it was lost."""
        ray = _ray()
        actor, bundle = self._busy.pop(reference)
        try:
            self._work.finish(bundle, ray.get(reference))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            self._pool.lose(actor)
            self._work.lose(bundle, "an actor", f"its actor was lost: {' '.join(str(error).split())}")


def _ray() -> Any:
    """Ray's module, which takes a second to import."""
    import ray

    return ray
