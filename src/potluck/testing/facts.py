"""What a method is like to run: what its class and its documentation say, and what the engine sees."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.core.ground.tree import unpack
from potluck.core.method import Method, runs_on_client
from potluck.engine.executors.stacked import Stacked
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.needs import needs_of
from potluck.testing.limits import limits_of
from potluck.testing.wire import documented
from potluck.testing.worlds import World, quick, run_rounds, toy_federation

_STORED = {"model": "model", "modules": "modules", "moments": "optimiser"}


@dataclass(frozen=True)
class Facts:
    """A method at a glance.

    Attributes:
        needs: of a federation, with default hyper-parameters.
        exchanges: handlers that the server asks in a round, by name.
        down: formula of each entry that a client is sent in a round.
        up: formula of each entry that it answers.
        any_network: whether clients on other machines may have networks unknown to the server.
        any_model: whether they may have models that are no networks.
        limits: how many limits and fixed points the documentation states, which the suite carries out.
    """

    needs: tuple[str, ...]
    exchanges: tuple[str, ...]
    down: dict[str, str]
    up: dict[str, str]
    any_network: bool
    any_model: bool
    limits: int

    def lines(self) -> Iterator[tuple[str, str]]:
        """Each fact's name and text."""
        yield "needs", "; ".join(self.needs) or "nothing"
        yield "exchanges", f"{len(self.exchanges)} a round: {', '.join(self.exchanges)}"
        for way, entries in (("down", self.down), ("up", self.up)):
            yield way, ", ".join(f"{name} {formula}" for name, formula in entries.items()) or "nothing"
        any_network = "with any network" if self.any_network else "with networks of the experiment"
        yield "nodes", "with any model, a network or not" if self.any_model else any_network
        yield "verified", f"{self.limits} stated limits"


def facts_of(method: type[Method[Any]]) -> Facts:
    """A method's facts, from its class and its documentation; nothing is run.

    Raises:
        AssertionError: the Wire section cannot be read.
        ConfigError: a limit cannot be read.
    """
    wire = documented(method)[0]
    return Facts(
        needs=tuple(sorted(map(str, needs_of(method())))),
        exchanges=handlers(method),
        down=wire.down,
        up=wire.up,
        any_network=not method.builds_clients_models,
        any_model=not method.needs_networks,
        limits=len(limits_of(method)),
    )


def handlers(method: type[Method[Any]]) -> tuple[str, ...]:
    """Names of a method's handlers in the order in which they are written, those of its bases first."""
    names = dict.fromkeys(name for cls in reversed(method.__mro__) for name in vars(cls))
    marked = (name for name in names if runs_on_client(inspect.getattr_static(method, name)))
    return tuple(name for name in marked if name != "inference_model")


@dataclass(frozen=True)
class Behaviour:
    """What the engine sees of a method with its default hyper-parameters.

    Attributes:
        keeps: what clients store between rounds: `model`, names of entries of their state.
        stacks: whether clients of one architecture train as one computation under `run.executor = "stacked"`.
    """

    keeps: str
    stacks: bool


def behaviour_of(method: type[Method[Any]]) -> Behaviour:
    """Run two rounds of a method on toy federations, and see."""
    engine = Engine(quick(method), toy_federation(World(batchnorm=True).fit_for(quick(method))))
    run_rounds(engine, 2)
    kept = {name for id in engine.federation.sites for name in _kept(engine.store.read(id))}
    stacked = Stacked()
    world = World(batchnorm=True, capacity=1.0, architectures=1)
    run_rounds(Engine(quick(method), toy_federation(world.fit_for(quick(method))), executor=stacked), 2)
    return Behaviour(keeps=", ".join(sorted(kept)) or "nothing", stacks=not stacked.refused)


def _kept(record: bytes | None) -> Sequence[str]:
    """What a client's record holds, by name."""
    kept = unpack(record) if record else {}
    return [*kept.get("state", {}), *(word for part, word in _STORED.items() if kept.get(part))]
