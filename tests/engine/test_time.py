"""The number of the round, learning rates that depend on it, and optimisers that last."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import Key
from potluck.core.ground.tree import unpack
from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.core.nets.weights import minus, parameters_of, weights_of
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.requests.schedule import Schedule
from potluck.core.roles import Supervised
from potluck.engine.client.training import train
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers, can_fork
from potluck.engine.rounds.engine import Engine
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.methods import get_method
from potluck.testing.worlds import World, toy_federation

HALVES = Schedule("exponential", factor=0.5)
FULL = 10**6  # examples a batch: all
FEDERATION = toy_federation(World(clients=3, architectures=1))
EXECUTORS = [Sequential, Stacked, *([lambda: Workers(2)] if can_fork() else [])]


@dataclass(frozen=True)
class State:
    told: Any


@dataclass(frozen=True)
class Tells(Method):
    """Its state is the round, as server and clients know it."""

    def init(self, server):
        return State([server.round])

    def round(self, state, cohort, server):
        replies = cohort.ask(self.work, Message())
        return State([server.round, *replies.entries("round")])

    @on_client
    def work(self, client, message):
        return Message(round=client.round)

    def inference_message(self, state, client_id, server):
        return Message(round=server.round)

    @on_client
    def inference_model(self, client, message):
        return nn.Threshold(client.round, message["round"])


@dataclass(frozen=True)
class Steps(Method):
    """Everybody, and the server, takes one step from the same weights, on all examples."""

    training: LocalTraining = LocalTraining("sgd", lr=0.5, batch_size=FULL, schedule=HALVES)
    keeps_model = False

    def init(self, server):
        return State({})

    def round(self, state, cohort, server):
        replies = cohort.ask(self.work, Message())
        net = server.build("toy1")
        before = parameters_of(net)
        server.fit(Fit(net, Supervised(FEDERATION.criterion), FEDERATION.sites[0].train, self.training))
        own = minus(parameters_of(net), before)
        return State({"clients": [reply["step"] for reply in replies.values()], "server": own})

    @on_client
    def work(self, client, message):
        before = parameters_of(client.model)
        yield Fit(client.model, client.objective, client.train, self.training)
        return Message(step=minus(parameters_of(client.model), before))


def played(method, rounds, executor=Sequential, federation=FEDERATION):
    """States after each round, and the engine."""
    engine = Engine(method, federation, executor=executor())
    state, states = engine.start(), []
    try:
        for number in range(1, rounds + 1):
            state, _ = engine.round(number, state, sorted(federation.sites))
            states.append(state)
    finally:
        engine.close()
    return engine, states


@pytest.mark.parametrize("executor", EXECUTORS)
def test_round__is_the_same_number_at_the_server_and_at_every_client(executor):
    _, states = played(Tells(), 2, executor)
    assert [state.told for state in states] == [[1] * 4, [2] * 4]


def test_round__is_none_before_the_first_and_the_last_one_at_inference():
    engine = Engine(Tells(), FEDERATION)
    state = engine.start()
    assert state.told == [0]
    assert (engine.inference_model(state, 1).threshold, engine.inference_model(state, 1).value) == (0, 0)
    engine, (*_, state) = played(Tells(), 2)
    assert (engine.inference_model(state, 1).threshold, engine.inference_model(state, 1).value) == (2, 2)


def test_round__is_what_it_was_when_a_run_that_is_finished_is_evaluated_again(tmp_path):
    config = RunConfig(rounds=2, executor="sequential")
    Run(get_method("fedavg")(), FEDERATION, config, tmp_path).run()
    again = Run(get_method("fedavg")(), FEDERATION, config, tmp_path)
    again.load()
    assert again._engine.server(0).round == 2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_schedule__halves_the_step_of_clients_and_server_in_every_executor(executor):
    _, (first, second, third) = played(Steps(), 3, executor)
    for later, share in ((second, 0.5), (third, 0.25)):
        for whole, part in zip(first.told["clients"], later.told["clients"], strict=True):
            assert_close(part, {name: share * tensor for name, tensor in whole.items()}, rtol=1e-3, atol=1e-6)
        assert_close(
            later.told["server"],
            {name: share * tensor for name, tensor in first.told["server"].items()},
            rtol=1e-3,
            atol=1e-6,
        )


def test_schedule__reaches_what_corrects_steps_too():
    """Scaffold divides the way gone by the rate of the round; the rate is in its fixed point."""
    training = LocalTraining("sgd", lr=0.1, batch_size=FULL, schedule=Schedule("steps", factor=0.1, milestones=(1,)))
    scaffold = get_method("scaffold")(training)
    one = replace(FEDERATION, sites={0: FEDERATION.sites[0]})
    _, (_, state) = played(scaffold, 2, federation=one)
    # One client, one full step: c is the gradient at the weights of the second round, whatever the rate.
    still = get_method("scaffold")(replace(training, lr=0.1, schedule=Schedule()))
    _, (_, expected) = played(still, 2, federation=one)
    assert_close(state.control, expected.control, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("training", [LocalTraining("adamw", weight_decay=0.1), LocalTraining("RMSprop")])
def test_stacked__trains_one_by_one_with_optimisers_that_cannot_be_stacked(training, caplog):
    caplog.set_level(logging.INFO)
    method = get_method("fedavg")(training)
    _, (*_, alone) = played(method, 2)
    _, (*_, stacked) = played(method, 2, Stacked)
    assert f"its optimizer is {training.optimizer}" in caplog.text
    for group, weights in alone.weights.items():
        for name, tensor in weights.items():
            assert torch.equal(tensor, stacked.weights[group][name])


@pytest.fixture
def in_double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("training", [LocalTraining(lr=0.1), LocalTraining("sgd", lr=0.1, momentum=0.9)])
def test_persist__makes_two_rounds_of_three_steps_one_of_six(executor, training):
    federation = toy_federation(World(clients=2, architectures=1))

    def ends(rounds, **changes):
        method = get_method("local")(replace(training, batch_size=FULL, **changes))
        engine, (*_, state) = played(method, rounds, executor, federation)
        return weights_of(engine.inference_model(state, 1))

    whole = ends(1, steps=6)
    assert_close(ends(2, steps=3, persist=True), whole, rtol=1e-9, atol=1e-9)
    with pytest.raises(AssertionError):
        assert_close(ends(2, steps=3), whole, rtol=1e-3, atol=1e-3)


def test_persist__survives_a_run_that_is_resumed_and_adds_nothing_to_what_travels(tmp_path):
    def run(name, *rounds, **changes):
        method = get_method("fedavg")(LocalTraining(lr=0.01, **changes))
        for number in rounds:
            result = Run(method, FEDERATION, RunConfig(rounds=number, executor="sequential"), tmp_path / name).run()
        return result

    whole, halves, without = run("whole", 3, persist=True), run("halves", 1, 3, persist=True), run("without", 3)
    assert whole.checkpoint.digest == halves.checkpoint.digest != without.checkpoint.digest
    assert [r.bytes_up + r.bytes_down for r in whole.rounds] == [r.bytes_up + r.bytes_down for r in without.rounds]


def test_persist__starts_afresh_where_the_weights_are_others():
    data, key = FEDERATION.sites[0].train, Key((1,))
    training = LocalTraining(lr=0.1, steps=2, persist=True)

    def fitted(width, moments=None):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, width), nn.Linear(width, 4))
        fit = Fit(net, Supervised(FEDERATION.criterion), data, training)
        fit.moments = moments
        train(fit, key)
        return fit

    narrow, wide = fitted(3), fitted(4)
    assert_close(weights_of(fitted(4, narrow.moments).net), weights_of(wide.net))
    again = fitted(4, wide.moments)
    assert not torch.equal(again.net[0].weight, wide.net[0].weight)
    assert float(again.moments[0]["state"]["0.weight"]["step"]) == 4


@dataclass(frozen=True)
class Trains(Method):
    """In each round asks for handlers, which train the client's model under these names."""

    rounds: tuple[tuple[tuple[str, str | None], ...], ...]
    training: LocalTraining = LocalTraining("sgd", lr=0.1, momentum=0.9, batch_size=FULL, persist=True)

    def init(self, server):
        return State(None)

    def round(self, state, cohort, server):
        for handler, name in self.rounds[server.round - 1]:
            cohort.ask(getattr(self, handler), Message(name=name))
        return state

    @on_client
    def one(self, client, message):
        yield Fit(client.model, client.objective, client.train, self.training, name=message.get("name"))
        return Message()

    @on_client
    def other(self, client, message):
        yield Fit(client.model, client.objective, client.train, self.training, name=message.get("name"))
        return Message()


@pytest.mark.parametrize(
    ("fits", "optimisers"),
    [
        ((("one", None), ("one", None)), (0, 0)),
        ((("one", None), ("other", None)), (0, 1)),
        ((("one", "train"), ("other", "train")), (0, 0)),
        ((("one", "distil"), ("one", "train")), (0, 1)),
        ((("one", "distil"), ("one", "train"), ("other", "distil"), ("one", "train")), (0, 1, 0, 1)),
    ],
)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.usefixtures("in_double_precision")
def test_persist__means_one_optimiser_for_all_fits_of_a_name(fits, optimisers, together):
    federation = toy_federation(World(clients=1, architectures=1))
    rounds = (fits,) if together else tuple((fit,) for fit in fits)
    engine, (*_, state) = played(Trains(rounds), len(rounds), federation=federation)
    net = played(Trains(()), 0, federation=federation)[0].inference_model(State(None), 0)
    lasting = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for _ in set(optimisers)]
    (data,) = federation.sites[0].train.batches(FULL)
    for place in optimisers:
        lasting[place].zero_grad()
        federation.criterion(net(data.inputs), data.targets).backward()
        lasting[place].step()
    assert_close(weights_of(engine.inference_model(state, 0)), weights_of(net), rtol=0, atol=1e-10)
    kept = unpack(engine.store.read(0))["moments"]
    assert sorted(kept) == sorted({handler if name is None else name for handler, name in fits})


def test_persist__is_refused_on_the_server():
    fit = Fit(nn.Linear(10, 4), lambda *_: None, FEDERATION.sites[0].train, LocalTraining(persist=True))
    with pytest.raises(ConfigError, match="persist: expected False in the server's training"):
        Engine(Tells(), FEDERATION).server(1).fit(fit)
