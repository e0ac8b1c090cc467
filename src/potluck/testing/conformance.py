"""The contract of methods, as checks that users can run on their own methods."""

import inspect
import math
import re
import sys
import tempfile
import tomllib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError, asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor

from potluck.core.federation import ClientId
from potluck.core.ground.digest import digest
from potluck.core.message import Message, Traffic
from potluck.core.method import Method
from potluck.core.needs import Need
from potluck.core.nets.weights import Weights, frozen_of, parameters_of, weights_of
from potluck.core.requests.inference import predict
from potluck.core.roles import Arriving, Failure
from potluck.core.schema import Misfit, Schema
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Answer, Call
from potluck.engine.engine import Engine
from potluck.engine.executors import Pending
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers, can_fork
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.experiment.settings.strict import typed
from potluck.experiment.settings.tables import without_none
from potluck.parts.sharing import SharesWeights
from potluck.records import CLIENTS, ROUNDS
from potluck.testing.corruptions import corruptions
from potluck.testing.exits import predicts_with_exits_as_it_says, shares_its_exits
from potluck.testing.facts import keeps_what_it_says, stacks_as_it_says
from potluck.testing.hearing import Hearing
from potluck.testing.limits import limits_of, section
from potluck.testing.wire import Place, applying, check_size, documented
from potluck.testing.worlds import CLASSES, World, assigned, packed_state, quick, run_rounds, toy_federation

Subject = type[Method[Any]]
Overrides = Sequence[str]
_SECTIONS = ("Symbols", "Wire", "Limits", "Departures from the paper")
_LEAST_LIMITS = 2
_LEARNT = 0.5
_QUARTER = 0.25
_ROUNDING = 1e-10


@dataclass(frozen=True)
class Check:
    """A check of one thing that a method must do. `run` raises AssertionError if it does not.

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
    """Nothing can be passed from server to client through `self`."""
    subject = method()
    try:
        subject.cache = 1  # type: ignore[attr-defined]
    except FrozenInstanceError:
        return
    raise AssertionError("attributes can be set; write @dataclass(frozen=True)")


def hyper_parameters_round_trip(method: Subject, overrides: Overrides = ()) -> None:
    """A method's hyper-parameters, written to TOML and read back, are equal."""
    subject = quick(method, overrides)
    tree = tomllib.loads(tomli_w.dumps(without_none(asdict(subject))))
    assert typed(method, tree, "method", "round trip") == subject, "it reads back different"


def names_its_variants(method: Subject) -> None:
    """Every variant differs from the defaults and from the others; otherwise its checks would be redundant."""
    found = {"the defaults": quick(method)}
    for name, variant in method.variants.items():
        subject = quick(method, assigned(variant))
        twin = next((other for other, known in found.items() if known == subject), None)
        assert twin is None, f"the variant {name!r} is the same method as {twin}"
        found[name] = subject


def is_deterministic(method: Subject, overrides: Overrides = ()) -> None:
    """The same seed gives the same bytes; another seed does not."""
    first, second, other = (_ran(method, overrides, seed=seed) for seed in (0, 0, 1))
    assert _everything(first) == _everything(second), "two runs of one seed differ"
    assert _everything(first) != _everything(other), "two seeds give the same run"


def private_noise_never_repeats(method: Subject) -> None:
    """A method that can make private releases states a limit `never repeats`, which names the hyper-parameters."""
    if method.releases_privately is Method.releases_privately:
        return
    stated = any(limit.verb == "never repeats" for limit in limits_of(method))
    assert stated, "it defines releases_privately, but states no limit `OVERRIDES never repeats`"


def leaves_the_global_generator_alone(method: Subject, overrides: Overrides = ()) -> None:
    """No draw comes from torch's global generator."""
    before = torch.default_generator.get_state()
    _ran(method, overrides)
    assert torch.equal(before, torch.default_generator.get_state()), "torch's global generator was advanced"


def does_not_change_the_state_it_is_given(method: Subject, overrides: Overrides = ()) -> None:
    """`round` returns a new state. The first round counts too, since some of a state may change in it alone."""
    engine = _engine(method, overrides)
    state = engine.start()
    for number in (1, 2):
        before = packed_state(state)
        new, _ = engine.round(number, state, sorted(engine.federation.sites))
        assert packed_state(state) == before, "round() changed the state that it was given"
        state = new


def leaves_bystanders_alone(method: Subject, overrides: Overrides = ()) -> None:
    """The state of a client that was not drawn is unchanged."""
    engine = _engine(method, overrides)
    state, _ = engine.round(1, engine.start(), sorted(engine.federation.sites))
    before = engine.store.read(3)
    engine.round(2, state, [0, 1])
    assert engine.store.read(3) == before, "a client that was not drawn has changed"


def leaves_a_layer_to_its_owners(method: Subject, overrides: Overrides = ()) -> None:
    """What the server makes of a layer depends on the clients that own it, as if the others had not been drawn.

    A layer of which no owner is drawn keeps its values; only this is checked of a method that mixes layers, and nothing
    of one whose server trains them.
    """
    world = toy_federation(World(batchnorm=True).fit_for(subject := quick(method, overrides)))
    if not isinstance(subject, SharesWeights) or not subject.sharing.averages or len(world.architectures) == 1:
        return
    if subject.server_trains:
        return
    deep = [id for id, site in sorted(world.sites.items()) if site.architecture == "toy2"]  # it has all layers of toy1
    shallow = sorted(world.sites.keys() - set(deep))
    theirs = world.roster[deep[0]].shapes.keys() - world.roster[shallow[0]].shapes.keys()
    group, pools = subject.sharing.group(world.roster[deep[0]]), dict[str, Weights]()
    for who, ids in {"all": [*deep, *shallow], "its owners": deep, "the others": shallow}.items():
        engine = _engine(method, overrides)
        start = engine.start()
        pools["nobody"], pools[who] = start.weights[group], engine.round(1, start, ids)[0].weights[group]
    for name in sorted(theirs & pools["nobody"].keys()):  # a method may leave layers to their clients
        for one, other in (("the others", "nobody"), *([] if subject.mixes_layers else [("all", "its owners")])):
            same = torch.equal(pools[one][name], pools[other][name])
            assert same, f"{name} differs after a round with {one} from what it is with {other}"


def does_not_depend_on_the_order_of_clients(method: Subject, overrides: Overrides = ()) -> None:
    """The order of the cohort does not matter."""
    results: list[bytes] = []
    for ids in ([0, 1, 2, 3], [3, 1, 0, 2]):
        engine = _engine(method, overrides)
        state, _ = engine.round(1, engine.start(), ids)
        results.append(packed_state(state))
    assert results[0] == results[1], "the order of the ids changed the result"


def gives_the_same_bytes_on_workers(method: Subject, overrides: Overrides = ()) -> None:
    """The result does not depend on the process that runs a client; skipped if processes cannot be forked."""
    if not can_fork():
        return
    engine, threads = _engine(method, overrides, executor=Workers(2)), torch.get_num_threads()
    torch.set_num_threads(1)  # as in workers
    try:
        spread, alone = (engine, run_rounds(engine, 2)), _ran(method, overrides)
    finally:
        engine.close()
        torch.set_num_threads(threads)
    assert _everything(spread) == _everything(alone), "two processes give another result than one"


def agrees_when_stacked(method: Subject, overrides: Overrides = ()) -> None:
    """Stacked training gives the same results and notes as training one by one, up to rounding in double precision.

    With SGD, since Adam takes a full step for a gradient that is only rounding error, such as that of a bias before a
    BatchNorm.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        subject = quick(method, overrides, optimizer="sgd")
        world = World(batchnorm=True).fit_for(subject)
        engines = [Engine(subject, toy_federation(world), executor=e) for e in (Sequential(), Stacked())]
        (alone, expected), (stacked, found) = (_evaluated(engine) for engine in engines)
    finally:
        torch.set_default_dtype(before)
    for mine, theirs in zip(stacked, alone, strict=True):
        for name, tensor in theirs.items():
            assert torch.allclose(mine[name], tensor, rtol=_ROUNDING, atol=_ROUNDING), f"{name} differs"
    assert found.keys() == expected.keys(), f"it reports {sorted(found)}, and {sorted(expected)} one by one"
    for name, value in expected.items():
        assert math.isclose(found[name], value, rel_tol=_ROUNDING, abs_tol=_ROUNDING), f"the note {name} differs"


def keeps_what_is_frozen(method: Subject, overrides: Overrides = ()) -> None:
    """Frozen tensors stay as built, on clients and on the server, and are never sent."""
    for executor in (overhearing := Overhearing(), Stacked()):
        engine = _engine(method, overrides, world=World(batchnorm=True, frozen=True), executor=executor)
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
        engine = _engine(method, overrides, world=World(batchnorm=True, capacity=1.0, architectures=architectures))
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


def lets_go_of_streamed_replies(method: Subject) -> None:
    """A method that reads replies one at a time holds none of them while it waits for the next."""
    engine = Counting(quick(method), toy_federation(World(batchnorm=True).fit_for(quick(method))))
    run_rounds(engine, 2)
    assert engine.most <= 1, f"{engine.most} replies were in memory together; write `del reply` at the end of the loop"


def survives_a_missing_reply(method: Subject, overrides: Overrides = ()) -> None:
    """A client's failure loses its reply and nothing else."""
    engine = _engine(method, overrides, executor=Without(1), tolerate_failures=True)
    state, before = engine.start(), engine.store.read(1)
    for number in (1, 2):
        state, report = engine.round(number, state, [0, 1, 2, 3])
        assert set(report.failures) == {1}, f"expected client 1 to fail, found {sorted(report.failures)}"
    assert engine.store.read(1) == before, "the failed client's store has changed"


def works_with_newcomers(method: Subject, overrides: Overrides = ()) -> None:
    """Cohorts of one, clients and an architecture first drawn in a later round, and classes that nobody drawn has.

    Everybody's model, that of a client which never took part too, predicts numbers.
    """
    for labels in (CLASSES, CLASSES // 2):
        engine = _engine(method, overrides, world=World(batchnorm=True, labels=labels))
        state = run_rounds(engine, 3, iter([[0], [2], [1, 2]]))
        test = engine.federation.test
        assert test is not None
        for id in engine.federation.sites:
            outputs = predict(engine.inference_model(state, id), test)
            assert outputs.isfinite().all(), f"client {id} predicts {outputs[~outputs.isfinite()][0]}"


def works_with_odd_data(method: Subject) -> None:
    """Nets of another width, classes that a client lacks, a client with one example, and one whose last batch is one.

    Three rounds, the last without the client of one example; then everybody's model predicts numbers.
    """
    subject = quick(method)
    world = World(width=24, labels=CLASSES - 1).fit_for(subject)
    federation = toy_federation(world)
    few = {id: federation.sites[id].train.take(torch.arange(count)) for id, count in ((0, 1), (1, 17))}
    sites = {id: replace(site, train=few.get(id, site.train)) for id, site in federation.sites.items()}
    engine = Engine(subject, replace(federation, sites=sites))
    state = run_rounds(engine, 3, iter([[0, 1, 2, 3], [0, 2], [1, 3]]))
    test = engine.federation.test
    assert test is not None
    for id in engine.federation.sites:
        outputs = predict(engine.inference_model(state, id), test)
        assert outputs.isfinite().all(), f"client {id} predicts {outputs[~outputs.isfinite()][0]}"


def sends_what_it_documents(method: Subject, overrides: Overrides = ()) -> None:
    """The entries that the engine counted are those of the Wire section, and their sizes match its formulas.

    A variant may omit entries; those that it sends are documented for it or for the defaults.
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
    """Every reply fits the declaration in `replies`, and corrupted replies are refused."""
    heard = Hearing()
    engine = _engine(method, overrides, executor=heard, tolerate_failures=True)  # so that refusals are recorded
    run_rounds(engine, 3)
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


def trains_no_more_than_fits(method: Subject) -> None:
    """Where the width is cut, a client trains a net of its capacity, and replies just the tensors that it was sent.

    Exits, which are not part of the full net, do not count.
    """
    for capacity in (None, _small(method)) if _cuts_widths(method) else ():
        engine = _engine(method, world=World(batchnorm=True, capacity=capacity), executor=(heard := Hearing()))
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
    engine = _engine(method, world=World(batchnorm=True, capacity=_small(method)), executor=(heard := Hearing()))
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


def resumes_to_the_same_bytes(method: Subject, overrides: Overrides = ()) -> None:
    """Two rounds, and two rounds with a stop between them, give the same result."""
    with tempfile.TemporaryDirectory() as place:
        whole, halves = Path(place) / "whole", Path(place) / "halves"
        straight = _run(method, overrides, whole, rounds=2)
        _run(method, overrides, halves, rounds=1)
        resumed = _run(method, overrides, halves, rounds=2)
    assert straight == resumed, "a resumed run ends in another checkpoint or other records than an uninterrupted one"


def learns_a_toy_task(method: Subject) -> None:
    """After twelve rounds of a linear problem the evaluated models are well above chance."""
    subject = quick(method, epochs=2)
    engine = Engine(subject, toy_federation(World(batchnorm=True).fit_for(subject)))
    state = run_rounds(engine, 12)
    test = engine.federation.test
    assert test is not None
    shares = [
        float((predict(engine.inference_model(state, id), test).argmax(1) == test.labels).float().mean())
        for id in engine.federation.sites
    ]
    mean = sum(shares) / len(shares)
    assert mean > _LEARNT, f"accuracy {mean:.2f} on {CLASSES} classes, expected above {_LEARNT}"


def _cuts_widths(method: Subject) -> bool:
    return Need.WIDTH_SLICES in quick(method).needs()


def _small(method: Subject) -> float:
    """A small capacity: a quarter, or the least that the method can give a part to train."""
    return max(_QUARTER, min(getattr(quick(method), "levels", (_QUARTER,))))


def _complaint(declared: Schema, reply: Any) -> str | None:
    """Why a reply is refused; None if it is not."""
    try:
        declared.check(reply)
    except Misfit as misfit:
        return str(misfit)
    return None


class Counting(Engine):
    """An engine that counts the streamed replies that are in memory when another one comes.

    Attributes:
        most: such replies, the one that comes included; 0 if none was streamed.
    """

    most = 0

    def exchange(self, handler: Callable[..., Any], messages: Mapping[ClientId, Message], place: Any) -> Arriving:
        """The replies, each with a weak reference that tells when the method has let go of it."""
        arriving, together = super().exchange(handler, messages, place), False
        seen: list[weakref.ref[Message]] = []

        def hold() -> None:
            nonlocal together
            together = True

        def counted() -> Iterator[tuple[ClientId, Message]]:
            for id, reply in arriving:
                seen.append(weakref.ref(reply))
                alive = sum(one() is not None for one in seen)
                self.most = self.most if together else max(self.most, alive)
                yield id, reply
                del reply

        return Arriving(counted(), arriving.failures, hold)


class Without(Sequential):
    """An executor under which one client always fails."""

    def __init__(self, absent: ClientId) -> None:
        self._absent = absent

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks, a failure for the absent client's calls."""
        for job in (task.make() for task in tasks):
            if isinstance(job, Call) and job.client == self._absent:
                yield Failure(job.client, job.handler, "absent")
            else:
                yield host.execute(job)


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


_CONTRACT: tuple[Callable[[Subject], None], ...] = (
    documentation_is_complete,
    is_a_frozen_value,
    hyper_parameters_round_trip,
    names_its_variants,
    keeps_what_it_says,
    stacks_as_it_says,
    is_deterministic,
    private_noise_never_repeats,
    leaves_the_global_generator_alone,
    does_not_change_the_state_it_is_given,
    leaves_bystanders_alone,
    leaves_a_layer_to_its_owners,
    does_not_depend_on_the_order_of_clients,
    gives_the_same_bytes_on_workers,
    agrees_when_stacked,
    keeps_what_is_frozen,
    starts_as_every_method_does,
    lets_go_of_streamed_replies,
    survives_a_missing_reply,
    works_with_newcomers,
    works_with_odd_data,
    sends_what_it_documents,
    declares_its_replies,
    trains_no_more_than_fits,
    leaves_alone_what_nobody_covers,
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
    leaves_a_layer_to_its_owners,
    does_not_depend_on_the_order_of_clients,
    gives_the_same_bytes_on_workers,
    agrees_when_stacked,
    keeps_what_is_frozen,
    starts_as_every_method_does,
    survives_a_missing_reply,
    works_with_newcomers,
    sends_what_it_documents,
    declares_its_replies,
    shares_its_exits,
    predicts_with_exits_as_it_says,
    resumes_to_the_same_bytes,
)
"""The checks of a variant: all but `learns_a_toy_task`, which takes long."""


def _engine(
    method: Subject,
    overrides: Overrides = (),
    seed: int = 0,
    world: World = World(batchnorm=True),
    **options: Any,
) -> Engine:
    subject = quick(method, overrides)
    return Engine(subject, toy_federation(world.fit_for(subject)), seed=seed, **options)


def _evaluated(engine: Engine) -> tuple[list[Weights], dict[str, float]]:
    """After two rounds with everyone, the models that clients would use, and the last round's notes."""
    state, ids = engine.start(), sorted(engine.federation.sites)
    state, _ = engine.round(1, state, ids)
    state, report = engine.round(2, state, ids)
    return [weights_of(engine.inference_model(state, id)) for id in ids], report.notes


def _ran(method: Subject, overrides: Overrides = (), seed: int = 0) -> tuple[Engine, Any]:
    engine = _engine(method, overrides, seed)
    return engine, run_rounds(engine, 2)


def _everything(ran: tuple[Engine, Any]) -> bytes:
    """The method's state and all clients' states."""
    engine, state = ran
    return packed_state(state) + b"".join(engine.store.read(id) or b"" for id in sorted(engine.federation.sites))


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


def _run(method: Subject, overrides: Overrides, folder: Path, rounds: int) -> tuple[str, ...]:
    """The digests of the checkpoint and of the records that a run leaves in its folder."""
    subject = quick(method, overrides)
    federation = toy_federation(World(batchnorm=True).fit_for(subject))
    result = Run(subject, federation, RunConfig(rounds=rounds, cohort_fraction=0.5), folder).run()
    assert result.checkpoint is not None
    return result.checkpoint.digest, *(digest((folder / name).read_bytes()) for name in (ROUNDS, CLIENTS))


def _sent(traffic: Traffic, direction: str) -> dict[str, int]:
    return dict(traffic.down if direction == "down" else traffic.up)
