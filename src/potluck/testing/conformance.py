"""The contract of methods as checks that anyone can run on a method of his own."""

import inspect
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError, asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch

from potluck.core.federation import ClientId
from potluck.core.inference import predict
from potluck.core.message import Message, Traffic
from potluck.core.method import Method
from potluck.core.roles import Failure
from potluck.core.schema import Misfit, Schema
from potluck.core.weights import Weights, cut, frozen_of, weights_of
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Answer, Call
from potluck.engine.engine import Engine
from potluck.engine.executors import Task
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers, can_fork
from potluck.experiment.config import RunConfig, typed, without_none
from potluck.experiment.run import Run
from potluck.testing.corruptions import corruptions
from potluck.testing.exits import predicts_with_exits_as_it_says, shares_its_exits
from potluck.testing.hearing import Hearing
from potluck.testing.limits import limits_of, section
from potluck.testing.wire import Place, applying, check_size, documented
from potluck.testing.worlds import CLASSES, World, assigned, packed, play, quick, toy_federation

Subject = type[Method[Any]]
Overrides = Sequence[str]
_SECTIONS = ("Symbols", "Wire", "Limits", "Departures from the paper")
_LEAST_LIMITS = 2
_LEARNT = 0.5
_ROUNDING = 1e-10


@dataclass(frozen=True)
class Check:
    """One thing that a method must do. `run` raises AssertionError if it does not.

    Attributes:
        name: what it must do, and the variant that must.
        run: carries it out.
        variant: name of the variant; None for the defaults.
    """

    name: str
    run: Callable[[], None]
    variant: str | None = None


def checks_of(method: Subject) -> list[Check]:
    """Every check for a method: the contract's, its variants', and the limits that its documentation states."""
    contract = [Check(check.__name__, partial(check, method)) for check in _CONTRACT]
    variants = [
        Check(f"{name}: {check.__name__}", partial(check, method, assigned(variant)), name)
        for name, variant in method.variants.items()
        for check in _OF_VARIANTS
    ]
    limits = [Check(f"limit: {limit.text}", limit.verify) for limit in limits_of(method)]
    return [*contract, *variants, *limits]


def check_method(method: Subject) -> None:
    """Run every check.

    Raises:
        AssertionError: the first check that fails, by name.
    """
    for check in checks_of(method):
        try:
            check.run()
        except AssertionError as error:
            raise AssertionError(f"{method.__name__}: {check.name}: {error}") from error


def documentation_is_complete(method: Subject) -> None:
    """Title, source, symbols, wire, at least two limits, departures."""
    text = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "")
    assert re.match(r"\S.*\.$", text.split("\n")[0]), "the first line should name the method and end in a full stop"
    missing = [title for title in _SECTIONS if not section(method, title)]
    assert not missing, f"the module's docstring has no section {', '.join(missing)}"
    stated = len(section(method, "Limits"))
    assert stated >= _LEAST_LIMITS, f"it states {stated} limits; expected at least {_LEAST_LIMITS}"


def is_a_frozen_value(method: Subject) -> None:
    """Nothing can be smuggled from server to client through `self`."""
    subject = method()
    try:
        subject.cache = 1  # type: ignore[attr-defined]
    except FrozenInstanceError:
        return
    raise AssertionError("attributes can be set; write @dataclass(frozen=True)")


def hyper_parameters_round_trip(method: Subject, overrides: Overrides = ()) -> None:
    """A method written to TOML reads back equal."""
    subject = quick(method, overrides)
    tree = tomllib.loads(tomli_w.dumps(without_none(asdict(subject))))
    assert typed(method, tree, "method", "round trip") == subject, "it reads back different"


def names_its_variants(method: Subject) -> None:
    """Every variant differs from the defaults and from the others, or checking it would check nothing new."""
    found = {"the defaults": quick(method)}
    for name, variant in method.variants.items():
        subject = quick(method, assigned(variant))
        twin = next((other for other, known in found.items() if known == subject), None)
        assert twin is None, f"the variant {name!r} is the same method as {twin}"
        found[name] = subject


def is_deterministic(method: Subject, overrides: Overrides = ()) -> None:
    """The same seed gives the same bytes; another seed does not."""
    first, second, other = (_played(method, overrides, seed=seed) for seed in (0, 0, 1))
    assert _everything(first) == _everything(second), "two runs of one seed differ"
    assert _everything(first) != _everything(other), "two seeds give the same run"


def private_noise_never_repeats(method: Subject) -> None:
    """A method that can release something privately states with which hyper-parameters; the limit carries it out."""
    if method.releases_privately is Method.releases_privately:
        return
    stated = any(limit.verb == "never repeats" for limit in limits_of(method))
    assert stated, "it defines releases_privately, but states no limit `OVERRIDES never repeats`"


def leaves_the_global_generator_alone(method: Subject, overrides: Overrides = ()) -> None:
    """No draw comes from torch's global generator."""
    before = torch.default_generator.get_state()
    _played(method, overrides)
    assert torch.equal(before, torch.default_generator.get_state()), "torch's global generator was advanced"


def does_not_change_the_state_it_is_given(method: Subject, overrides: Overrides = ()) -> None:
    """`round` returns a new state."""
    engine = _engine(method, overrides)
    state, _ = engine.round(1, engine.start(), sorted(engine.federation.sites))
    before = packed(state)
    engine.round(2, state, sorted(engine.federation.sites))
    assert packed(state) == before, "round() changed the state that it was given"


def leaves_bystanders_alone(method: Subject, overrides: Overrides = ()) -> None:
    """A client that was not drawn keeps what it had."""
    engine = _engine(method, overrides)
    state, _ = engine.round(1, engine.start(), sorted(engine.federation.sites))
    before = engine.store.read(3)
    engine.round(2, state, [0, 1])
    assert engine.store.read(3) == before, "a client that was not drawn has changed"


def does_not_depend_on_the_order_of_clients(method: Subject, overrides: Overrides = ()) -> None:
    """The cohort is a set."""
    results: list[bytes] = []
    for ids in ([0, 1, 2, 3], [3, 1, 0, 2]):
        engine = _engine(method, overrides)
        state, _ = engine.round(1, engine.start(), ids)
        results.append(packed(state))
    assert results[0] == results[1], "the order of the ids changed the result"


def gives_the_same_bytes_on_workers(method: Subject, overrides: Overrides = ()) -> None:
    """Which process carries out a client's work does not matter; not tried where processes cannot be forked."""
    if not can_fork():
        return
    engine, threads = _engine(method, overrides, executor=Workers(2)), torch.get_num_threads()
    torch.set_num_threads(1)  # as workers have
    try:
        spread, alone = (engine, play(engine, 2)), _played(method, overrides)
    finally:
        engine.close()
        torch.set_num_threads(threads)
    assert _everything(spread) == _everything(alone), "two processes give another result than one"


def agrees_when_stacked(method: Subject, overrides: Overrides = ()) -> None:
    """Clients trained side by side end where they do one by one, up to rounding of double precision.

    With SGD: Adam makes a whole step of a gradient that is nothing but rounding, such as that of a bias before a
    BatchNorm, and neither result is then the right one.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        subject = quick(method, overrides, optimizer="sgd")
        world = World(batchnorm=True).fit_for(subject)
        engines = [Engine(subject, toy_federation(world), executor=e) for e in (Sequential(), Stacked())]
        models = [
            [weights_of(e.inference_model(state, id)) for id in e.federation.sites]
            for e, state in ((engine, play(engine, 2)) for engine in engines)
        ]
    finally:
        torch.set_default_dtype(before)
    for mine, expected in zip(*models, strict=True):
        for name, tensor in expected.items():
            assert torch.allclose(mine[name], tensor, rtol=_ROUNDING, atol=_ROUNDING), f"{name} differs"


def keeps_what_is_frozen(method: Subject, overrides: Overrides = ()) -> None:
    """What a model's builder has frozen stays as it was built, at clients and on the server, and never travels."""
    for executor in (overhearing := Overhearing(), Stacked()):
        engine = _engine(method, overrides, world=World(batchnorm=True, frozen=True), executor=executor)
        state, server = play(engine, 2), engine.server(0)
        built = [frozen_of(server.build(name)) for name in engine.federation.architectures]
        models = {f"client {id}": engine.inference_model(state, id) for id in engine.federation.sites}
        for whose, model in (*models.items(), ("the server", engine.global_model(state))):
            found = {} if model is None else frozen_of(model)
            # One by one: a model may be put together of the client's layers and the server's.
            kept = all(any(_are_slices(_named({name: t}, one), one) for one in built) for name, t in found.items())
            assert kept, f"frozen tensors have changed at {whose}"
        for id in engine.federation.sites:
            overhearing.hear(engine.method.inference_message(state, id, server))
        sent = sorted(overhearing.names.intersection(*built))
        assert not sent, f"frozen, but sent: {', '.join(sent)}; expected `learnt_of`, `parameters_of` or `buffers_of`"


def survives_a_missing_reply(method: Subject, overrides: Overrides = ()) -> None:
    """A client that fails costs its reply and nothing else."""
    engine = _engine(method, overrides, executor=Without(1), tolerate_failures=True)
    state, before = engine.start(), engine.store.read(1)
    for number in (1, 2):
        state, report = engine.round(number, state, [0, 1, 2, 3])
        assert set(report.failures) == {1}, f"expected client 1 to fail, found {sorted(report.failures)}"
    assert engine.store.read(1) == before, "the failed client's store has changed"


def works_with_newcomers(method: Subject, overrides: Overrides = ()) -> None:
    """Clients first drawn in a later round, and cohorts of one, are served."""
    engine = _engine(method, overrides)
    play(engine, 3, iter([[0, 1], [2], [2, 3]]))


def sends_what_it_documents(method: Subject, overrides: Overrides = ()) -> None:
    """The entries that the engine counted are those of the Wire section, and as large as its formulas say.

    A variant may leave out entries; those that it sends are documented for it or for the defaults.
    """
    for wire in (applying(method, overrides),) if overrides else documented(method):
        engine = _engine(method, wire.overrides, world=World(batchnorm=True, labels=CLASSES - 1))
        ids = sorted(engine.federation.sites)
        state, first = engine.round(1, engine.start(), ids)
        state, second = engine.round(2, state, ids)
        places = [Place(engine, state, site) for site in engine.federation.sites.values()]
        for direction, formulas in (("down", wire.down), ("up", wire.up)):
            seen = _sent(first.traffic, direction) | _sent(second.traffic, direction)
            fits = set(seen) <= set(formulas) if overrides else set(seen) == set(formulas)
            assert fits, f"{direction}: documented {sorted(formulas)}, sent {sorted(seen)}"
            for name, sent in seen.items():
                wrong = check_size(formulas[name], sent, places)
                assert wrong is None, f"{direction}: {name} is {wrong}"


def declares_its_replies(method: Subject, overrides: Overrides = ()) -> None:
    """Every reply is what `replies` declares, and a reply with anything wrong in it is refused."""
    heard = Hearing()
    engine = _engine(method, overrides, executor=heard, tolerate_failures=True)  # to see what is refused
    play(engine, 3)
    roster, server, tried = engine.federation.roster, engine.server(1), set[tuple[Any, ...]]()
    for call, answer in heard.exchanges:
        sent, reply = Message.decode(call.payload), Message.decode(answer.payload)
        declared = engine.method.replies(call.handler, roster[call.client], sent, server)
        assert declared is not None, f"{call.handler} has no declaration of its reply; see `Method.replies`"
        complaint = _complaint(declared, reply)
        assert complaint is None, f"a reply of {call.handler} does not fit its declaration: {complaint}"
        kind = (call.handler, roster[call.client].architecture, *reply)
        for wrong, what in corruptions(reply, declared) if kind not in tried else ():
            assert _complaint(declared, wrong) is not None, f"the reply of {call.handler} may have {what}"
        tried.add(kind)


def resumes_to_the_same_bytes(method: Subject, overrides: Overrides = ()) -> None:
    """Two rounds in one go and two rounds with a stop between them end alike."""
    with tempfile.TemporaryDirectory() as place:
        whole, halves = Path(place) / "whole", Path(place) / "halves"
        straight = _run(method, overrides, whole, rounds=2)
        _run(method, overrides, halves, rounds=1)
        resumed = _run(method, overrides, halves, rounds=2)
    assert straight == resumed, "a resumed run ends in another checkpoint than an uninterrupted one"


def learns_a_toy_task(method: Subject) -> None:
    """Twelve rounds of a linear problem bring the evaluated models well above chance."""
    engine = _engine(method)
    state = play(engine, 12)
    test = engine.federation.test
    assert test is not None
    shares = [
        float((predict(engine.inference_model(state, id), test).argmax(1) == test.labels).float().mean())
        for id in engine.federation.sites
    ]
    mean = sum(shares) / len(shares)
    assert mean > _LEARNT, f"accuracy {mean:.2f} on {CLASSES} classes, expected above {_LEARNT}"


def _complaint(declared: Schema, reply: Any) -> str | None:
    """Why a reply is refused; None if it is not."""
    try:
        declared.check(reply)
    except Misfit as misfit:
        return str(misfit)
    return None


class Without(Sequential):
    """An executor under which one client always fails."""

    def __init__(self, absent: ClientId) -> None:
        self._absent = absent

    def run(self, host: ClientRuntime, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks, a failure for the absent client's calls."""
        for job in (task.make() for task in tasks):
            if isinstance(job, Call) and job.client == self._absent:
                yield Failure(job.client, job.handler, "absent")
            else:
                yield host.execute(job)


class Overhearing(Sequential):
    """An executor that notes the names of all tensors in messages."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def run(self, host: ClientRuntime, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks."""
        for job in (task.make() for task in tasks):
            self.hear(Message.decode(job.payload))
            outcome = host.execute(job)
            if isinstance(outcome, Answer):
                self.hear(Message.decode(outcome.payload))
            yield outcome

    def hear(self, entries: Mapping[str, Any]) -> None:
        """Note the names of a message's entries, and of what is in them."""
        for name, entry in entries.items():
            self.names.add(name)
            if isinstance(entry, dict):
                self.hear(entry)


_CONTRACT: tuple[Callable[[Subject], None], ...] = (
    documentation_is_complete,
    is_a_frozen_value,
    hyper_parameters_round_trip,
    names_its_variants,
    is_deterministic,
    private_noise_never_repeats,
    leaves_the_global_generator_alone,
    does_not_change_the_state_it_is_given,
    leaves_bystanders_alone,
    does_not_depend_on_the_order_of_clients,
    gives_the_same_bytes_on_workers,
    agrees_when_stacked,
    keeps_what_is_frozen,
    survives_a_missing_reply,
    works_with_newcomers,
    sends_what_it_documents,
    declares_its_replies,
    shares_its_exits,
    predicts_with_exits_as_it_says,
    resumes_to_the_same_bytes,
    learns_a_toy_task,
)

_OF_VARIANTS: tuple[Callable[[Subject, Overrides], None], ...] = (
    hyper_parameters_round_trip,
    is_deterministic,
    leaves_the_global_generator_alone,
    does_not_change_the_state_it_is_given,
    leaves_bystanders_alone,
    does_not_depend_on_the_order_of_clients,
    gives_the_same_bytes_on_workers,
    agrees_when_stacked,
    keeps_what_is_frozen,
    survives_a_missing_reply,
    works_with_newcomers,
    sends_what_it_documents,
    declares_its_replies,
    shares_its_exits,
    predicts_with_exits_as_it_says,
    resumes_to_the_same_bytes,
)
"""Whatever an option can break; that the method learns is seen for the defaults alone, since it takes long."""


def _engine(
    method: Subject,
    overrides: Overrides = (),
    seed: int = 0,
    world: World = World(batchnorm=True),
    **options: Any,
) -> Engine:
    subject = quick(method, overrides)
    return Engine(subject, toy_federation(world.fit_for(subject)), seed=seed, **options)


def _played(method: Subject, overrides: Overrides = (), seed: int = 0) -> tuple[Engine, Any]:
    engine = _engine(method, overrides, seed)
    return engine, play(engine, 2)


def _everything(played: tuple[Engine, Any]) -> bytes:
    """The method's state and all that clients keep."""
    engine, state = played
    return packed(state) + b"".join(engine.store.read(id) or b"" for id in sorted(engine.federation.sites))


def _named(weights: Weights, built: Weights) -> Weights:
    """The tensors under the names that they were built with, where a model is a part of another module."""
    names = {name: next((own for own in built if name.endswith(f".{own}")), name) for name in weights}
    return {names[name]: tensor for name, tensor in weights.items()}


def _are_slices(narrow: Weights, full: Weights) -> bool:
    """Whether all tensors are leading slices of those of the same names, which they are of themselves."""
    slices = cut(full, {name: tensor.shape for name, tensor in narrow.items()})
    return all(name in slices and torch.equal(tensor, slices[name]) for name, tensor in narrow.items())


def _run(method: Subject, overrides: Overrides, folder: Path, rounds: int) -> str:
    subject = quick(method, overrides)
    federation = toy_federation(World(batchnorm=True).fit_for(subject))
    result = Run(subject, federation, RunConfig(rounds=rounds, cohort_fraction=0.5), folder).play()
    assert result.checkpoint is not None
    return result.checkpoint.digest


def _sent(traffic: Traffic, direction: str) -> dict[str, int]:
    return dict(traffic.down if direction == "down" else traffic.up)
