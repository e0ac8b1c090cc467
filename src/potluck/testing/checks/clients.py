"""What a client's absence, novelty or odd data do to the others, and whether clients learn."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.core.nets.weights import Weights
from potluck.core.requests.inference import predict
from potluck.core.roles import Arriving, Failure
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Call
from potluck.engine.executors import Pending
from potluck.engine.executors.sequential import Sequential
from potluck.engine.rounds.engine import Engine
from potluck.parts.sharing import SharesWeights
from potluck.testing.checks.subjects import Overrides, Subject, engine_for
from potluck.testing.worlds import CLASSES, World, quick, run_rounds, toy_federation

_LEARNT = 0.5


def leaves_bystanders_alone(method: Subject, overrides: Overrides = ()) -> None:
    """The state of a client that was not drawn is unchanged."""
    engine = engine_for(method, overrides)
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
        engine = engine_for(method, overrides)
        start = engine.start()
        pools["nobody"], pools[who] = start.weights[group], engine.round(1, start, ids)[0].weights[group]
    for name in sorted(theirs & pools["nobody"].keys()):  # a method may leave layers to their clients
        for one, other in (("the others", "nobody"), *([] if subject.mixes_layers else [("all", "its owners")])):
            same = torch.equal(pools[one][name], pools[other][name])
            assert same, f"{name} differs after a round with {one} from what it is with {other}"


def lets_go_of_streamed_replies(method: Subject) -> None:
    """A method that reads replies one at a time holds none of them while it waits for the next."""
    engine = Counting(quick(method), toy_federation(World(batchnorm=True).fit_for(quick(method))))
    run_rounds(engine, 2)
    assert engine.most <= 1, f"{engine.most} replies were in memory together; write `del reply` at the end of the loop"


def survives_a_missing_reply(method: Subject, overrides: Overrides = ()) -> None:
    """A client's failure loses its reply and nothing else."""
    engine = engine_for(method, overrides, executor=Without(1), tolerate_failures=True)
    state, before = engine.start(), engine.store.read(1)
    for number in (1, 2):
        state, report = engine.round(number, state, [0, 1, 2, 3])
        others = [failure for id, failure in report.failures.items() if id != 1]
        assert not others, f"only the reply of client 1 is missing, and {others[0]}"
        assert 1 in report.failures, "client 1 did not fail"
    assert engine.store.read(1) == before, "the failed client's store has changed"


def works_with_newcomers(method: Subject, overrides: Overrides = ()) -> None:
    """Cohorts of one, clients and an architecture first drawn in a later round, and classes that nobody drawn has.

    Everybody's model, that of a client which never took part too, predicts numbers.
    """
    for labels in (CLASSES, CLASSES // 2):
        engine = engine_for(method, overrides, world=World(batchnorm=True, labels=labels))
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


def learns_a_toy_task(method: Subject) -> None:
    """After twelve rounds of a linear problem the evaluated models are well above chance."""
    subject = quick(method, epochs=2, plain_lr=0.1)
    engine = Engine(subject, toy_federation(World(batchnorm=True).fit_for(subject)))
    state = run_rounds(engine, 12)
    test = engine.federation.test
    assert test is not None
    shares = [
        float((predict(engine.inference_model(state, id), test).argmax(1) == test.labels).float().mean())
        for id in engine.federation.sites
    ]
    mean = sum(shares) / len(shares)
    assert mean > _LEARNT, f"accuracy {mean:.2f} on {CLASSES} classes after 12 rounds, expected above {_LEARNT}"


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
