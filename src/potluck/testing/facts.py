"""What a method is like to run: the Facts section of its docstring, and what the engine sees of it.

Lines of the Facts section, each once, for the default hyper-parameters:

    keeps     model, NAME          what a client stores between rounds: its model, entries of its state; or nothing
    stacks    yes                  whether clients train as one computation under `run.executor = "stacked"`; or
    stacks    no: WHY              "no", and why

Both are checked by running the method.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.core.ground.tree import unpack
from potluck.core.method import Method, runs_on_client
from potluck.engine.executors.stacked import Stacked
from potluck.engine.rounds.engine import Engine
from potluck.testing.limits import limits_of, section
from potluck.testing.wire import documented
from potluck.testing.worlds import World, quick, run_rounds, toy_federation

STATED = ("keeps", "stacks")
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
        limits: how many limits and fixed points the documentation states, which the suite carries out.
        stated: the lines of the Facts section by their first word; empty if there is none.
    """

    needs: tuple[str, ...]
    exchanges: tuple[str, ...]
    down: dict[str, str]
    up: dict[str, str]
    any_network: bool
    limits: int
    stated: dict[str, str]

    def lines(self) -> Iterator[tuple[str, str]]:
        """Each fact's name and text."""
        yield "needs", "; ".join(self.needs) or "nothing"
        yield "exchanges", f"{len(self.exchanges)} a round: {', '.join(self.exchanges)}"
        for way, entries in (("down", self.down), ("up", self.up)):
            yield way, ", ".join(f"{name} {formula}" for name, formula in entries.items()) or "nothing"
        for head in ("keeps", "stacks"):
            if head in self.stated:
                yield head, self.stated[head]
        yield "nodes", "with any network" if self.any_network else "with networks of the experiment"
        yield "verified", f"{self.limits} stated limits"


def facts_of(method: type[Method[Any]]) -> Facts:
    """A method's facts, from its class and its documentation; nothing is run.

    Raises:
        AssertionError: the Wire or the Facts section cannot be read.
        ConfigError: a limit cannot be read.
    """
    wire = documented(method)[0]
    return Facts(
        needs=tuple(sorted(map(str, method().needs()))),
        exchanges=handlers(method),
        down=wire.down,
        up=wire.up,
        any_network=not method.builds_clients_models,
        limits=len(limits_of(method)),
        stated=stated(method),
    )


def handlers(method: type[Method[Any]]) -> tuple[str, ...]:
    """Names of a method's handlers in the order in which they are written, those of its bases first."""
    names = dict.fromkeys(name for cls in reversed(method.__mro__) for name in vars(cls))
    marked = (name for name in names if runs_on_client(inspect.getattr_static(method, name)))
    return tuple(name for name in marked if name != "inference_model")


def stated(method: type[Method[Any]]) -> dict[str, str]:
    """The lines of the Facts section by their first word.

    Raises:
        AssertionError: a line is of no known kind, or there twice, or one is missing.
    """
    lines = [line.split(maxsplit=1) for line in section(method, "Facts")]
    heads = [head for head, *_ in lines]
    assert not lines or sorted(heads) == sorted(STATED), f"Facts: found {heads}; expected each of {', '.join(STATED)}"
    return {head: " ".join(rest) for head, *rest in lines}


def keeps_what_it_says(method: type[Method[Any]]) -> None:
    """Clients store between rounds what the Facts section says, and nothing else."""
    said = stated(method)
    if not said:
        return
    engine = Engine(quick(method), toy_federation(World(batchnorm=True).fit_for(quick(method))))
    run_rounds(engine, 2)
    found = {name for id in engine.federation.sites for name in _kept(engine.store.read(id))}
    named = {name.strip() for name in said["keeps"].split(",")} - {"nothing"}
    assert found == named, f"Facts: keeps {said['keeps']}; found {', '.join(sorted(found)) or 'nothing'}"


def stacks_as_it_says(method: type[Method[Any]]) -> None:
    """Clients of one architecture train as one computation, or do not, as the Facts section says."""
    said = stated(method)
    if not said:
        return
    executor = Stacked()
    world = World(batchnorm=True, capacity=1.0, architectures=1)
    run_rounds(Engine(quick(method), toy_federation(world.fit_for(quick(method))), executor=executor), 2)
    expected = said["stacks"].partition(":")[0]
    found = "no" if executor.refused else "yes"
    assert expected == found, f"Facts: stacks {expected}; found {found} {'; '.join(sorted(executor.refused))}"


def _kept(record: bytes | None) -> Sequence[str]:
    """What a client's record holds, by the names that the Facts section uses."""
    kept = unpack(record) if record else {}
    return [*kept.get("state", {}), *(word for part, word in _STORED.items() if kept.get(part))]
