"""What becomes of the tensors of clients' networks: frozen ones, initial ones, those outside a slice."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from potluck.core.federation import Builder, Federation
from potluck.core.message import Message
from potluck.core.needs import Need
from potluck.core.nets.weights import Weights, frozen_of, parameters_of, weights_of
from potluck.core.requests.examples import Examples
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Answer
from potluck.engine.executors import Pending
from potluck.engine.executors.hearing import Hearing
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.rounds.engine import Engine
from potluck.models.contract import StagedNet
from potluck.parts.crosslayer import InCo
from potluck.testing.checks.classes import with_own_classes
from potluck.testing.checks.subjects import Overrides, Subject, all_bytes, engine_for
from potluck.testing.worlds import CLASSES, World, quick, run_rounds, toy_federation

_QUARTER = 0.25


def keeps_what_is_frozen(method: Subject, overrides: Overrides = ()) -> None:
    """Frozen tensors stay as built, on clients and on the server, and are never sent."""
    for executor in (overhearing := Overhearing(), Stacked()):
        engine = engine_for(method, overrides, world=World(batchnorm=True, frozen=True), executor=executor)
        state, server = run_rounds(engine, 2), engine.server(0)
        built = [frozen_of(server.build(name)) for name in engine.federation.architectures]
        models = {f"client {id}": engine.inference_model(state, id) for id in engine.federation.sites}
        for whose, model in (*models.items(), ("the server", engine.global_model(state))):
            found = {} if model is None else frozen_of(model)
            # Tensor by tensor, since a model may combine layers of the client and of the server.
            kept = all(any(_is_part(t, _as_built(name, one)) for one in built) for name, t in found.items())
            assert kept, f"frozen tensors have changed at {whose}"
        for id in engine.federation.sites:
            overhearing.hear(engine.method.inference_message(state, id, server))
        sent = sorted(overhearing.names.intersection(*built))
        assert not sent, f"frozen, but sent: {', '.join(sent)}; expected `learnt_of`, `parameters_of` or `buffers_of`"


def starts_as_every_method_does(method: Subject, overrides: Overrides = ()) -> None:
    """Before the first round a client that can train everything predicts with its architecture's initial weights.

    So two methods with one seed differ by what they do. A layer that several architectures have, and that the method
    gives one value, begins as that of one of them; a net that is cut in pieces, as the pieces; what a method adds of
    its own is not compared.
    """
    for architectures in (1, 2):
        engine = engine_for(method, overrides, world=World(batchnorm=True, capacity=1.0, architectures=architectures))
        state, server, federation = engine.start(), engine.server(0), engine.federation
        initial = {name: parameters_of(server.build(name)) for name in federation.architectures}
        for id, site in federation.sites.items():
            first = weights_of(engine.inference_model(state, id))
            for name in initial[site.architecture]:
                found = [tensor for own, tensor in first.items() if own == name or own.endswith(f".{name}")]
                begins = [weights[name] for weights in initial.values() if name in weights]
                alike = any(_is_part(mine, built) for mine in found for built in begins)
                missing = not found and len(initial) > 1  # where the rest of the net is the server's, as in FedGKT
                assert alike or missing, f"client {id}: {name} begins otherwise than with other methods of this seed"


def cuts_any_network_alike(method: Subject, overrides: Overrides = ()) -> None:
    """A network that is cut by its dataflow gives the bytes of a staged one of the same layers, stacked too.

    So it does where some clients have outputs for three of four classes, if the method aligns classes.
    """
    subject = quick(method, overrides)
    staged = toy_federation(World(batchnorm=True).fit_for(subject))
    plain = replace(staged, architectures={n: partial(unstaged, build) for n, build in staged.architectures.items()})
    some = {id: tuple((id + j) % CLASSES for j in range(CLASSES - 1)) for id in staged.sites if id % 2 == 0}
    for held, executor in product(({}, some) if method.aligns_classes else ({},), (Sequential, Stacked)):
        federations = [with_own_classes(federation, held) for federation in (staged, plain)]
        engines = [Engine(subject, federation, executor=executor()) for federation in federations]
        expected, found = (all_bytes((engine, run_rounds(engine, 2))) for engine in engines)
        how = "stacked" if executor is Stacked else "one by one"
        who = ", clients with classes of their own" if held else ""
        assert found == expected, f"{how}, a network without stages gives another result than its layers in stages{who}"


def reads_named_inputs_alike(method: Subject, overrides: Overrides = ()) -> None:
    """An input with a name gives the bytes of one without, one by one and stacked."""
    subject = quick(method, overrides)
    if subject.needs() & {Need.REAL_INPUTS, Need.ONE_INPUT}:
        return
    plain = toy_federation(World(batchnorm=True).fit_for(subject))
    for executor in (Sequential, Stacked):
        engines = [Engine(subject, federation, executor=executor()) for federation in (plain, _named(plain))]
        expected, found = (all_bytes((engine, run_rounds(engine, 2))) for engine in engines)
        how = "stacked" if executor is Stacked else "one by one"
        assert found == expected, f"{how}, inputs with a name give another result than the same without"


def _named(federation: Federation) -> Federation:
    """The same federation, whose inputs are called `x`."""

    def named(examples: Examples) -> Examples:
        assert isinstance(examples.inputs, Tensor)
        return replace(examples, inputs=names.setdefault(id(examples.inputs), {"x": examples.inputs}))

    names = dict[int, dict[str, Tensor]]()  # clients share what they shared
    sites = {
        id: replace(site, train=named(site.train), validation=named(site.validation), test=named(site.test))
        for id, site in federation.sites.items()
    }
    common = {part: named(examples) for part in ("public", "test") if (examples := getattr(federation, part))}
    return replace(federation, sites=sites, **common)


def cuts_networks(method: Subject, overrides: Overrides = ()) -> bool:
    """Whether a method cuts networks in parts, and does so with those without stages as with staged ones."""
    return Need.SPLIT_MODEL in quick(method, overrides).needs() and not issubclass(method, InCo)


def trains_no_more_than_fits(method: Subject) -> None:
    """Where the width is cut, a client trains a net of its capacity, and replies just the tensors that it was sent.

    Exits, which are not part of the full net, do not count.
    """
    for capacity in (None, _small(method)) if _cuts_widths(method) else ():
        engine = engine_for(method, world=World(batchnorm=True, capacity=capacity), executor=(heard := Hearing()))
        run_rounds(engine, 3)
        server, seen = engine.server(0), 0
        for call, answer in heard.exchanges:
            sent, reply = Message.decode(call.payload), Message.decode(answer.payload)
            given, back = _trained(sent, reply), _trained(reply, sent)
            shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (given, back)]
            assert shapes[0] == shapes[1], f"{call.handler} replies other tensors or shapes than it was sent"
            share = engine.federation.sites[call.client].capacity
            most = sum(tensor.numel() for tensor in parameters_of(server.build(width=share)).values())
            found = sum(tensor.numel() for name, tensor in given.items() if "/exits." not in name)
            assert found <= most, f"a client of capacity {share} trains {found} weights; {most} fit"
            seen += found
        assert seen, "no client was sent weights to train"


def leaves_alone_what_nobody_covers(method: Subject) -> None:
    """Where the width is cut, a round moves no more of the global weights than its clients have trained."""
    if not _cuts_widths(method):
        return
    engine = engine_for(method, world=World(batchnorm=True, capacity=_small(method)), executor=(heard := Hearing()))
    states = [engine.start()]
    states.append(engine.round(1, states[0], [0])[0])
    models = [engine.global_model(state) for state in states]
    before, after = ({} if model is None else parameters_of(model) for model in models)
    trained: Counter[str] = Counter()
    for call, answer in heard.exchanges:
        for name, tensor in _trained(Message.decode(call.payload), Message.decode(answer.payload)).items():
            trained[name.partition("/")[2]] += tensor.numel()
    for name, old in before.items():
        moved = int((after[name] != old).sum())
        assert moved <= trained[name], f"{moved} weights of {name} have changed, of which {trained[name]} were trained"


class Unstaged(nn.Module):
    """The layers of a staged network under the names that they have there, and a forward of its own."""

    def __init__(self, net: StagedNet) -> None:
        super().__init__()
        self.stages = net.stages
        self.pool = net.own_pool
        self.head = net.head

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (batch, ...) to logits (batch, classes)."""
        return self.head(self.pool(self.stages(x)))


def unstaged(build: Builder, **options: Any) -> nn.Module:
    """The net of a builder of staged ones, without its stages."""
    net = build(**options)
    assert isinstance(net, StagedNet)
    return Unstaged(net)


def _cuts_widths(method: Subject) -> bool:
    return Need.WIDTH_SLICES in quick(method).needs()


def _small(method: Subject) -> float:
    """A small capacity: a quarter, or the least that the method can give a part to train."""
    return max(_QUARTER, min(getattr(quick(method), "levels", (_QUARTER,))))


class Overhearing(Sequential):
    """An executor that records the names of all tensors in messages."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks."""
        for job in (task.make() for task in tasks):
            self.hear(Message.decode(job.payload))
            outcome = host.execute(job)
            if isinstance(outcome, Answer):
                self.hear(Message.decode(outcome.payload))
            yield outcome

    def hear(self, entries: Mapping[str, Any]) -> None:
        """Record the names of a message's entries, and of tensors in them."""
        for name, entry in entries.items():
            self.names.add(name)
            if isinstance(entry, dict):
                self.hear(entry)


def _as_built(name: str, built: Weights) -> Tensor | None:
    """The tensor of this name, which has a longer one where a model is a part of another module."""
    return built.get(name, next((tensor for own, tensor in built.items() if name.endswith(f".{own}")), None))


def _is_part(tensor: Tensor, built: Tensor | None) -> bool:
    """Whether a tensor is what was built, or in a narrower net a part of it."""
    if built is None or any(mine > whole for mine, whole in zip(tensor.shape, built.shape, strict=True)):
        return False
    return torch.equal(tensor, built) if tensor.shape == built.shape else bool(torch.isin(tensor, built).all())


def _trained(sent: Message, reply: Message) -> dict[str, Tensor]:
    """The tensors of the entries that go both ways, as they were sent, by entry and name."""
    both = [name for name in sent if name in reply and isinstance(sent[name], dict)]
    return {f"{name}/{inner}": tensor for name in both for inner, tensor in sent[name].items()}
