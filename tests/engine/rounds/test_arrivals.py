"""Asynchronous rounds of clients that take their own time, who answer in the order of a script."""

import json
import logging

import pytest

from potluck.core.method import Releases
from potluck.core.roles import Failure
from potluck.engine.answers.ledger import Ledger
from potluck.engine.executors import OneByOne
from potluck.engine.rounds.asynchrony.arrivals import ArrivalClock
from potluck.engine.rounds.asynchrony.rules import Asynchrony
from potluck.engine.rounds.engine import Engine
from potluck.engine.rounds.lost import Deserted

from .test_asynchrony import IDS, X0, Fails, Place, Walks, federation, walk

GONE = "gone"


class Elsewhere(OneByOne):
    """Clients that are elsewhere.

    Args:
        script: who answers next; with `GONE`, that it is gone instead.

    Attributes:
        here: the clients that can be asked.
        begun: the outcomes of those that are at work.
        asked: those that were asked, in this order.
    """

    def __init__(self, *script):
        self.script, self.here = list(script), set(IDS)
        self.begun, self.asked = {}, []
        self.before = lambda client: None

    def run(self, host, tasks):
        return (host.execute(task.make()) for task in tasks)

    def absent(self, clients):
        return {client: f"node{client}" for client in clients if client not in self.here}

    def begin(self, host, task):
        job = task.make()
        self.before(job.client)
        self.asked.append(job.client)
        self.begun[job.client] = host.execute(job)

    def ended(self, within_s):
        client, *fate = entry if isinstance(entry := self.script.pop(0), tuple) else (entry,)
        outcome = self.begun.pop(client)
        if GONE in fate:
            self.here.discard(client)
            return Failure(client, "Walks.work", "its node is gone", unheard=True, kind="absence")
        return outcome


def engine(rule, nodes, method=None, at_once=4, **options):
    clock = ArrivalClock(nodes, IDS)
    return Engine(
        method or Walks(),
        federation(),
        executor=nodes,
        clock=clock,
        asynchrony=rule,
        at_once=at_once,
        tolerate_failures=True,
        **options,
    )


def play(made, rounds, state=None, first=1):
    """The places after each round, and its report."""
    state, places, reports = made.start() if state is None else state, [], []
    for number in range(first, first + rounds):
        state, report = made.round(number, state, IDS)
        places.append(float(state.x))
        reports.append(report)
    return state, places, reports


def test_replies_count_in_the_order_of_their_arrival_the_less_the_staler_they_are():
    _, places, reports = play(engine(Asynchrony("fedbuff", buffer=2), Elsewhere(1, 0, 0, 2, 1, 0)), 3)
    one = (walk(0, X0) + walk(1, X0)) / 2
    two = (walk(0, one) + one + 2**-0.5 * (walk(2, X0) - X0)) / 2
    three = (walk(0, two) + two + 2**-0.5 * (walk(1, one) - one)) / 2
    assert [report.cohort for report in reports] == [[0, 1], [0, 2], [0, 1]]
    assert [report.stale for report in reports] == [{}, {2: 1}, {1: 1}]
    assert places == pytest.approx([one, two, three], abs=1e-12)


def test_whoever_has_answered_gets_the_newest_version_and_the_others_go_on():
    nodes = Elsewhere(1, 0, 0, 1, 3)
    _, _, reports = play(engine(Asynchrony("fedasync"), nodes), 5)
    assert nodes.asked == [0, 1, 2, 3, 1, 0, 0, 1]
    assert [report.cohort for report in reports] == [[1], [0], [0], [1], [3]]
    assert [report.stale for report in reports] == [{}, {0: 1}, {}, {1: 2}, {3: 4}]


def test_with_a_place_in_the_buffer_for_everybody_it_is_the_round_that_waits():
    waiting = Engine(Walks(), federation())
    _, places, reports = play(engine(Asynchrony("fedbuff", buffer=4), Elsewhere(*[3, 1, 0, 2] * 3)), 3)
    assert places == play(waiting, 3)[1]
    assert not any(report.stale for report in reports)


def test_tiers_are_formed_by_who_answers_first():
    """In the order and with the places that a twin finds which knows how slow each is, see `test_asynchrony`."""
    nodes = Elsewhere(0, 1, 0, 2, 1, 0, 1, 0, 1, 0, 1, 3, 0, 1)
    _, places, reports = play(engine(Asynchrony("fedat", tiers=2), nodes), 7)
    assert [report.cohort for report in reports] == [[0, 1]] * 5 + [[2, 3], [0, 1]]
    fast, slow = (walk(0, X0) + walk(1, X0)) / 2, (walk(2, X0) + walk(3, X0)) / 2
    six, seven = 1 / 6 * fast + 5 / 6 * slow, 1 / 7 * fast + 6 / 7 * slow
    assert places == pytest.approx([X0] * 5 + [six, seven], abs=1e-12)


def test_who_is_not_there_when_tiers_are_formed_is_in_the_slowest():
    nodes = Elsewhere(2, 1, 1, 2, 0, 3)
    nodes.here = {1, 2}
    made = engine(Asynchrony("fedat", tiers=2), nodes)
    state, _, reports = play(made, 1)
    nodes.here, made.clock.course._looked = {*IDS}, 0.0
    _, _, later = play(made, 2, state, first=2)
    assert [report.cohort for report in (*reports, *later)] == [[1, 2], [1, 2], [0, 3]]


def test_who_leaves_in_the_middle_is_replaced_by_another():
    nodes = Elsewhere((0, GONE), 2, 1)
    _, places, (report,) = play(engine(Asynchrony("fedbuff", buffer=2), nodes, at_once=2), 1)
    assert nodes.asked == [0, 1, 2, 3]  # at two at once: 2 in the place of 0, and 3 in that of 2, whose reply waits
    assert report.replied == [1, 2]
    assert report.failures[0].kind == "absence"
    assert places == [(walk(1, X0) + walk(2, X0)) / 2]


def test_a_round_is_undone_and_not_lost_while_nobody_is_there():
    nodes = Elsewhere(1, *((id, GONE) for id in (0, 2, 3)), 0, 2)
    made = engine(Asynchrony("fedbuff", buffer=2), nodes)
    state = made.start()
    with pytest.raises(Deserted, match="nobody is at work, and of those that could be asked nobody is there"):
        made.round(1, state, IDS)
    assert made.asynchronous.waiting == {1}
    nodes.here = {*IDS}
    _, report = made.round(1, state, IDS)
    assert report.replied == [0, 1]  # the reply that had come before is not lost


def test_a_round_is_lost_when_nobody_is_left_to_ask():
    made = engine(Asynchrony("fedbuff", buffer=4), Elsewhere(0, 2, 3, 1), Fails())
    _, report = made.round(1, made.start(), IDS)
    assert report.lost == "nobody is left to ask"
    assert list(report.failures) == [1]


def test_another_process_asks_anew_what_was_under_way_and_says_so(caplog):
    rule = Asynchrony("fedbuff", buffer=2)
    first = engine(rule, Elsewhere(1, 0, 0, 3))
    state, *_ = play(first, 2)
    kept = first.asynchronous.state()
    assert sorted(kept["departures"]["under_way"]) == [1, 2]
    first.close()
    nodes = Elsewhere(2, 1)
    second = engine(rule, nodes, at_once=2)
    second.start()
    second.asynchronous.go_on(kept, Place)
    with caplog.at_level(logging.WARNING):
        _, places, (report,) = play(second, 1, state, first=3)
    assert nodes.asked[:2] == [1, 2]  # before those that are preferred
    assert "round 3: clients 1, 2 are asked anew, since they had not answered when the run was stopped" in caplog.text
    assert (report.replied, report.stale) == ([1, 2], {})  # by the newest version
    x = float(state.x)
    assert places == pytest.approx([(walk(1, x) + walk(2, x)) / 2], abs=1e-12)


def test_replies_that_wait_survive_the_process():
    rule = Asynchrony("fedat", tiers=2)
    first = engine(rule, Elsewhere(0, 1, 2, 0, 1))
    state, *_ = play(first, 2)
    second = engine(rule, Elsewhere(3, 2))
    second.start()
    second.asynchronous.go_on(first.asynchronous.state(), Place)
    assert second.asynchronous.waiting == {2}
    _, _, reports = play(second, 2, state, first=3)
    assert [(report.replied, report.stale) for report in reports] == [([2], {2: 2}), ([2, 3], {})]


class Private(Walks):
    releases_privately = True


def test_a_private_release_is_recorded_before_it_is_asked_for_and_stands_if_nobody_answers(tmp_path):
    place, nodes = tmp_path / "releases.json", Elsewhere(1, 0)

    def recorded(client):
        assert json.loads(place.read_text())[str(client)][1:] == [1, nodes.asked.count(client) + 1]

    nodes.before = recorded
    made = engine(Asynchrony("fedbuff", buffer=2), nodes, Private(), ledger=Ledger(place))
    play(made, 1)
    made.close()
    assert Ledger(place).releases == {2: Releases(0, unheard=1), 3: Releases(0, unheard=1)}


def test_what_an_abandoned_process_recorded_is_not_written_over_the_next_ones(tmp_path):
    """Whoever collects its garbage, and when."""
    place, rule = tmp_path / "releases.json", Asynchrony("fedbuff", buffer=2)
    first = engine(rule, Elsewhere(1, 0), Private(), ledger=Ledger(place))
    state, *_ = play(first, 1)
    first.close()
    second = engine(rule, Elsewhere(2, 3), Private(), ledger=Ledger(place))
    second.start()
    play(second, 1, state, first=2)
    second.close()
    then = place.read_bytes()
    del first, second
    assert place.read_bytes() == then


def test_a_rule_has_no_larger_buffer_and_no_more_tiers_than_there_are_clients():
    assert Asynchrony("fedbuff", buffer=10).among(3).buffer == 3
    assert Asynchrony("fedat", tiers=5).among(3).tiers == 3
    rule = Asynchrony("fedasync")
    assert rule.among(1) is rule
