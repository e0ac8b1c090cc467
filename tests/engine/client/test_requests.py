"""Forward passes, gradients, statistics and modules that the engine provides, at clients and on the server."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.federation import Federation, Site, empty_like
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in
from potluck.core.ground.tree import unpack
from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.core.nets.weights import load, weights_of
from potluck.core.requests.beside_training import Gradient, NormStatistics, Predict
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.roles import Supervised
from potluck.engine.client.requests import carry_out
from potluck.engine.client.session import ContractError
from potluck.engine.client.training import train
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers, can_fork
from potluck.engine.numerics.numerics import PLAIN, Numerics
from potluck.engine.rounds.engine import Engine
from potluck.models.contract import Exit, StagedNet, with_exits
from potluck.models.split import split

EXACTLY = {"rtol": 0, "atol": 0}
KEY = fold_in(0, "request")
SGD = LocalTraining("sgd", lr=0.1, batch_size=4)
IDS = (0, 1, 2)


def staged():
    stem = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU())
    return StagedNet(
        {"stem": stem, "body": nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.ReLU())}, nn.Linear(5, 2)
    )


def augmenting(inputs, rng):
    return inputs if rng is None else inputs + 100


def points(count=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Examples(torch.randn(count, 2, generator=generator), torch.arange(count) % 2, augmenting)


def federation():
    sites = {id: Site(id, "staged", points(10 + id, id), empty_like(points()), empty_like(points())) for id in IDS}
    return Federation(sites, {"staged": staged}, "staged", num_classes=2, public=points(12, 9))


def trained_net():
    torch.manual_seed(3)
    net = staged()
    for _ in range(5):
        net(3 + torch.randn(8, 2))
    return net


@pytest.fixture(autouse=True)
def global_generator_put_back():
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def asked(request, computing=PLAIN):
    return carry_out(request, KEY, computing)


# Predict


def test_predict_is_the_net_in_evaluation_mode_in_stored_order_and_leaves_it_alone():
    net, data = trained_net(), points().take(torch.tensor([5, 2, 9, 1, 7]))
    before, drawn = weights_of(net), torch.get_rng_state()
    found = asked(Predict(net, data, batch_size=2))
    assert net.training
    assert_close(weights_of(net), before, **EXACTLY)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not found.requires_grad
    assert_close(found, net.eval()(data.inputs[data.rows]).detach())


def test_predict_gives_the_parts_that_are_asked_for_in_their_order():
    net, data = trained_net().eval(), points(8)
    features, extracted = asked(Predict(net, data, parts=("features", "extracted")))
    parts = split(net)
    assert_close(extracted, parts.extractor(data.inputs).detach())
    assert_close(features, parts.intermediate(parts.extractor(data.inputs)).detach())
    (alone,) = asked(Predict(net, data, parts=("features",)))
    assert_close(alone, features, **EXACTLY)
    assert_close(asked(Predict(net, data, parts="features")), features, **EXACTLY)
    both = asked(Predict(net, data, parts=("outputs", "features")))
    assert_close(both[0], asked(Predict(net, data)), **EXACTLY)


def test_predict_gives_the_outputs_of_all_exits_the_nets_own_last():
    net, data = trained_net().eval(), points(8)
    exits = {"stem": Exit(nn.Identity(), nn.Linear(4, 2)), "body": Exit(nn.Identity(), nn.Linear(5, 2))}
    found, outputs = asked(Predict(with_exits(net, exits), data, parts=("exits", "outputs"), batch_size=3))
    assert found.shape == (8, 3, 2)
    assert_close(found[:, 0], exits["stem"](net.stages[0](data.inputs)).detach())
    assert_close(found[:, -1], outputs, **EXACTLY)
    assert_close(outputs, asked(Predict(net, data, batch_size=3)), **EXACTLY)


def test_predict_says_which_parts_a_net_of_ones_own_has():
    class Own(nn.Linear):
        def part_outputs(self, x):
            return {"features": x, "outputs": self(x)}

    with pytest.raises(TypeError, match=r"^Own has no part 'exits'; expected one of features, outputs$"):
        asked(Predict(Own(2, 2), points(8), parts="exits"))


def test_predict_computes_as_the_run_does_and_answers_in_single_precision():
    net, data = trained_net(), points()
    exact, rough = (asked(Predict(net, data), Numerics(precision)) for precision in ("fp32", "bf16"))
    assert rough.dtype == torch.float32
    assert torch.equal(rough, rough.bfloat16().float())
    assert not torch.equal(rough, exact)
    assert_close(rough, exact, rtol=0.1, atol=0.1)


def test_what_is_predicted_can_be_learnt_from():
    net, data = trained_net(), points(8)
    lesson = data.unaugmented().with_columns(teacher=asked(Predict(net, data)))

    def objective(net, batch, extras):
        return (net(batch.inputs) * batch.columns["teacher"]).mean()

    assert train(Fit(net, objective, lesson, SGD), KEY).steps == 2


def test_parts_of_a_net_without_parts_are_refused_by_name():
    with pytest.raises(
        TypeError,
        match=r"^Linear cannot be split into extractor, .* a federation has built; give its",
    ):
        asked(Predict(nn.Linear(2, 2), points(), parts="features"))
    with pytest.raises(ConfigError, match=r"^parts: expected .*found 'feature'; nearest: 'features'$"):
        Predict(staged(), points(), parts="feature")
    with pytest.raises(ConfigError, match=r"^batch_size: expected at least 1, found 0$"):
        Predict(staged(), points(), batch_size=0)


# Gradient


def test_gradient_is_that_of_the_mean_loss_over_all_data_and_changes_nothing():
    net, data = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), points(10)
    net[2].bias.requires_grad_(False)
    expected = torch.autograd.grad(
        F.cross_entropy(net(data.inputs), data.targets), [net[0].weight, net[0].bias, net[2].weight]
    )
    before = weights_of(net)
    found = asked(Gradient(net, Supervised(F.cross_entropy), data, batch_size=4))
    assert_close(found, dict(zip(("0.weight", "0.bias", "2.weight"), expected, strict=True)))
    assert_close(weights_of(net), before, **EXACTLY)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_gradient_takes_batch_statistics_and_leaves_the_running_ones():
    net, data = trained_net(), points(10)
    before = weights_of(net)
    first = asked(Gradient(net, Supervised(F.cross_entropy), data))
    net.stages[0][1].running_mean.add_(7)
    assert_close(asked(Gradient(net, Supervised(F.cross_entropy), data)), first, **EXACTLY)
    net.stages[0][1].running_mean.copy_(before["stages.stem.1.running_mean"])
    assert_close(weights_of(net), before, **EXACTLY)


def test_gradient_of_what_the_objective_does_not_reach_is_zero():
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    found = asked(Gradient(net, lambda net, batch, extras: net["a"](batch.inputs).mean(), points(6)))
    assert not found["b.weight"].any()
    assert found["a.weight"].any()


def test_gradient_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"^0 examples and 2 parameters; expected at least 1 of each$"):
        asked(Gradient(nn.Linear(2, 2), Supervised(F.cross_entropy), empty_like(points())))


# Measure


def test_measure_sets_the_statistics_of_the_weights_as_they_are():
    net, data = trained_net(), points(20)
    mine = weights_of(net)
    assert asked(NormStatistics(net, data, batch_size=20)) == 1
    hidden = net.stages[0][0](data.inputs).detach()
    assert_close(net.stages[0][1].running_mean, hidden.mean(0))
    assert_close(net.stages[0][1].running_var, hidden.var(0))
    parameters = dict(net.named_parameters())
    assert_close(parameters, {name: mine[name] for name in parameters}, **EXACTLY)


def test_measure_takes_batches_in_random_order():
    ordered = Examples(torch.arange(40.0).view(20, 2), torch.zeros(20, dtype=torch.int64))
    net = nn.Sequential(nn.BatchNorm1d(2))
    assert asked(NormStatistics(net, ordered, batch_size=5)) == 4
    in_order = torch.stack([part.var(0) for part in ordered.inputs.split(5)]).mean(0)
    assert (net[0].running_var > 2 * in_order).all()


# In handlers and on the server


@dataclass(frozen=True)
class Asks(Method):
    """Every client is asked for everything; its state is the replies."""

    def init(self, server):
        return None

    def round(self, state, cohort, server):
        return cohort.ask(self.work, Message(numbers=torch.arange(3.0)))


class AsksForAll(Asks):
    @on_client
    def work(self, client, message):
        if client.id == 1:  # another rhythm than the others'
            yield NormStatistics(client.model, client.train, 4)
        outputs, features = yield Predict(client.model, client.train, parts=("outputs", "features"))
        report = yield Fit(client.model, client.objective, client.train.with_columns(teacher=outputs), SGD)
        gradient = yield Gradient(client.model, client.objective, client.train)
        batches = yield NormStatistics(client.model, client.train, 4)
        after = yield Predict(client.model, client.train)
        return Message(
            outputs=outputs, features=features, loss=report.loss, gradient=gradient, batches=batches, after=after
        )


def leaves(message):
    return {name: message[name] for name in message}


@pytest.mark.parametrize("executor", [Stacked, pytest.param(lambda: Workers(2, Stacked()), marks=pytest.mark.skipif(
    not can_fork(), reason="processes cannot be forked"))])  # fmt: skip
def test_every_executor_answers_alike(executor):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        plain, other = (Engine(AsksForAll(), federation(), executor=e) for e in (Sequential(), executor()))
        (expected, mine), (found, theirs) = (engine.round(1, None, IDS) for engine in (plain, other))
        other.close()
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
    for id in IDS:
        assert_close(leaves(found[id]), leaves(expected[id]), rtol=1e-9, atol=1e-9)
    assert mine.losses.keys() == theirs.losses.keys() == set(IDS)  # a fit with columns counts as the client's own


@pytest.mark.parametrize(
    ("request_of", "name"),
    [
        (lambda client: Predict(client.model, client.train), "Predict"),
        (lambda client: Gradient(client.model, client.objective, client.train), "Gradient"),
        (lambda client: NormStatistics(client.model, client.train), "NormStatistics"),
        (lambda client: Fit(client.model, client.objective, client.train, SGD), "Fit"),
    ],
)
@pytest.mark.parametrize("executor", [Sequential, Stacked])
def test_a_request_that_is_never_yielded_is_noticed(request_of, name, executor):
    class Forgets(Asks):
        @on_client
        def work(self, client, message):
            yield Predict(client.model, client.train)
            request_of(client)
            return Message()

    complaint = rf"^Forgets\.work built a {name} on client 0 but never yielded it: write `yield {name}\(\.\.\.\)`$"
    with pytest.raises(ContractError, match=complaint):
        Engine(Forgets(), federation(), executor=executor()).round(1, None, IDS)


@pytest.mark.parametrize("executor", [Sequential, Stacked])
def test_an_error_in_a_request_is_the_clients_failure(executor):
    class Fails(Asks):
        @on_client
        def work(self, client, message):
            yield Predict(client.model if client.id else nn.Linear(7, 2), client.train)
            return Message(id=client.id)

    engine = Engine(Fails(), federation(), executor=executor(), tolerate_failures=True)
    replies, report = engine.round(1, None, IDS)
    assert sorted(replies) == [1, 2]
    assert list(report.failures) == [0]


def test_the_server_asks_as_clients_do():
    class OnTheServer(Asks):
        def round(self, state, cohort, server):
            net, public = server.build(), server.public
            predicted = server.predict(Predict(net, public))
            gradient = server.gradient(Gradient(net, Supervised(F.cross_entropy), public))
            batches = server.measure(NormStatistics(net, public, 4))
            return predicted, gradient, batches, net

    (predicted, gradient, batches, net), _ = Engine(OnTheServer(), federation()).round(1, None, IDS)
    public, fresh = federation().public, Engine(Asks(), federation()).server(0).build()
    assert_close(predicted, asked(Predict(fresh, public)), **EXACTLY)
    assert gradient.keys() == dict(fresh.named_parameters()).keys()
    assert batches == 3
    assert not torch.equal(net.stages[0][1].running_mean, fresh.stages[0][1].running_mean)


def test_a_model_to_be_evaluated_may_be_measured_but_not_trained():
    class Measures(Asks):
        @on_client
        def inference_model(self, client, message):
            yield NormStatistics(client.model, client.train, 4)
            return client.model

    class TrainsToBeJudged(Asks):
        @on_client
        def inference_model(self, client, message):
            yield Fit(client.model, client.objective, client.train, SGD)
            return client.model

    one, two = (Engine(Measures(), federation()).inference_model(None, 0) for _ in range(2))
    assert one.stages[0][1].running_mean.any()
    assert_close(weights_of(one), weights_of(two), **EXACTLY)
    with pytest.raises(
        ContractError, match=r"inference_model yielded Fit; expected a Predict, Gradient or NormStatistics$"
    ):
        Engine(TrainsToBeJudged(), federation()).inference_model(None, 0)


# Nets that objectives only read


def test_a_frozen_net_is_read_in_evaluation_mode_and_lets_gradients_through():
    net, reader, data = nn.Linear(2, 2), trained_net(), points(8)
    before, seen = weights_of(reader), []

    def objective(net, batch, extras):
        seen.append((extras["reader"].training, [p.requires_grad for p in extras["reader"].parameters()]))
        return extras["reader"](net(batch.inputs)).square().mean()

    start = weights_of(net)
    train(Fit(net, objective, data, SGD, frozen={"reader": reader}), KEY)
    assert not torch.equal(net.weight, start["weight"])
    assert_close(weights_of(reader), before, **EXACTLY)
    assert not any(training or any(requires) for training, requires in seen)
    assert reader.training
    assert all(p.requires_grad and p.grad is None for p in reader.parameters())


def test_a_frozen_net_is_given_to_gradients_too():
    reader = nn.Linear(2, 1)
    found = asked(
        Gradient(
            nn.Linear(2, 2), lambda net, b, extras: extras["r"](net(b.inputs)).mean(), points(6), frozen={"r": reader}
        )
    )
    assert found["weight"].any()


def test_a_frozen_net_must_not_be_the_one_that_learns_or_have_the_name_of_an_extra():
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"^frozen: 'teacher' shares weights with the net that is trained"):
        train(Fit(net, Supervised(F.cross_entropy), points(8), SGD, frozen={"teacher": nn.Sequential(net)}), KEY)
    with pytest.raises(ValueError, match=r"^frozen: 'a' is also the name of one of the extras"):
        Fit(net, Supervised(F.cross_entropy), points(8), SGD, extras={"a": 1}, frozen={"a": nn.Linear(2, 2)})


# A method's own modules


def draws_a_layer():
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1))


class HasAModule(Asks):
    def round(self, state, cohort, server):
        mine = [weights_of(server.module(name, draws_a_layer)) for name in ("a", "a", "b")]
        return mine, cohort.ask(self.work, Message())

    @on_client
    def work(self, client, message):
        kept = client.module("a", draws_a_layer)
        assert client.module("a", draws_a_layer) is kept
        forgotten = client.module("c", draws_a_layer, keep=False)
        found = {"a": weights_of(kept), "c": weights_of(forgotten)}
        if client.id == 0 or "done" not in client.state:  # client 1 uses it in its first round only
            for net in (kept, forgotten):
                load(net, {name: tensor + 1 for name, tensor in weights_of(net).items()})
        client.state["done"] = True
        return Message(**found, architecture=client.architecture, twin=weights_of(client.twin()))


@pytest.mark.usefixtures("global_generator_unchanged")
def test_modules_start_alike_everywhere_and_a_clients_lasts():
    engine, again = (Engine(HasAModule(), federation(), seed=s) for s in (5, 6))
    (one, replies), _ = engine.round(1, None, IDS)
    assert_close(one[0], one[1], **EXACTLY)
    assert not torch.equal(one[0]["0.weight"], one[2]["0.weight"])
    for reply in replies.values():
        assert_close(reply["a"], one[0], **EXACTLY)
        assert reply["architecture"] == "staged"
        assert_close(reply["twin"], weights_of(engine.server(0).build("staged")), **EXACTLY)
    (two, later), _ = engine.round(2, None, IDS)
    assert_close(two, one, **EXACTLY)
    for id in IDS:
        assert_close(later[id]["a"], {name: tensor + 1 for name, tensor in one[0].items()}, **EXACTLY)
        assert_close(later[id]["c"], replies[id]["c"], **EXACTLY)
    assert not torch.equal(again.round(1, None, IDS)[0][0][0]["0.weight"], one[0]["0.weight"])


def test_a_module_that_is_not_used_in_a_call_is_kept():
    class Sometimes(Asks):
        @on_client
        def work(self, client, message):
            if not client.state:
                client.module("a", draws_a_layer)
            client.state["seen"] = True
            return Message()

    engine = Engine(Sometimes(), federation())
    engine.round(1, None, IDS)
    first = unpack(engine.store.read(0))["modules"]
    engine.round(2, None, IDS)
    assert first.keys() == {"a"}
    assert_close(unpack(engine.store.read(0))["modules"], first, **EXACTLY)


def test_a_batch_is_named():
    batch = Batch(torch.zeros(2, 1), torch.zeros(2), {"teacher": torch.ones(2)})
    inputs, targets, columns = batch
    assert (batch.inputs is inputs, batch.targets is targets, batch.columns is columns) == (True, True, True)
