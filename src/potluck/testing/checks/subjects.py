"""A method in a toy world, run for a check."""

from collections.abc import Sequence
from typing import Any

from potluck.core.method import Method
from potluck.engine.rounds.engine import Engine
from potluck.testing.worlds import World, packed_state, quick, run_rounds, toy_federation

Subject = type[Method[Any]]
Overrides = Sequence[str]


def engine_for(
    method: Subject,
    overrides: Overrides = (),
    seed: int = 0,
    world: World = World(batchnorm=True),
    **options: Any,
) -> Engine:
    """An engine for a method that trains a moment only, in a world that fits it."""
    subject = quick(method, overrides)
    return Engine(subject, toy_federation(world.fit_for(subject)), seed=seed, **options)


def ran(method: Subject, overrides: Overrides = (), seed: int = 0) -> tuple[Engine, Any]:
    """An engine and the state after two rounds with everyone."""
    engine = engine_for(method, overrides, seed)
    return engine, run_rounds(engine, 2)


def all_bytes(ran: tuple[Engine, Any]) -> bytes:
    """The method's state and all clients' states."""
    engine, state = ran
    return packed_state(state) + b"".join(engine.store.read(id) or b"" for id in sorted(engine.federation.sites))
