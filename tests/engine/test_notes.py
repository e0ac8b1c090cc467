"""Notes on their way from handlers and the server into a round's report and records."""

import json
import math
from dataclasses import dataclass, replace

import pytest

from potluck.core.ground.errors import DivergenceError
from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.core.roles import ClientFailure
from potluck.engine.client.session import Answer
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers, can_fork
from potluck.engine.rounds.engine import Engine
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.testing.worlds import World, toy_federation

FEDERATION = toy_federation(World(clients=3))
IDS = [0, 1, 2]


@dataclass(frozen=True)
class State:
    rounds: int


@dataclass(frozen=True)
class Noting(Method):
    """Two exchanges a round; clients but the last note their number, the server how many rounds there were."""

    wrong: bool = False
    at_server: bool = False

    def init(self, server):
        server.note(never=1)
        return State(0)

    def round(self, state, cohort, server):
        cohort.ask(self.work, Message())
        cohort.ask(self.look, Message())
        server.note(rounds=state.rounds + 1, odd=math.inf if self.at_server else 0.0)
        return State(state.rounds + 1)

    @on_client
    def work(self, client, message):
        client.note(number=client.id + client.round, seen=0.0)
        if self.wrong and client.id == 2:
            client.note(number=math.inf)
        return Message()

    @on_client
    def look(self, client, message):
        if client.id < 2:
            client.note(seen=client.id + 1)
        return Message()


class Claiming(Sequential):
    """Client 2 makes these notes of its reply, whatever its handler said."""

    def __init__(self, notes):
        self._notes = notes

    def run(self, host, tasks):
        for outcome in super().run(host, tasks):
            is_liar = isinstance(outcome, Answer) and outcome.client == 2
            yield replace(outcome, notes=self._notes) if is_liar else outcome


EXECUTORS = [Sequential, Stacked, *([lambda: Workers(2)] if can_fork() else [])]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_notes__are_the_servers_and_the_mean_over_the_clients_that_made_them(executor):
    engine = Engine(Noting(), FEDERATION, executor=executor())
    state = engine.start()
    for number in (1, 2):
        state, report = engine.round(number, state, IDS)
        # In the second exchange clients 0 and 1 note `seen` anew; client 2's is that of the first.
        expected = {"clients/number": 1.0 + number, "clients/seen": 1.0, "odd": 0.0, "rounds": float(number)}
        assert report.notes == expected
        assert list(report.notes) == sorted(expected)
    engine.close()


def test_notes__of_who_made_none_do_not_count_in_the_mean():
    class Some(Noting):
        def round(self, state, cohort, server):
            cohort.ask(self.look, Message())
            return state

    _, report = Engine(Some(), FEDERATION).round(1, State(0), IDS)
    assert report.notes == {"clients/seen": 1.5}


def test_notes__add_nothing_to_the_bytes_that_are_counted():
    _, report = Engine(Noting(), FEDERATION).round(1, State(0), IDS)
    assert (report.traffic.bytes_down, report.traffic.bytes_up) == (0, 0)


def test_notes__that_are_not_finite_are_divergence():
    with pytest.raises(DivergenceError, match=r"round 1: client 2 diverged in Noting\.work: note 'number'"):
        Engine(Noting(wrong=True), FEDERATION).round(1, State(0), IDS)
    _, report = Engine(Noting(wrong=True), FEDERATION, on_divergence="drop").round(1, State(0), IDS)
    assert report.failures[2].kind == "divergence"
    assert report.notes["clients/number"] == 1.5
    with pytest.raises(DivergenceError, match="round 1: the server's note 'odd': expected a finite number, found inf"):
        Engine(Noting(at_server=True), FEDERATION, tolerate_failures=True, on_divergence="stop").round(1, State(0), IDS)
    state, report = Engine(Noting(at_server=True), FEDERATION, on_divergence="drop").round(1, State(0), IDS)
    assert (state, report.notes) == (State(0), {})
    assert "the server's note 'odd'" in report.lost


@pytest.mark.parametrize(
    ("notes", "complaint"),
    [
        ({"x": math.nan}, "its note x"),
        ({"x": 1e12}, "its note x"),
        ({"x": "7"}, "its note x"),
        ({"a|b": 1.0}, r"note 'a\|b': expected a name"),
        ({"x" * 1000: 1.0}, "expected a name"),
        ({f"n{number}": 1.0 for number in range(33)}, "at most 32 notes"),
    ],
)
def test_notes__that_cannot_be_cost_their_sender_its_reply_and_nothing_else(notes, complaint):
    with pytest.raises((ClientFailure, DivergenceError), match=complaint):
        Engine(Noting(), FEDERATION, executor=Claiming(notes)).round(1, State(0), IDS)
    engine = Engine(Noting(), FEDERATION, executor=Claiming(notes), tolerate_failures=True)
    _, report = engine.round(1, State(0), IDS)
    assert sorted(report.failures) == [2]
    assert report.notes["clients/number"] == 1.5


def test_notes__are_in_the_records_and_the_same_after_a_run_was_resumed(tmp_path):
    for name, rounds in (("whole", [3]), ("parts", [1, 2, 3])):
        for number in rounds:
            config = RunConfig(rounds=number, executor="sequential")
            Run(Noting(), FEDERATION, config, tmp_path / name).run()
    lines = (tmp_path / "whole" / "rounds.jsonl").read_text()
    assert lines == (tmp_path / "parts" / "rounds.jsonl").read_text()
    assert [json.loads(line)["notes"]["rounds"] for line in lines.splitlines()] == [1.0, 2.0, 3.0]


def test_notes__are_no_entry_of_a_line_where_a_method_makes_none(tmp_path):
    class Silent(Noting):
        def round(self, state, cohort, server):
            return state

    Run(Silent(), FEDERATION, RunConfig(rounds=1, executor="sequential"), tmp_path).run()
    assert "notes" not in json.loads((tmp_path / "rounds.jsonl").read_text())
