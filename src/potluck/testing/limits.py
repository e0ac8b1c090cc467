"""Carries out the limits and fixed points that a method's docstring states.

Lines of the Limits section, one each; overrides are dotted keys as on the command line:

    [overrides] equals METHOD [overrides] [on WORLD]       evaluated models are the same, bit for bit
    [overrides] approaches METHOD [overrides] [on WORLD]   ... up to rounding
    [overrides] stays at rest [on WORLD]                   evaluated models do not move
    [overrides] reaches the optimum                        of two quadratics, with full and partial participation
    [overrides] misses the optimum                         of two quadratics, with full participation
    [overrides] descends the gradient                      one full-batch step is a step on everyone's data
    [overrides] counts a twin as twice the data            with full batches, a copy of a client is a double weight
    [overrides] averages each layer over its owners        a layer is the mean of what each owner alone would make of it
    [overrides] never repeats                              with private releases, two runs of one seed differ

With `equals` and `approaches` the two sides must be different methods, or the check could not fail.

WORLD is a list of `key=value` for `potluck.testing.worlds.World`.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from potluck.core.federation import ClientId, Federation
from potluck.core.ground.errors import ConfigError
from potluck.core.method import Method
from potluck.core.nets.weights import Weights, mean, weights_of
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method
from potluck.parts.sharing import GroupWeights, SharesWeights
from potluck.testing.worlds import (
    QUADRATIC_OPTIMUM,
    World,
    packed_state,
    quadratics,
    quick,
    run_rounds,
    toy_federation,
    world_from,
)

_LINE = re.compile(
    r"^(?P<mine>(?:\S+=\S+ )*)"
    r"(?P<verb>equals|approaches|stays at rest|reaches the optimum|misses the optimum"
    r"|descends the gradient|counts a twin as twice the data|averages each layer over its owners|never repeats)"
    r"(?P<theirs>(?: (?!on )\S+)*)(?: on (?P<world>.+))?$"
)


@dataclass(frozen=True)
class Limit:
    """One stated limit of a method."""

    text: str
    method: type[Method[Any]]
    mine: tuple[str, ...]
    verb: str
    theirs: tuple[str, ...]
    world: World

    def verify(self) -> None:
        """Carry it out.

        Raises:
            AssertionError: it does not hold.
        """
        _VERIFY[self.verb](self)


def limits_of(method: type[Method[Any]]) -> list[Limit]:
    """The limits that a method's module states.

    Raises:
        ConfigError: a line cannot be read.
    """
    return [_parsed(method, line) for line in section(method, "Limits")]


def section(method: type[Method[Any]], title: str) -> list[str]:
    """The lines of one section of a method's documentation, without their indent; further indented, they go on."""
    text = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "")
    found = re.search(rf"^{title}\n((?:    .*\n?)+)", text, flags=re.MULTILINE)
    return [line.strip() for line in re.sub(r"\n {5,}", " ", found[1]).splitlines()] if found else []


def _parsed(method: type[Method[Any]], line: str) -> Limit:
    found = _LINE.match(line)
    if not found:
        raise ConfigError(f"{method.__name__}: cannot read the limit {line!r}; see potluck.testing.limits")
    world = world_from((found["world"] or "").split())
    return Limit(line, method, tuple(found["mine"].split()), found["verb"], tuple(found["theirs"].split()), world)


def evaluated_models(method: Method[Any], world: World) -> list[Weights]:
    """The weights that each client would use after the world's rounds."""
    engine = Engine(method, toy_federation(world.fit_for(method)))
    state = run_rounds(engine, world.rounds)
    return [weights_of(engine.inference_model(state, id)) for id in sorted(engine.federation.sites)]


def _compare(limit: Limit) -> None:
    name, *overrides = limit.theirs
    training: dict[str, Any] = {"optimizer": limit.world.optimizer, "lr": 0.1} if limit.world.optimizer else {}
    mine = quick(limit.method, limit.mine, **training)
    theirs = quick(get_method(name), overrides, **training)
    assert mine != theirs, f"{limit.text}: both sides are the same method, so it cannot fail; state another limit"
    world = limit.world.fit_for(mine).fit_for(theirs)
    for client, (a, b) in enumerate(zip(evaluated_models(mine, world), evaluated_models(theirs, world), strict=True)):
        _assert_same(a, b, exact=limit.verb == "equals", where=f"{limit.text}: client {client}")


def _at_rest(limit: Limit) -> None:
    method = quick(limit.method, limit.mine)
    before = evaluated_models(method, replace(limit.world, rounds=0))
    for client, (a, b) in enumerate(zip(before, evaluated_models(method, limit.world), strict=True)):
        _assert_same(a, b, exact=False, where=f"{limit.text}: client {client}")


def _assert_same(a: Weights, b: Weights, *, exact: bool, where: str) -> None:
    assert a.keys() == b.keys(), f"{where}: different layers"
    for name, tensor in a.items():
        close = torch.equal(tensor, b[name]) if exact else torch.allclose(tensor, b[name], rtol=1e-4, atol=1e-6)
        gap = float((tensor - b[name]).abs().max())
        assert close, f"{where}: {name} differs by up to {gap:.2e}"


def _reaches(limit: Limit) -> None:
    full, partial = _settled(limit, rounds=30), _settled(limit, rounds=60, partial=True)
    assert abs(full - QUADRATIC_OPTIMUM) < 1e-3, f"{limit.text}: settled at {full}, the optimum is -0.6"
    assert abs(partial - QUADRATIC_OPTIMUM) < 1e-2, f"{limit.text}: with one of two clients a round at {partial}"


def _misses(limit: Limit) -> None:
    full = _settled(limit, rounds=30)
    assert abs(full - QUADRATIC_OPTIMUM) > 0.05, f"{limit.text}: settled at {full}, which is the optimum"


def _settled(limit: Limit, rounds: int, *, partial: bool = False) -> float:
    """The value at which the single weight settles."""
    method = quick(limit.method, limit.mine, optimizer="sgd", lr=0.03, steps=5, batch_size=1)
    engine = Engine(method, quadratics())
    state = run_rounds(engine, rounds, _one_at_a_time() if partial else None)
    (weight,) = engine.inference_model(state, 0).parameters()
    return float(weight.detach())


def _one_at_a_time() -> Iterator[list[int]]:
    """One of two clients in each round, equally often, in an irregular order."""
    return ([(7 * number + number // 3) % 2] for number in count())


def _descends(limit: Limit) -> None:
    """One full-batch step of plain SGD with everyone equals a gradient step on the pooled data."""
    lr = 0.3
    method = quick(limit.method, limit.mine, optimizer="sgd", lr=lr, epochs=1, batch_size=10**6)
    federation = toy_federation(World(architectures=1))
    engine = Engine(method, federation)
    net = engine.server(0).build("toy1")
    batches = [site.train.batch(torch.arange(len(site.train))) for site in federation.sites.values()]
    inputs = torch.cat([batch.inputs for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    gradients = torch.autograd.grad(federation.criterion(net(inputs), targets), list(net.parameters()))
    stepped: list[Tensor] = [p.detach() - lr * g for p, g in zip(net.parameters(), gradients, strict=True)]
    state = run_rounds(engine, 1)
    for mine, expected in zip(engine.inference_model(state, 0).parameters(), stepped, strict=True):
        gap = float((mine.detach() - expected).abs().max())
        assert gap < 1e-5, f"{limit.text}: off a gradient step by {gap:.2e}"


def _counts_twins(limit: Limit) -> None:
    """Two clients with the same data weigh as much as one client with that data twice."""
    method = quick(limit.method, limit.mine, batch_size=10**6)
    federation = toy_federation(replace(limit.world, clients=2, architectures=1))
    one, two = federation.sites.values()
    doubled = two.train.take(torch.arange(len(two.train)).repeat(2))
    twins = {0: one, 1: two, 2: replace(two, id=2)}
    heavy = {0: one, 1: replace(two, train=doubled)}
    models: list[Weights] = []
    for sites in (twins, heavy):
        engine = Engine(method, replace(federation, sites=sites))
        models.append(weights_of(engine.inference_model(run_rounds(engine, limit.world.rounds), 0)))
    _assert_same(*models, exact=False, where=limit.text)


def _averages_layers(limit: Limit) -> None:
    """A first round with some clients gives, layer by layer, the mean of first rounds with each owner of it alone.

    Owners are weighed as the method's `sharing` says. What a client sends does not depend on who else is drawn.
    """
    method = quick(limit.method, limit.mine)
    assert isinstance(method, SharesWeights), f"{limit.text}: it has no weights on the server"
    assert method.sharing.averages, f"{limit.text}: it averages no weights"
    sharing, federation = method.sharing, toy_federation(limit.world.fit_for(method))
    drawn = sorted(federation.sites)[:-1]
    members = [federation.roster[id] for id in drawn]
    together, alone = _pool_after(method, federation, drawn), [_pool_after(method, federation, [id]) for id in drawn]
    owners_found: set[tuple[ClientId, ...]] = set()
    for group, layers in together.items():
        for name, found in layers.items():
            named = [name in member.parameters | member.buffers for member in members]
            owners = [i for i, member in enumerate(members) if named[i] and sharing.group(member) == group]
            shares = [float(members[i].examples) if sharing.weighting == "samples" else 1.0 for i in owners]
            if owners:  # else `leaves_a_layer_to_its_owners` has seen to it
                expected = mean([alone[i][group][name] for i in owners], shares)
                _assert_same({name: found}, {name: expected}, exact=False, where=f"{limit.text}: group {group}")
            owners_found.add(tuple(owners))
    assert len(owners_found) > 1, f"{limit.text}: all layers have the same owners, so it can hardly fail"


def _pool_after(method: SharesWeights[Any], federation: Federation, ids: list[ClientId]) -> GroupWeights:
    """The server's weights after a first round with these clients."""
    engine = Engine(method, federation)
    state, _ = engine.round(1, engine.start(), ids)
    return state.weights


def _never_repeats(limit: Limit) -> None:
    """Private noise does not come from a key, so two runs of one seed differ; and every release is counted."""
    method = quick(limit.method, limit.mine)
    assert method.releases_privately, f"{limit.text}: with these overrides there are no private releases"
    states: list[bytes] = []
    for _ in range(2):
        engine = Engine(method, toy_federation(limit.world.fit_for(method)))
        states.append(packed_state(run_rounds(engine, limit.world.rounds)))
        missing = sorted(set(engine.federation.sites) - engine.ledger.releases.keys())
        assert not missing, f"{limit.text}: no release of clients {missing} was counted"
    assert states[0] != states[1], f"{limit.text}: two runs of one seed end alike, so the server knows the noise"


_VERIFY = {
    "equals": _compare,
    "approaches": _compare,
    "stays at rest": _at_rest,
    "reaches the optimum": _reaches,
    "misses the optimum": _misses,
    "descends the gradient": _descends,
    "counts a twin as twice the data": _counts_twins,
    "averages each layer over its owners": _averages_layers,
    "never repeats": _never_repeats,
}
