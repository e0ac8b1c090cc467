"""Clients on the machines of one's own Ray cluster: actors that hold data and live modules (extra `ray`).

For simulations that outgrow one machine. Calls and answers are the same bytes as elsewhere, so results are those of the
sequential executor to the last bit. A machine that is lost is no client's failure: its clients are taken elsewhere.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from potluck.core.errors import ConfigError
from potluck.engine.client.runtime import ClientRuntime, Job, Outcome
from potluck.engine.executors import Executor, Inner, Task
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.work import Bundle, Work
from potluck.engine.numerics.allocator import keep_freed_memory

_TRIES = 3
"""How often a bundle is taken up: machines may be lost."""


class RayActors(Executor):
    """Actors on Ray's cluster at `RAY_ADDRESS`, or on one of this machine's own, that take the longest work first.

    Attributes:
        present: actors that have taken up their host.
        coming: those that have not, by the reference that says when; where a machine was lost, perhaps never.

    Args:
        count: of actors; None for one a core of the cluster.
        inner: what each of them carries its jobs out with.

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
        """Bring method, federation and data to the actors, unless they are there already."""
        if self._host is host and (self.present or self.coming):
            return
        self.close()
        ray = self._connected()
        _take_along_files()
        self._host, self._shared = host, ray.put((host, self._inner))
        count = self._count or max(1, int(ray.cluster_resources().get("CPU", 1)))
        for _ in range(count):
            self.call_one()

    def run(self, host: ClientRuntime, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks, whatever the order in which they are done.

        Raises:
            Exception: whatever a job raised.
        """
        self.start(host)
        flight = _Flight(self, Work(host, tasks, self._inner.at_once, _TRIES))
        for place in range(len(tasks)):
            yield flight.outcome(place)

    def close(self) -> None:
        """End the actors, and a cluster that was begun here."""
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
        """Ask for an actor, wherever there is room; it may take until a machine comes back."""
        actor = _ray().remote(num_cpus=1)(_Actor).remote(self._shared)
        self.coming[actor.ready.remote()] = actor

    def receive(self, reference: Any) -> None:
        """Take in an actor that was coming; another one is asked for if its machine was lost meanwhile."""
        actor = self.coming.pop(reference)
        try:
            _ray().get(reference)
        except _ray().exceptions.RayActorError:
            self.call_one()
        else:
            self.present.append(actor)

    def lose(self, actor: Any) -> None:
        """Another actor is asked for in this one's place; those who are left go on meanwhile."""
        self.present.remove(actor)
        self.call_one()

    def _connected(self) -> Any:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # it warns of what will be its default
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
        """Nothing to say; that is the point."""

    def execute(self, jobs: list[Job]) -> list[Outcome]:
        """One outcome a job."""
        return self._inner.together(self._host, jobs)


class _Flight:
    """The work of one exchange, and who has which of its bundles."""

    def __init__(self, pool: RayActors, work: Work) -> None:
        self._pool = pool
        self._work = work
        self._busy: dict[Any, tuple[Any, Bundle]] = {}

    def outcome(self, place: int) -> Outcome:
        """Of one task, when it is there."""
        while place not in self._work.done:
            self._hand_out()
            (reference, *_), _ = _ray().wait([*self._busy, *self._pool.coming], num_returns=1)
            if reference in self._busy:
                self._take(reference)
            else:
                self._pool.receive(reference)
        return self._work.done.pop(place)

    def _hand_out(self) -> None:
        """Give every idle actor the longest bundle that is left."""
        busy = [actor for actor, _ in self._busy.values()]
        for actor in self._pool.present:
            if actor not in busy and (bundle := self._work.take()):
                self._busy[actor.execute.remote(bundle.jobs)] = actor, bundle

    def _take(self, reference: Any) -> None:
        """Note what an actor has; ask for another in its place if it was lost."""
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
    """The module, which takes a second to import."""
    import ray

    return ray


def _take_along_files() -> None:
    """Have methods and models from single files travel as they are: other machines cannot import them."""
    from ray import cloudpickle

    for name, module in list(sys.modules.items()):
        if name.startswith("potluck_file_"):
            cloudpickle.register_pickle_by_value(module)
