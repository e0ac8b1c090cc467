"""Clients whose networks have outputs for classes of their own alone."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from potluck.core.federation import ClientId, Federation
from potluck.core.nets.classes import OwnClasses, OwnHead, axes_of_classes
from potluck.core.requests.inference import predict
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.rounds.engine import Engine
from potluck.testing.checks.subjects import Overrides, Subject
from potluck.testing.worlds import CLASSES, World, quick, run_rounds, toy_federation

_ROUNDING = 1e-10
_ORDERS = ((2, 0, 3, 1), (0, 1, 2, 3), (3, 2, 1, 0))
_HELD = 3

ClassesOf = Mapping[ClientId, tuple[int, ...]]
"""The classes of some clients' outputs, in their order; of others all."""


def means_the_same_class_everywhere(method: Subject, overrides: Overrides = ()) -> None:
    """Nothing depends on the order in which clients' networks have the classes, up to rounding in double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        subject = quick(method, overrides, optimizer="sgd")
        plain = toy_federation(World(batchnorm=True).fit_for(subject))
        other = with_own_classes(plain, {id: _ORDERS[id % len(_ORDERS)] for id in plain.sites})
        (mine, found), (theirs, expected) = (_outputs(Engine(subject, one)) for one in (other, plain))
    finally:
        torch.set_default_dtype(before)
    assert torch.allclose(mine, theirs, rtol=_ROUNDING, atol=_ROUNDING), "the server's state depends on their order"
    for id, outputs in expected.items():
        assert torch.allclose(found[id], outputs, rtol=_ROUNDING, atol=_ROUNDING), f"client {id} predicts otherwise"


def asks_nothing_of_classes_that_a_client_lacks(method: Subject, overrides: Overrides = ()) -> None:
    """Clients with three of four classes train, predict these alone, and do so stacked and beside others with all."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        subject = quick(method, overrides, optimizer="sgd")
        plain = toy_federation(World(batchnorm=True, labels=_HELD).fit_for(subject))
        everyone = {id: tuple((id + j) % CLASSES for j in range(_HELD)) for id in plain.sites}
        some = {id: own for id, own in everyone.items() if id % 2 == 0}
        engines = [
            Engine(subject, with_own_classes(plain, held), executor=executor())
            for held, executor in ((everyone, Sequential), (everyone, Stacked), (some, Stacked))
        ]
        (mine, alone), (theirs, stacked), (_, beside) = map(_outputs, engines)
    finally:
        torch.set_default_dtype(before)
    assert torch.allclose(mine, theirs, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True), "stacked, it ends otherwise"
    for id, outputs in alone.items():
        assert torch.allclose(stacked[id], outputs, rtol=_ROUNDING, atol=_ROUNDING), f"stacked, client {id} differs"
    for found, held in ((alone, everyone), (beside, some)):
        _check_predicted(found, held)


def _check_predicted(found: Mapping[ClientId, Tensor], held: ClassesOf) -> None:
    for id, outputs in found.items():
        own = held.get(id, tuple(range(CLASSES)))
        lacking = [number for number in range(CLASSES) if number not in own]
        assert outputs[:, list(own)].isfinite().all(), f"client {id} predicts NaN or infinity"
        assert (outputs[:, lacking] == -torch.inf).all(), f"client {id} predicts classes that it lacks"


def with_own_classes(federation: Federation, held: ClassesOf) -> Federation:
    """A toy federation in which clients' networks have outputs for these classes alone, in this order."""
    builders, sites = dict(federation.architectures), dict(federation.sites)
    for id, numbers in held.items():
        site, own = sites[id], OwnClasses(numbers, CLASSES)
        full, name = federation.architectures[site.architecture], f"{site.architecture}[{own}]"
        axes = axes_of_classes(full(), partial(full, classes=CLASSES + 1)(), CLASSES)
        builders[name] = OwnHead(partial(full, classes=len(numbers)), site.architecture, own, axes)
        known = torch.tensor(numbers)
        parts = {
            part: examples.take(torch.isin(examples.labels, known).nonzero().flatten())
            for part, examples in (("train", site.train), ("validation", site.validation), ("test", site.test))
        }
        sites[id] = replace(site, architecture=name, **parts)
    return replace(federation, sites=sites, architectures=builders)


def _outputs(engine: Engine) -> tuple[Tensor, dict[ClientId, Tensor]]:
    """After two rounds, the numbers of the server's state, and what each client predicts for the common test set."""
    state = run_rounds(engine, 2)
    numbers = [leaf.double().flatten() for leaf in _tensors(vars(state))]
    models = {id: engine.inference_model(state, id) for id in engine.federation.sites}
    assert engine.federation.test is not None
    found = {id: predict(net, engine.federation.test) for id, net in models.items()}
    engine.close()
    return torch.cat([torch.zeros(0, dtype=torch.float64), *numbers]), found


def _tensors(node: Any) -> list[Tensor]:
    if isinstance(node, Tensor):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return [leaf for child in children for leaf in _tensors(child)]
