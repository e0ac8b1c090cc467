"""The engine and the client's host, played with methods that do one thing each."""

import itertools
import logging
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn

from potluck.core.federation import Federation, Site, empty_like
from potluck.core.ground.errors import ConfigError, DivergenceError, EntryError, WireError
from potluck.core.ground.tree import pack, unpack
from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.core.nets.scale import FULL
from potluck.core.nets.weights import frozen_of, learnt_of, parameters_of, weights_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.roles import ClientFailure, Failure
from potluck.core.schema import Schema, floats
from potluck.engine.client.session import ContractError
from potluck.engine.disk.store import ClientStore
from potluck.engine.executors.sequential import Sequential
from potluck.engine.rounds.engine import Engine
from potluck.models.mlp import mlp4

SGD = LocalTraining(optimizer="sgd", lr=0.1, batch_size=4)
IDS = (0, 1, 2, 3)


def narrow():
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.2), nn.Linear(3, 2))


def wide(scale=FULL):
    width = scale.of(8)
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def federation():
    """Four clients with eight examples each, two architectures."""
    generator = torch.Generator().manual_seed(0)
    examples = Examples(torch.randn(32, 2, generator=generator), torch.arange(32) % 2)
    sites = {
        id: Site(
            id,
            ("narrow", "wide")[id % 2],
            examples.take(torch.arange(8) + 8 * id),
            empty_like(examples),
            empty_like(examples),
            capacity=1 / (1 + id),
        )
        for id in IDS
    }
    return Federation(sites, {"narrow": narrow, "wide": wide}, server_architecture="wide", num_classes=2)


@pytest.fixture
def play(tmp_path):
    """Play rounds of a method with a new store; the engine, the last state and the last report."""
    folders = (tmp_path / str(number) for number in itertools.count())

    def played(method, rounds=1, ids=IDS, state=None, **options):
        engine = Engine(method, federation(), store=ClientStore(next(folders)), **options)
        report = None
        for number in range(1, rounds + 1):
            state, report = engine.round(number, state, ids)
        return engine, state, report

    return played


@dataclass(frozen=True)
class Asks(Method):
    """Asks every client to work on the same numbers; its state is the replies."""

    def round(self, state, cohort, server):
        return cohort.ask(self.work, Message(numbers=torch.arange(3.0)))


class Echoes(Asks):
    @on_client
    def work(self, client, message):
        return Message(numbers=message["numbers"], id=client.id)


class Trains(Asks):
    """Trains its own model and keeps count of the rounds; what it draws and learns is its reply."""

    @on_client
    def work(self, client, message):
        before = parameters_of(client.model)
        client.state["rounds"] = client.state.get("rounds", 0) + 1
        report = yield Fit(client.model, client.objective, client.train, SGD)
        return Message(
            before=before,
            after=parameters_of(client.model),
            own=torch.rand(2, generator=client.rng),
            common=torch.rand(2),
            rounds=client.state["rounds"],
            loss=report.loss,
        )


class TrainsWhatItIsSent(Trains):
    keeps_model = False


@dataclass(frozen=True)
class Fails(Asks):
    """Changes model and state, trains, and fails on some clients."""

    on: tuple[int, ...] = (1,)

    @on_client
    def work(self, client, message):
        client.state["seen"] = True
        nn.init.zeros_(client.model[0].weight)
        yield Fit(client.model, client.objective, client.train, SGD)
        if client.id in self.on:
            raise MemoryError("none\nleft")
        return Message(id=client.id)


def record(engine, client):
    return engine.store.read(client)


def equal(one, other):
    """Whether two replies, or two dicts of tensors, are the same bit for bit."""
    return pack(dict(one)) == pack(dict(other))


# What crosses the wire


def test_replies_hold_what_the_clients_sent_in_order_of_ids(play):
    _, replies, _ = play(Echoes(), ids=(3, 0, 2))
    assert list(replies) == [0, 2, 3]
    assert replies.entries("id") == [0, 2, 3]
    assert replies[0]["numbers"].tolist() == [0, 1, 2]


def test_no_tensor_is_shared_between_server_and_clients(play):
    received, sent, message = [], [], Message(numbers=torch.zeros(2))

    class Changes(Asks):
        def round(self, state, cohort, server):
            return cohort.ask(self.work, message)

        @on_client
        def work(self, client, message):
            message["numbers"].add_(1)
            received.append(message["numbers"])
            client.state["kept"] = message["numbers"]
            sent.append(torch.zeros(2))
            return Message(fresh=sent[-1], again=message["numbers"])

    engine, replies, _ = play(Changes())
    assert message["numbers"].tolist() == [0, 0]
    assert [tensor.tolist() for tensor in received] == [[1, 1]] * 4
    for reply, tensor in zip(replies.values(), sent, strict=True):
        reply["fresh"].add_(5)
        reply["again"].add_(5)
        assert tensor.tolist() == [0, 0]
    assert [tensor.tolist() for tensor in received] == [[1, 1]] * 4
    assert unpack(record(engine, 0))["state"]["kept"].tolist() == [1, 1]


def test_messages_are_read_back_from_bytes(play):
    types = []

    class Looks(Asks):
        def round(self, state, cohort, server):
            return cohort.ask(self.work, Message(w=nn.Parameter(torch.ones(2, 2)).T, gone=None))

        @on_client
        def work(self, client, message):
            types.append((type(message["w"]), message["w"].is_contiguous(), "gone" in message))
            return Message(w=nn.Parameter(torch.ones(1)))

    _, replies, _ = play(Looks(), ids=(0,))
    assert types == [(torch.Tensor, True, False)]
    assert type(replies[0]["w"]) is torch.Tensor


def test_bytes_are_the_sizes_of_the_messages(play):
    class Sends(Asks):
        def round(self, state, cohort, server):
            cohort.ask(self.work, {i: Message(w=torch.zeros(i), rate=0.5) for i in cohort.ids})
            return cohort.ask(self.work, Message(w=torch.zeros(10)))

        @on_client
        def work(self, client, message):
            return Message(back=torch.zeros(2, dtype=torch.float64), name="abc")

    _, _, report = play(Sends())
    assert report.traffic.down == {"w": 4 * (0 + 1 + 2 + 3) + 4 * 40, "rate": 4 * 8}
    assert report.traffic.up == {"back": 8 * 16, "name": 8 * 3}
    assert (report.traffic.bytes_down, report.traffic.bytes_up) == (216, 152)


def test_each_client_gets_its_own_message_and_the_others_none(play):
    class Addresses(Asks):
        def round(self, state, cohort, server):
            return cohort.ask(self.work, {2: Message(n=20), 0: Message(n=0)})

        @on_client
        def work(self, client, message):
            return Message(n=message["n"] + client.id)

    engine, replies, report = play(Addresses())
    assert {id: reply["n"] for id, reply in replies.items()} == {0: 0, 2: 22}
    assert record(engine, 1) is None
    assert report.traffic.down == {"n": 16}


def test_asking_nobody_is_answered_by_nobody(play):
    class AsksNobody(Echoes):
        def round(self, state, cohort, server):
            return cohort.ask(self.work, {})

    _, replies, _ = play(AsksNobody())
    assert len(replies) == 0


def test_a_client_that_keeps_nothing_leaves_no_record(play):
    class KeepsNothing(Echoes):
        keeps_model = False

    engine, _, _ = play(KeepsNothing())
    assert [record(engine, i) for i in IDS] == [None] * 4


def test_a_state_that_was_emptied_stays_empty(play):
    class Empties(Asks):
        keeps_model = False

        def round(self, state, cohort, server):
            return [cohort.ask(self.work, Message(keep=keep)) for keep in (True, False, False)]

        @on_client
        def work(self, client, message):
            found = "n" in client.state
            client.state.clear()
            if message["keep"]:
                client.state["n"] = 1
            return Message(found=found)

    _, exchanges, _ = play(Empties(), ids=(0,))
    assert [replies[0]["found"] for replies in exchanges] == [False, True, False]


# What a client finds


def test_a_client_finds_its_own_site(play):
    class Tells(Asks):
        @on_client
        def work(self, client, message):
            inputs = next(client.train.batches(8)).inputs
            return Message(id=client.id, capacity=client.capacity, classes=client.num_classes, inputs=inputs)

    engine, replies, _ = play(Tells())
    assert [(r["id"], r["capacity"], r["classes"]) for r in replies.values()] == [(i, 1 / (1 + i), 2) for i in IDS]
    for id, reply in replies.items():
        assert torch.equal(reply["inputs"], next(engine.federation.sites[id].train.batches(8))[0])


def test_a_model_goes_on_from_where_it_was_left(play):
    engine, _, _ = play(Trains())
    left = unpack(record(engine, 0))["model"]
    replies, _ = engine.round(2, None, IDS)
    assert all(torch.equal(tensor, left[name]) for name, tensor in replies[0]["before"].items())
    assert not equal(replies[0]["before"], replies[0]["after"])


def test_a_model_that_is_not_kept_starts_from_its_initial_weights(play):
    engine, first, _ = play(TrainsWhatItIsSent())
    second, _ = engine.round(2, None, IDS)
    assert all(equal(first[i]["before"], second[i]["before"]) for i in IDS)
    assert "model" not in unpack(record(engine, 0))


def test_state_lasts_whether_or_not_the_model_does(play):
    for method in (Trains(), TrainsWhatItIsSent()):
        _, replies, _ = play(method, rounds=3)
        assert replies.entries("rounds") == [3, 3, 3, 3]


def test_clients_of_one_architecture_start_alike(play):
    _, replies, _ = play(Trains())
    assert equal(replies[0]["before"], replies[2]["before"])


def test_server_and_clients_build_the_same_initial_weights(play):
    class Builds(Asks):
        def round(self, state, cohort, server):
            nets = server.build("narrow"), server.build(), server.build(width=0.5)
            return nets, cohort.ask(self.work, Message())

        @on_client
        def work(self, client, message):
            nets = client.build("narrow"), client.build(), client.build(width=0.5)
            return Message(**{str(i): weights_of(net) for i, net in enumerate(nets)})

    _, (nets, replies), _ = play(Builds())
    for reply in replies.values():
        assert all(equal(reply[str(i)], weights_of(net)) for i, net in enumerate(nets))
    assert nets[2][0].out_features == 4


def test_server_and_clients_build_the_same_shallow_nets(tmp_path):
    build = partial(mlp4, 2, (2,), width=8)
    world = federation()
    world = replace(world, architectures=dict.fromkeys(world.architectures, build), num_classes=2)

    class Builds(Asks):
        def round(self, state, cohort, server):
            nets = server.build(depth=1), server.build(width=0.5, depth=2), server.build()
            return nets, cohort.ask(self.work, Message())

        @on_client
        def work(self, client, message):
            nets = client.build(depth=1), client.build(width=0.5, depth=2)
            return Message(**{str(i): weights_of(net) for i, net in enumerate(nets)})

    engine = Engine(Builds(), world, store=ClientStore(tmp_path))
    (nets, replies), _ = engine.round(1, None, sorted(world.sites))
    for reply in replies.values():
        assert all(equal(reply[str(i)], weights_of(nets[i])) for i in (0, 1))
    one, two, full = nets
    assert list(one.exits) == ["hidden1"]
    assert list(two.exits) == ["hidden2"]
    assert two.num_features == 4
    own = {name: tensor for name, tensor in weights_of(one).items() if not name.startswith("exits.")}
    assert equal(own, {name: weights_of(full)[name] for name in own})


def test_build_says_what_an_architecture_cannot_be(play):
    class Wants(Asks):
        def round(self, state, cohort, server):
            for options in ({"depth": 2}, {"width": 2.0}, {"depth": 0}):
                with pytest.raises(ConfigError) as caught:
                    server.build("narrow", **options)
                messages.append(str(caught.value))
            return None, None

    messages: list[str] = []
    play(Wants())
    advice = ", since its builder takes no `scale`; choose another model, or give its builder one"
    assert messages == [
        f"narrow: cannot be built at depth 2{advice}",
        "width 2; expected a share of the channels, more than 0 and at most 1",
        "depth 0; expected at least 1 block",
    ]


# What is frozen


def with_frozen_layers(world):
    """The same world; each wide net's first layer is frozen, and its BatchNorm is in evaluation mode."""

    def frozen(scale=FULL):
        net = wide(scale)
        net[0].requires_grad_(False)
        net[1].eval()
        nn.init.normal_(net[1].running_mean)
        return net

    return replace(world, architectures={"narrow": narrow, "wide": frozen})


class Tells(Trains):
    @on_client
    def work(self, client, message):
        yield Fit(client.model, client.objective, client.train, SGD)
        narrow = frozen_of(client.build("wide", width=0.5))
        return Message(frozen=frozen_of(client.model), narrow=narrow, learnt=learnt_of(client.model))


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_frozen_is_equal_at_all_clients_whatever_they_keep(tmp_path, keeps):
    method = type("Told", (Tells,), {"keeps_model": keeps})()
    engine = Engine(
        method,
        with_frozen_layers(federation()),
        store=ClientStore(tmp_path),
    )
    expected = frozen_of(engine.server(0).build("wide"))
    assert expected.keys() == {"0.weight", "0.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
    state = None
    for number in (1, 2):
        state, _ = engine.round(number, state, IDS)
        for id in (1, 3):
            assert equal(state[id]["frozen"], expected)
            half = {name: tensor[:4] if tensor.dim() else tensor for name, tensor in expected.items()}
            assert equal(state[id]["narrow"], half)
            assert equal(frozen_of(engine.inference_model(state, id)), expected)
    assert not equal(state[1]["learnt"], state[3]["learnt"])
    kept = [unpack(record(engine, id)).get("model", {}).keys() for id in (1, 3)] if keeps else []
    assert all(names == {"1.weight", "1.bias", "2.weight", "2.bias"} for names in kept)


# Randomness


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(play):
    _, one, _ = play(Trains(), 2)
    _, again, _ = play(Trains(), 2)
    _, other, _ = play(Trains(), 2, seed=1)
    assert all(equal(one[i], again[i]) for i in IDS)
    assert not any(torch.equal(one[i]["own"], other[i]["own"]) for i in IDS)
    assert not any(equal(one[i]["before"], other[i]["before"]) for i in IDS)


def test_clients_and_rounds_draw_differently(play):
    engine, first, _ = play(Trains())
    second, _ = engine.round(2, None, IDS)
    drawn = [tuple(reply[name].tolist()) for r in (first, second) for reply in r.values() for name in ("own", "common")]
    assert len(set(drawn)) == 16


def test_exchanges_of_one_round_draw_differently(play):
    class AsksTwice(TrainsWhatItIsSent):
        def round(self, state, cohort, server):
            return [cohort.ask(self.work, Message()) for _ in range(2)]

    _, (first, second), _ = play(AsksTwice())
    for name in ("own", "common"):
        assert not any(torch.equal(first[i][name], second[i][name]) for i in IDS)
    assert equal(first[0]["before"], second[0]["before"])
    assert not equal(first[0]["after"], second[0]["after"])


def test_fits_of_one_exchange_draw_differently(play):
    orders = []

    class FitsTwice(Asks):
        @on_client
        def work(self, client, message):
            def noted(net, batch, extras):
                orders.append(batch[0][:, 0].tolist())
                return client.objective(net, batch, extras)

            for _ in range(2):
                yield Fit(client.model, noted, client.train, SGD, name="train")
            return Message()

    play(FitsTwice(), ids=(0,))
    orders = orders[-4:]  # before the first, what a step takes is counted
    assert orders[:2] != orders[2:]


@pytest.mark.usefixtures("global_generator_unchanged")
def test_a_round_leaves_the_global_generator(play):
    play(Trains(), rounds=2)


def test_the_order_of_ids_does_not_matter(play):
    one, forth, _ = play(Trains(), 2, IDS)
    other, back, _ = play(Trains(), 2, IDS[::-1])
    assert all(equal(forth[i], back[i]) for i in IDS)
    assert all(record(one, i) == record(other, i) for i in IDS)


def test_the_number_of_clients_does_not_matter_to_one_of_them(play):
    _, many, _ = play(Trains(), 2, IDS)
    _, alone, _ = play(Trains(), 2, (2,))
    assert equal(many[2], alone[2])


def test_the_order_in_which_an_executor_works_does_not_matter(play):
    class Backwards(Sequential):
        def run(self, host, tasks):
            return [host.execute(task.make()) for task in reversed(tasks)]

    _, forth, _ = play(Trains(), 2)
    _, back, _ = play(Trains(), 2, executor=Backwards())
    assert list(back) == list(forth)
    assert all(equal(forth[i], back[i]) for i in IDS)


def test_a_resumed_run_equals_the_uninterrupted_one(play, tmp_path):
    straight, expected, _ = play(Trains(), 3)
    broken, _, _ = play(Trains(), 2)
    store = ClientStore(tmp_path / "1")
    store.restore(broken.store.save())
    resumed = Engine(Trains(), federation(), seed=0, store=store)
    replies, _ = resumed.round(3, None, IDS)
    assert all(equal(expected[i], replies[i]) for i in IDS)
    assert all(record(straight, i) == record(resumed, i) for i in IDS)


def test_the_server_draws_by_round(play):
    class Draws(Method):
        def init(self, server):
            return torch.rand(2, generator=server.rng)

        def round(self, state, cohort, server):
            return torch.rand(2, generator=server.rng)

    engine = play(Draws(), rounds=0)[0]
    draws = [engine.start(), *(engine.round(number, None, IDS)[0] for number in (1, 2))]
    again = [engine.start(), *(engine.round(number, None, IDS)[0] for number in (1, 2))]
    assert all(map(torch.equal, draws, again))
    assert len({tuple(draw.tolist()) for draw in draws}) == 3


@pytest.mark.usefixtures("global_generator_unchanged")
def test_the_server_trains_at_once_and_reproducibly(play):
    class Distils(Method):
        def round(self, state, cohort, server):
            data = federation().sites[0].train
            nets = [server.build("narrow") for _ in range(2)]
            reports = [server.fit(Fit(net, self.loss, data, SGD)) for net in nets]
            return [*map(parameters_of, nets)], reports

        @staticmethod
        def loss(net, batch, extras):
            return nn.functional.cross_entropy(net(batch[0]), batch[1])

    engine, (first, reports), _ = play(Distils())
    again, _ = engine.round(1, None, IDS)[0]
    assert [report.steps for report in reports] == [2, 2]
    assert all(map(equal, first, again))
    assert not equal(*first)


# Who is touched


def test_records_of_bystanders_are_untouched(play):
    engine, _, _ = play(Trains())
    before = {i: record(engine, i) for i in IDS}
    engine.round(2, None, (0, 1))
    assert [record(engine, i) == before[i] for i in IDS] == [False, False, True, True]


def test_a_failing_client_leaves_no_trace_and_the_others_go_on(play):
    engine, _, _ = play(Trains())
    before = {i: record(engine, i) for i in IDS}
    failing = Engine(Fails(), federation(), store=engine.store, tolerate_failures=True)
    replies, report = failing.round(2, None, IDS)
    assert list(replies) == [0, 2, 3]
    assert [record(engine, i) == before[i] for i in IDS] == [False, True, False, False]
    assert list(replies.failures) == list(report.failures) == [1]
    assert report.replied == [0, 2, 3]
    assert report.cohort == [0, 1, 2, 3]
    assert set(report.losses) == {0, 2, 3}


def test_a_failure_tells_who_failed_where_and_why(play):
    _, replies, _ = play(Fails(), tolerate_failures=True)
    failure = replies.failures[1]
    assert isinstance(failure, Failure)
    assert str(failure) == "client 1 failed in Fails.work: MemoryError: none left"
    assert "in work" in failure.trace


def test_a_failure_is_logged(play, caplog):
    with caplog.at_level(logging.WARNING):
        play(Fails(), tolerate_failures=True)
    assert "client 1 failed in Fails.work: MemoryError: none left" in caplog.text
    assert "Traceback" in caplog.text


def test_a_failing_client_is_counted_as_asked_but_not_as_answering(play):
    _, _, report = play(Fails(), tolerate_failures=True)
    assert report.traffic.down == {"numbers": 4 * 12}
    assert report.traffic.up == {"id": 3 * 8}


def test_a_failure_that_is_not_tolerated_stops_the_round(play):
    message = (
        r"^client 1 failed in Fails\.work: MemoryError: none left; .*test_engine\.py, line \d+;"
        r" run\.tolerate_failures = true continues without it$"
    )
    with pytest.raises(ClientFailure, match=message):
        play(Fails())


def test_a_round_that_nobody_answers_is_lost_and_changes_nothing(play, caplog):
    engine, _, _ = play(Trains())
    before, state = {i: record(engine, i) for i in IDS}, {"any": 1}
    failing = Engine(Fails(on=IDS), federation(), store=engine.store, tolerate_failures=True)
    found, report = failing.round(2, state, IDS)
    assert found is state
    assert {i: record(engine, i) for i in IDS} == before
    assert report.lost == "no client answered; client 0 failed in Fails.work: MemoryError: none left"
    assert (report.replied, sorted(report.failures)) == ([], list(IDS))
    said = [line for line in caplog.records if getattr(line, "on_screen", False)]
    assert [line.getMessage() for line in said] == [f"round 2 is lost: {report.lost}"]


class FailsLater(Asks):
    """Two exchanges; some clients fail in the second, and the method cannot do without them."""

    on = IDS

    def round(self, state, cohort, server):
        cohort.ask(self.first, Message())
        replies = cohort.ask(self.second, Message())
        return torch.stack([replies[i]["id"] for i in cohort.ids])

    @on_client
    def first(self, client, message):
        client.state["seen"] = client.state.get("seen", 0) + 1
        return Message()

    @on_client
    def second(self, client, message):
        client.state["seen"] += 10
        if client.id in self.on:
            raise MemoryError("none left")
        return Message(id=torch.tensor(client.id))


class FailsLaterAlone(FailsLater):
    on = (2,)


@pytest.mark.parametrize("cap_bytes", [0, 2**20])
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("method", [FailsLater(), FailsLaterAlone()])
def test_a_lost_round_takes_back_what_clients_kept_in_it(tmp_path, cap_bytes, saved, method):
    store = ClientStore(tmp_path, cap_bytes)
    Engine(Trains(), federation(), store=store).round(1, None, (0, 1, 2))
    before = {i: store.read(i) for i in IDS}
    if saved:
        store.save()
    engine = Engine(method, federation(), store=store, tolerate_failures=True)
    _, report = engine.round(2, None, IDS)
    assert report.lost is not None
    assert {i: store.read(i) for i in IDS} == before
    assert before[3] is None


def test_a_method_that_cannot_do_with_the_replies_that_came_loses_the_round(play):
    _, state, report = play(FailsLaterAlone(), state="before", tolerate_failures=True)
    assert (state, report.lost) == ("before", "KeyError: 2")
    assert report.replied == [0, 1, 3]


def test_an_error_of_the_method_when_nobody_failed_is_raised(play):
    class Errs(Echoes):
        def round(self, state, cohort, server):
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        play(Errs(), tolerate_failures=True)


class Diverges(Asks):
    """Trains some clients at a rate at which nothing stays finite."""

    on = (2,)

    def round(self, state, cohort, server):
        return sorted(cohort.ask(self.work, Message()))

    @on_client
    def work(self, client, message):
        client.state["seen"] = True
        lr = 1e30 if client.id in self.on else 0.1
        other = Examples(client.train.inputs, client.train.targets)  # its loss is not reported
        yield Fit(client.model, client.objective, other, LocalTraining(optimizer="sgd", lr=lr, batch_size=4))
        return Message(id=client.id)


def test_a_client_whose_loss_is_not_finite_stops_the_run_with_round_and_client(play):
    message = (
        r"^round 1: client 2 diverged in Diverges\.work: its loss is (nan|inf); the last checkpoint stands; train more"
        r" gently, or continue without such clients: run\.on_divergence = 'drop'$"
    )
    with pytest.raises(DivergenceError, match=message):
        play(Diverges())


@pytest.mark.parametrize("options", [{"on_divergence": "drop"}, {"tolerate_failures": True}])
def test_a_client_whose_loss_is_not_finite_can_be_gone_on_without(play, options, caplog):
    engine, state, report = play(Diverges(), **options)
    assert state == [0, 1, 3]
    assert report.failures[2].kind == "divergence"
    assert record(engine, 2) is None
    said = [line.getMessage() for line in caplog.records if getattr(line, "on_screen", False)]
    assert said == ["round 1 continues without client 2, which diverged"]


def test_divergence_can_stop_a_run_that_tolerates_failures(play):
    with pytest.raises(DivergenceError):
        play(Diverges(), tolerate_failures=True, on_divergence="stop")


def test_dropping_divergence_does_not_tolerate_failures(play):
    with pytest.raises(ClientFailure):
        play(Fails(), on_divergence="drop")


@dataclass(frozen=True)
class Weights:
    """A state that may hold what is not finite."""

    values: dict
    best: float = float("inf")


class Spoils(Asks):
    def round(self, state, cohort, server):
        cohort.ask(self.work, Message())
        return Weights({**state.values, "w": state.values["w"] * 1e30})

    @on_client
    def work(self, client, message):
        return Message()


def start_of_spoils():
    return Weights({"w": torch.ones(2), "mask": torch.tensor([-torch.inf])})


def test_a_state_that_diverges_on_the_server_stops_the_run_where_it_begins(play):
    engine = Engine(Spoils(), federation())
    state, _ = engine.round(1, start_of_spoils(), IDS)
    with pytest.raises(DivergenceError, match=r"^round 2: the server's state diverged: values\.w holds inf"):
        engine.round(2, state, IDS)


def test_a_state_that_diverges_on_the_server_is_taken_back_where_divergence_is_dropped():
    engine = Engine(Spoils(), federation(), on_divergence="drop")
    state, _ = engine.round(1, start_of_spoils(), IDS)
    found, report = engine.round(2, state, IDS)
    assert found is state
    assert report.lost == "the server's state diverged: values.w holds inf"


@pytest.mark.parametrize(("available", "says"), [(100, True), (10**9, False), (None, False)])
def test_replies_that_may_not_fit_into_memory_are_announced_before_anybody_trains(play, caplog, available, says):
    heard = []

    class Large(Asks):
        @on_client
        def work(self, client, message):
            heard.append(len(caplog.records))
            return Message(x=torch.zeros(10))

        def replies(self, handler, member, message, server):
            return Schema(x=floats(10))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("potluck.engine.rounds.exchange.available_bytes", lambda: available)
        engine, _, _ = play(Large())
        engine.round(2, None, IDS)
    said = [line.getMessage() for line in caplog.records]
    assert [line.startswith("the replies of 4 clients are in memory together") for line in said] == [True] * says
    assert heard[0] == says


def test_a_client_may_fail_in_one_exchange_and_answer_another(play):
    class FailsFirst(Asks):
        def round(self, state, cohort, server):
            return [cohort.ask(self.work, Message(last=last)) for last in (False, True)]

        @on_client
        def work(self, client, message):
            if client.id == 1 and not message["last"]:
                raise ValueError("early")
            return Message(ok=1)

    _, (first, second), report = play(FailsFirst(), tolerate_failures=True)
    assert (list(first), list(second)) == ([0, 2, 3], [0, 1, 2, 3])
    assert list(second.failures) == []
    assert report.replied == [0, 2, 3]


def test_a_failure_in_one_round_is_forgotten_in_the_next(play):
    engine, _, _ = play(Fails(), tolerate_failures=True)
    replies, report = engine.round(2, None, (0, 2))
    assert replies.failures == report.failures == {}


# The contract


class Breaks(Asks):
    """Its handlers break the contract, each in its own way."""

    def unmarked(self, client, message):
        return message

    @on_client
    def returns_a_dict(self, client, message):
        return {"n": 1}

    @on_client
    def forgets(self, client, message):
        Fit(client.model, client.objective, client.train, SGD)
        return Message()

    @on_client
    def forgets_one(self, client, message):
        yield Fit(client.model, client.objective, client.train, SGD)
        Fit(client.model, client.objective, client.train, SGD)
        return Message()

    @on_client
    def forgets_its_message(self, client, message):
        yield Fit(client.model, client.objective, client.train, SGD)

    @on_client
    def names_neither(self, client, message):
        yield Fit(client.model, client.objective, client.train, SGD)
        yield Fit(client.model, client.objective, client.train, SGD, name="second")
        yield Fit(client.model, client.objective, client.train, SGD)
        return Message()

    @on_client
    def yields_a_net(self, client, message):
        yield client.model
        return Message()

    def round(self, state, cohort, server):
        return cohort.ask(getattr(self, state), Message())


@pytest.mark.parametrize("tolerate", [True, False])
def test_a_name_that_the_message_lacks_is_the_methods_fault_and_no_clients(play, tolerate):
    class Misspells(Asks):
        @on_client
        def work(self, client, message):
            return Message(numbers=message["nubmers"])

    with pytest.raises(EntryError, match="message has no entry 'nubmers'; nearest: 'numbers'"):
        play(Misspells(), tolerate_failures=tolerate)


@pytest.mark.parametrize("tolerate", [True, False])
@pytest.mark.parametrize(
    ("handler", "complaint"),
    [
        ("unmarked", r"unmarked is not marked @on_client, so it cannot be sent to clients"),
        ("returns_a_dict", r"returns_a_dict returned dict on client 0; expected a Message"),
        ("forgets", r"forgets built a Fit on client 0 but never yielded it: write `yield Fit\(\.\.\.\)`"),
        ("forgets_one", r"forgets_one built a Fit on client 0 but never yielded it: write `yield Fit\(\.\.\.\)`"),
        ("forgets_its_message", r"forgets_its_message returned NoneType on client 0; expected a Message"),
        (
            "names_neither",
            r"names_neither yielded two Fits without a name, whose optimisers could not be told apart under persist: "
            r'name the training that each is a part of: Fit\(\.\.\., name="train"\)',
        ),
        ("yields_a_net", r"yields_a_net yielded Sequential; expected a Fit, Predict, Gradient or NormStatistics"),
    ],
)
def test_a_broken_contract_stops_the_round(play, handler, complaint, tolerate):
    with pytest.raises(ContractError, match=rf"^Breaks\.{complaint}$"):
        play(Breaks(), state=handler, tolerate_failures=tolerate)


@pytest.mark.parametrize("messages", [{0: Message(), 3: Message()}, {7: Message()}])
def test_only_the_cohort_may_be_asked(play, messages):
    class AsksStrangers(Echoes):
        def round(self, state, cohort, server):
            return cohort.ask(self.work, messages)

    with pytest.raises(ContractError, match=r"Echoes\.work was sent to \[[37]\], who are not in this round's cohort$"):
        play(AsksStrangers(), ids=(0, 1))


def test_a_handler_of_another_method_cannot_be_sent(play):
    class Borrows(Echoes):
        def round(self, state, cohort, server):
            return cohort.ask(Trains().work, Message(numbers=torch.zeros(1)))

    with pytest.raises(ContractError, match=r"Trains\.work"):
        play(Borrows())


def test_a_handler_that_is_not_of_the_method_cannot_be_sent(play):
    @on_client
    def loose(client, message):
        return message

    class SendsLoose(Echoes):
        def round(self, state, cohort, server):
            return cohort.ask(loose, Message())

    with pytest.raises(ContractError, match="loose"):
        play(SendsLoose())


def test_a_state_that_cannot_be_kept_stops_the_round(play):
    class KeepsAnything(Asks):
        @on_client
        def work(self, client, message):
            client.state["net"] = client.model
            return Message()

    with pytest.raises(WireError, match=r"tree\.state\.net is a Sequential"):
        play(KeepsAnything())


# What the engine reports


def test_the_local_loss_is_the_mean_over_clients_of_their_mean_over_fits(play):
    class TrainsUnevenly(Asks):
        @on_client
        def work(self, client, message):
            for _ in range(client.id):
                yield Fit(client.model, self.constant(client.id), client.train, SGD, name="train")
            return Message()

        @staticmethod
        def constant(value):
            return lambda net, batch, extras: net(batch[0]).sum() * 0 + value

    _, _, report = play(TrainsUnevenly())
    assert report.losses == {1: [1.0], 2: [2.0, 2.0], 3: [3.0, 3.0, 3.0]}
    assert report.loss_local == 2.0


def test_fits_on_other_data_have_no_part_in_the_local_loss(play):
    class TrainsElsewhere(Asks):
        @on_client
        def work(self, client, message):
            other = client.train.take(torch.arange(4))
            for data in (other, client.train, other):
                yield Fit(client.model, client.objective, data, SGD, name="train")
            return Message()

    _, _, report = play(TrainsElsewhere(), ids=(0,))
    assert len(report.losses[0]) == 1


def test_the_local_loss_is_that_on_a_part_if_no_fit_is_on_all_examples(play):
    class TrainsOnAPart(Asks):
        @on_client
        def work(self, client, message):
            other = client.train.take(torch.arange(4))
            for name, data in (("part", other), ("copy", replace(other, inputs=other.inputs.clone()))):
                yield Fit(client.model, client.objective, data, SGD, name=name)
            return Message()

    _, _, report = play(TrainsOnAPart(), ids=(0,))
    assert len(report.losses[0]) == 1


def test_losses_of_several_exchanges_are_gathered(play):
    class AsksTwice(Trains):
        def round(self, state, cohort, server):
            return [cohort.ask(self.work, Message()) for _ in range(2)]

    _, exchanges, report = play(AsksTwice())
    assert report.losses == {i: [replies[i]["loss"] for replies in exchanges] for i in IDS}


def test_without_training_there_is_no_local_loss(play):
    _, _, report = play(Echoes())
    assert report.loss_local is None
    assert report.seconds_local > 0


# Who is evaluated


class Evaluated(Trains):
    """Its model for inference is its own with a bias from the server; its state is touched as well."""

    def inference_message(self, state, client_id, server):
        return Message(bias=torch.full((2,), float(client_id)))

    @on_client
    def inference_model(self, client, message):
        client.state["evaluated"] = True
        with torch.no_grad():
            client.model[-1].bias.copy_(message["bias"])
        return client.model

    def global_model(self, state, server):
        return server.build()


def test_the_judged_model_is_the_clients_own_filled_from_the_message(play):
    engine, replies, _ = play(Evaluated())
    model = engine.inference_model(None, 3)
    assert model[-1].bias.tolist() == [3.0, 3.0]
    assert torch.equal(model[0].weight, replies[3]["after"]["0.weight"])


def test_judging_leaves_no_trace(play):
    engine, _, _ = play(Evaluated())
    before = record(engine, 3)
    engine.inference_model(None, 3)
    assert record(engine, 3) == before


def test_judging_is_booked_apart(play):
    engine, _, report = play(Evaluated())
    traffic = report.traffic.bytes_down
    engine.inference_model(None, 3)
    engine.inference_model(None, 2)
    assert engine.evaluation_traffic.down == {"bias": 16}
    assert report.traffic.bytes_down == traffic


@pytest.mark.usefixtures("global_generator_unchanged")
def test_judging_leaves_the_global_generator_and_draws_the_same_again(play):
    class Draws(Evaluated):
        @on_client
        def inference_model(self, client, message):
            nn.init.normal_(client.model[-1].bias)
            return client.model

    engine, _, _ = play(Draws())
    one, again = (engine.inference_model(None, 3)[-1].bias for _ in range(2))
    assert torch.equal(one, again)


def test_a_judged_model_shares_nothing_with_the_servers_message(play):
    bias = torch.zeros(2)

    class Keeps(Evaluated):
        def inference_message(self, state, client_id, server):
            return Message(bias=bias)

        @on_client
        def inference_model(self, client, message):
            message["bias"].add_(1)
            return client.model

    play(Keeps())[0].inference_model(None, 0)
    assert bias.tolist() == [0, 0]


def test_a_client_that_never_took_part_is_judged_by_its_initial_model(play):
    engine, _, _ = play(Evaluated(), ids=(0,))
    assert engine.inference_model(None, 3)[-1].bias.tolist() == [3.0, 3.0]


def test_the_global_model_is_the_methods(play):
    engine, _, _ = play(Evaluated())
    assert engine.global_model(None)[0].out_features == 8
    assert play(Echoes())[0].global_model(None) is None
