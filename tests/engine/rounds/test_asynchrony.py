"""Asynchronous rounds, against their rules worked out by hand."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from potluck.core.federation import Federation, Site, empty_like
from potluck.core.ground.errors import ConfigError
from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.core.requests.examples import Examples
from potluck.engine.disk.store import Layout
from potluck.engine.rounds.asynchrony.asking import NotOneAsk, first_ask, rest_of_round
from potluck.engine.rounds.asynchrony.rules import Asynchrony, blend
from potluck.engine.rounds.engine import Engine
from potluck.twin.clock import AsynchronousTwinClock
from potluck.twin.devices import Fleet, TwinDevice
from potluck.twin.timeline import Closing, Timeline

IDS = (0, 1, 2, 3)
LATENCIES = (1.0, 2.0, 3.0, 10.0)
X0 = 8.0


@dataclass(frozen=True)
class Place:
    x: torch.Tensor
    rounds: int


@dataclass(frozen=True)
class Walks(Method):
    """Its clients walk from where they are sent, each in its own way; the server goes to the middle of them."""

    revises = ("x",)

    def init(self, server):
        return Place(torch.tensor(X0, dtype=torch.float64), 0)

    def round(self, state, cohort, server):
        replies = cohort.ask(self.work, Message(x=state.x))
        return Place(torch.stack(replies.entries("x")).mean(), state.rounds + 1)

    @on_client
    def work(self, client, message):
        client.state["times"] = client.state.get("times", 0) + 1
        return Message(x=walk(client.id, message["x"]), times=client.state["times"])


def walk(client, x):
    return 0.5 * x + client


class Fails(Walks):
    @on_client
    def work(self, client, message):
        if client.id == 1:
            raise RuntimeError("no luck")
        return Message(x=walk(client.id, message["x"]))


class AsksTwice(Walks):
    def round(self, state, cohort, server):
        cohort.ask(self.work, Message(x=state.x))
        return super().round(state, cohort, server)


class AsksNobody(Walks):
    def round(self, state, cohort, server):
        return state


class AsksSome(Walks):
    def round(self, state, cohort, server):
        cohort.ask(self.work, {cohort.ids[0]: Message(x=state.x)})
        return state


def federation():
    examples = Examples(torch.zeros(2, 2), torch.tensor([0, 1]))
    none = empty_like(examples)
    sites = {id: Site(id, "net", examples, none, none) for id in IDS}
    return Federation(sites, {"net": lambda: nn.Linear(2, 2)}, server_architecture="net", num_classes=2)


def engine(rule, method=None, at_once=4, latencies=LATENCIES, **options):
    devices = [TwinDevice(str(id), latency_s=latency) for id, latency in zip(IDS, latencies, strict=True)]
    clock = AsynchronousTwinClock(Timeline(Fleet(devices, IDS), Closing()))
    return Engine(method or Walks(), federation(), clock=clock, asynchrony=rule, at_once=at_once, **options)


def play(made, rounds, state=None, first=1):
    """The places after each round, the moments at which it closed, and whose replies it was made of."""
    state, places, moments, cohorts = made.start() if state is None else state, [], [], []
    for number in range(first, first + rounds):
        state, report = made.round(number, state, IDS)
        places.append(float(state.x))
        moments.append(made.clock.now())
        cohorts.append(report.cohort)
    return places, moments, cohorts


def test_fedbuff_adds_what_the_replies_have_changed_the_less_the_staler_they_are():
    places, moments, cohorts = play(engine(Asynchrony("fedbuff", buffer=2)), 3)
    one = (walk(0, X0) + walk(1, X0)) / 2
    late = one + 2**-0.5 * (walk(2, X0) - X0)
    two = (walk(0, one) + late) / 2
    late = two + 2**-0.5 * (walk(1, one) - one)
    three = (walk(0, two) + late) / 2
    assert cohorts == [[0, 1], [0, 2], [0, 1]]
    assert moments == [2.0, 3.0, 4.0]
    assert places == pytest.approx([one, two, three], abs=1e-12)


def test_fedasync_mixes_each_reply_into_what_there_is():
    places, moments, cohorts = play(engine(Asynchrony("fedasync", mixing=0.5, staleness=1.0)), 3)
    one = 0.5 * X0 + 0.5 * walk(0, X0)
    two = 0.5 * one + 0.5 * walk(0, one)
    share = 0.5 / 3  # two rounds stale
    three = (1 - share) * two + share * walk(1, X0)
    assert cohorts == [[0], [0], [1]]
    assert moments == [1.0, 2.0, 2.0]
    assert places == pytest.approx([one, two, three], abs=1e-12)


def test_fedat_weighs_each_tier_by_the_updates_of_the_tier_at_the_other_end():
    places, moments, cohorts = play(engine(Asynchrony("fedat", tiers=2)), 7)
    assert cohorts == [[0, 1]] * 5 + [[2, 3], [0, 1]]
    assert moments == [2.0, 4.0, 6.0, 8.0, 10.0, 10.0, 12.0]
    fast = (walk(0, X0) + walk(1, X0)) / 2  # the slow tier, which has not moved, weighs all
    slow = (walk(2, X0) + walk(3, X0)) / 2
    six = 1 / 6 * fast + 5 / 6 * slow
    fast = (walk(0, X0) + walk(1, X0)) / 2  # asked before round 6
    seven = 1 / 7 * fast + 6 / 7 * slow
    assert places == pytest.approx([X0] * 5 + [six, seven], abs=1e-12)


def test_with_a_place_in_the_buffer_for_everybody_it_is_the_round_that_waits():
    together = Engine(Walks(), federation())
    assert play(engine(Asynchrony("fedbuff", buffer=4)), 3)[0] == play(together, 3)[0]


def test_a_client_is_as_it_was_until_the_round_of_its_reply_closes():
    made = engine(Asynchrony("fedbuff", buffer=2))
    play(made, 1)
    assert [made.store.read(id) is not None for id in IDS] == [True, True, False, False]


def test_as_many_are_under_way_as_there_may_be():
    """With two at once the first two are asked, and whoever is done makes room for the next."""
    _, moments, cohorts = play(engine(Asynchrony("fedbuff", buffer=2), at_once=2), 2)
    assert cohorts == [[0, 1], [0, 2]]  # 0 is done at 1 s and waits, so that 2 begins
    assert moments == [2.0, 4.0]


def test_another_engine_goes_on_from_what_was_under_way():
    for rule in (Asynchrony("fedbuff", buffer=2), Asynchrony("fedasync"), Asynchrony("fedat", tiers=2)):
        whole = play(engine(rule), 7)
        first = engine(rule)
        state = first.start()
        for number in range(1, 4):
            state, _ = first.round(number, state, IDS)
        second = engine(rule)
        second.start()
        second.asynchronous.go_on(first.asynchronous.state(), Place)
        second.store.restore(Layout())
        for id in IDS:
            if (record := first.store.read(id)) is not None:
                second.store.write(id, record)
        second.clock.go_on(first.clock.take(3))
        places, moments, cohorts = play(second, 4, state, first=4)
        assert (places, moments, cohorts) == tuple(found[3:] for found in whole)


def test_who_has_failed_is_not_asked_again_in_the_same_round():
    made = engine(Asynchrony("fedbuff", buffer=2), Fails(), tolerate_failures=True)
    _state, report = made.round(1, made.start(), IDS)
    assert report.cohort == [0, 1, 2]
    assert list(report.failures) == [1]
    assert made.clock.now() == 3.0
    assert [work.client for work in report.work] == [1, 0, 2, None]


def test_a_round_is_lost_when_nobody_is_left_to_ask_and_the_next_one_asks_again():
    made = engine(Asynchrony("fedbuff", buffer=4), Fails(), tolerate_failures=True)
    state, report = made.round(1, made.start(), IDS)
    assert report.lost == "nobody is left to ask"
    assert float(state.x) == X0


def test_a_round_that_asks_twice_nobody_or_some_cannot_be_cut():
    server = Engine(Walks(), federation()).server(1)
    state = Walks().init(server)
    reply = Message(x=torch.tensor(1.0))
    with pytest.raises(NotOneAsk, match="asks clients more than once"):
        rest_of_round(AsksTwice(), state, IDS, server, lambda client, now: reply)
    with pytest.raises(NotOneAsk, match="asks clients nothing"):
        first_ask(AsksNobody(), state, IDS, server)
    with pytest.raises(NotOneAsk, match="does not ask every client"):
        first_ask(AsksSome(), state, IDS, server)


def test_trees_are_blended_by_name_and_whole_numbers_are_the_last():
    first = {"a": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}
    second = {"n": torch.tensor(5), "a": torch.tensor([3.0, 6.0])}
    found = blend([(0.25, first), (0.75, second)])
    assert torch.equal(found["a"], torch.tensor([2.5, 5.0]))
    assert found["n"] == 5


def test_an_option_of_another_rule_is_refused_and_defaults_are_said():
    with pytest.raises(ConfigError, match="tiers: expected none with the rule 'fedbuff', found 3"):
        Asynchrony("fedbuff", tiers=3)
    assert Asynchrony("fedasync") == Asynchrony("fedasync", buffer=1, staleness=0.5, mixing=0.6)
