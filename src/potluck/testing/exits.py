"""What becomes of the exits that a method adds to nets, or cuts nets at: they are trained, shared, and predict openly.

An exit is known by its name: what lies under the name `exits` in a state or message, and tensors whose names begin with
`exits.`, as those of a net do that has some.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.nets.weights import Weights
from potluck.core.requests.inference import predict
from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.executors.hearing import Hearing
from potluck.engine.rounds.engine import Engine
from potluck.testing.worlds import World, quick, toy_federation

_WORLD = World(batchnorm=True)  # whose clients differ in depth, and in what they can train


def shares_its_exits(method: type[Method[Any]], overrides: Sequence[str] = ()) -> None:
    """Exits that clients have are trained and sent back, and each comes from those alone that trained it."""
    heard = _HearingExits()
    engine = _engine(method, overrides, heard)
    everyone = sorted(engine.federation.sites)
    before = engine.start()
    after, _ = engine.round(1, before, everyone)
    trainers = _trainers(heard)
    lost = sorted(heard.built - trainers.keys())
    assert not lost, f"exit {lost[0]!r} is made, but no client sends it back"
    moved = _moved(before, after)
    assert moved == trainers.keys(), (
        f"clients trained the exits {sorted(trainers)}, and on the server those changed: {sorted(moved)}"
    )
    for ids in {tuple(sorted(ids)) for ids in trainers.values() if len(ids) < len(everyone)}:
        alone = _engine(method, overrides)
        found, _ = alone.round(1, alone.start(), ids)
        for place in (place for place, who in trainers.items() if tuple(sorted(who)) == ids):
            same = _equal(_of(place, after), _of(place, found))
            assert same, f"exit {place!r} was trained by clients {list(ids)}, but others have a part in its mean"


def predicts_with_exits_as_it_says(method: type[Method[Any]], overrides: Sequence[str] = ()) -> None:
    """No exit has a part in a prediction, unless the method says that exits do; then they must."""
    engine = _engine(method, overrides)
    state = engine.start()
    if not dict(_exits_in(state)):
        assert not engine.method.predicts_with_exits, "it says that it predicts with exits, and its state has none"
        return
    state, _ = engine.round(1, state, sorted(engine.federation.sites))
    found = _equal(_predictions(engine, state), _predictions(engine, _shifted(state)))
    expected = "has a" if engine.method.predicts_with_exits else "has no"
    assert found != engine.method.predicts_with_exits, (
        f"predicts_with_exits is {engine.method.predicts_with_exits}: expected that changing its exits {expected} part"
        " in what is predicted, and found otherwise"
    )


class _HearingExits(Hearing):
    """An executor that also remembers the places of the exits that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.built: set[str] = set()

    def start(self, host: ClientRuntime) -> None:
        """Hear what both halves of the method make."""
        module = host.module

        def noted(name: str, build: Callable[[], nn.Module]) -> nn.Module:
            if name.startswith("exit "):
                self.built.add(name.removeprefix("exit "))
            return module(name, build)

        host.module = noted
        super().start(host)


def _engine(method: type[Method[Any]], overrides: Sequence[str], *executor: Hearing) -> Engine:
    subject = quick(method, overrides)
    options: dict[str, Any] = {"executor": executor[0]} if executor else {}
    return Engine(subject, toy_federation(_WORLD.fit_for(subject)), **options)


def _trainers(heard: Hearing) -> dict[str, set[ClientId]]:
    """By place, the clients that sent an exit back.

    Raises:
        AssertionError: one came back as it was sent.
    """
    found: dict[str, set[ClientId]] = {}
    sent: dict[ClientId, Weights] = {}
    for call, answer in heard.exchanges:
        sent.setdefault(call.client, {}).update(_exits_in(Message.decode(call.payload)))
        reply = dict(_exits_in(Message.decode(answer.payload)))
        for place in {_place(name) for name in reply}:
            same = _equal(_of(place, reply), {name: sent[call.client].get(name) for name in _of(place, reply)})
            assert not same, f"client {call.client} sends exit {place!r} as it came; expected it trained, or absent"
            found.setdefault(place, set()).add(call.client)
    return found


def _exits_in(tree: Any, below: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The tensors of exits in a state or message, by "PLACE.NAME@" and the names of what they lie in."""
    for key, child in _items(tree):
        inner = below or key == "exits"
        if not isinstance(child, Tensor):
            yield from ((f"{name}@{key}", tensor) for name, tensor in _exits_in(child, inner))
        elif inner or key.startswith("exits."):
            yield key.removeprefix("exits."), child


def _items(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        yield from ((str(key), child) for key, child in tree.items())
    elif hasattr(tree, "__dataclass_fields__"):
        yield from ((spec.name, getattr(tree, spec.name)) for spec in fields(tree))


def _place(name: str) -> str:
    return name.split(".")[0]


def _of(place: str, tree: Any) -> dict[str, Tensor]:
    tensors = tree if isinstance(tree, dict) else dict(_exits_in(tree))
    return {name: tensor for name, tensor in tensors.items() if _place(name) == place}


def _moved(before: Any, after: Any) -> set[str]:
    """The places of the exits of which a tensor has changed."""
    old = dict(_exits_in(before))
    return {_place(name) for name, tensor in _exits_in(after) if not torch.equal(tensor, old[name])}


def _equal(some: Mapping[str, Tensor], others: Mapping[str, Tensor | None]) -> bool:
    pairs = [(tensor, others.get(name)) for name, tensor in some.items()]
    return all(other is not None and torch.equal(tensor, other) for tensor, other in pairs)


def _shifted(tree: Any, below: bool = False) -> Any:
    """A state whose exits have other weights."""
    if isinstance(tree, Tensor):
        return tree + 1 if below and tree.is_floating_point() else tree
    changed = {key: _shifted(child, below or key == "exits" or key.startswith("exits.")) for key, child in _items(tree)}
    if isinstance(tree, Mapping):
        return changed
    return replace(tree, **changed) if changed else tree


def _predictions(engine: Engine, state: Any) -> dict[str, Tensor]:
    """What all models that are evaluated make of the common test set."""
    test = engine.federation.test
    assert test is not None
    models = {str(id): engine.inference_model(state, id) for id in engine.federation.sites}
    models |= {"server": model} if (model := engine.global_model(state)) is not None else {}
    return {name: predict(model, test) for name, model in models.items()}
