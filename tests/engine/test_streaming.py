"""Replies that come one at a time: their order, who is missing, and how many are in memory."""

import gc
import json
import os
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.core.nets.weights import parameters_of
from potluck.core.requests.fit import LocalTraining
from potluck.core.roles import Failure
from potluck.engine.client.session import Answer, ContractError
from potluck.engine.executors.held import Held
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers, can_fork
from potluck.engine.rounds.engine import Engine
from potluck.methods.fedavg import FedAvg
from potluck.testing.worlds import World, toy_federation

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "aggregation_memory.py"


@dataclass(frozen=True)
class Streams(Method):
    """What a round reads of its stream is its state; some clients fail."""

    on: tuple[int, ...] = ()

    def round(self, state, cohort, server):
        stream = cohort.stream(self.work, Message())
        return [(id, reply["id"]) for id, reply in stream], dict(stream.failures)

    @on_client
    def work(self, client, message):
        if client.id in self.on:
            raise MemoryError("none left")
        return Message(id=client.id)


def play(method, ids=(2, 0, 3), **options):
    engine = Engine(method, toy_federation(World()), **options)
    return engine.round(1, None, ids)


def test_stream_gives_each_reply_in_ascending_order_of_client_id():
    (pairs, failures), report = play(Streams())
    assert pairs == [(0, 0), (2, 2), (3, 3)]
    assert failures == {}
    assert report.traffic.up["id"] == 24


def test_stream_notes_who_failed_as_ask_does():
    (pairs, failures), report = play(Streams((2,)), tolerate_failures=True)
    assert pairs == [(0, 0), (3, 3)]
    assert set(failures) == set(report.failures) == {2}


def test_a_round_whose_stream_nobody_answers_is_lost():
    _, report = play(Streams((0, 2, 3)), tolerate_failures=True)
    assert report.lost.startswith("no client answered")


class Stops(Streams):
    """Reads one reply and no more."""

    def round(self, state, cohort, server):
        return next(iter(cohort.stream(self.work, Message())))


class Ignores(Streams):
    def round(self, state, cohort, server):
        cohort.stream(self.work, Message())
        return state


class Interrupts(Streams):
    """Asks again before it has read what it asked for first."""

    def round(self, state, cohort, server):
        for _ in cohort.stream(self.work, Message()):
            cohort.ask(self.work, Message())


@pytest.mark.parametrize("method", [Stops, Ignores, Interrupts])
def test_a_stream_that_is_not_read_to_its_end_breaks_the_contract(method):
    with pytest.raises(ContractError, match=r"not all replies of .*\.work were read"):
        play(method())


class Twice(Streams):
    """Two exchanges, streamed or asked, with a draw each."""

    def round(self, state, cohort, server):
        first = {id: reply["draw"] for id, reply in self.exchange(cohort)}
        return first, {id: reply["draw"] for id, reply in self.exchange(cohort)}

    def exchange(self, cohort):
        return cohort.stream(self.work, Message())

    @on_client
    def work(self, client, message):
        return Message(draw=torch.rand(2, generator=client.rng))


class AsksTwice(Twice):
    def exchange(self, cohort):
        return cohort.ask(self.work, Message()).items()


def test_stream_and_ask_name_their_draws_alike():
    streamed, asked = (play(method())[0] for method in (Twice, AsksTwice))
    for one, other in zip(streamed, asked, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[id], other[id]) for id in one)
    assert not torch.equal(streamed[0][0], streamed[1][0])


class Counts(Streams):
    """How many replies are alive when another comes, its own included."""

    def round(self, state, cohort, server):
        seen, most = [], []
        for _, reply in cohort.stream(self.work, Message()):
            seen.append(weakref.ref(reply))
            gc.collect()
            most.append(sum(one() is not None for one in seen))
            del reply
        return most


def test_the_engine_lets_go_of_a_reply_before_the_next_comes():
    most, _ = play(Counts(), ids=range(4))
    assert most == [1] * 4


EXECUTORS = [Sequential, lambda: Stacked(at_once=2), pytest.param(lambda: Workers(2), id="workers")]


@pytest.mark.parametrize("make", EXECUTORS)
def test_outcomes_beyond_the_cap_are_the_same_from_files(make, monkeypatch):
    if not can_fork():
        pytest.skip("this system cannot fork")
    method = FedAvg(LocalTraining("sgd", batch_size=8))

    def weights():
        engine = Engine(method, toy_federation(World(clients=6)), executor=make())
        try:
            state, _ = engine.round(1, engine.start(), range(6))
        finally:
            engine.close()
        return state.weights["all"]

    inside = weights()
    monkeypatch.setattr("potluck.engine.executors.held.MOST_BYTES", 0)
    outside = weights()
    assert inside.keys() == outside.keys()
    assert all(torch.equal(tensor, outside[name]) for name, tensor in inside.items())


def test_held_keeps_what_fits_in_memory_and_the_rest_in_files():
    held = Held(most_bytes=10)
    answers = {place: Answer(place, bytes([place] * 6), b"r" * place if place else None, ()) for place in range(4)}
    for place, answer in answers.items():
        held[place] = answer
    held[4] = Failure(4, "work", "lost")
    assert [len(outcome.payload) for outcome in held._outcomes.values() if isinstance(outcome, Answer)] == [6, 0, 0, 0]
    folder = held._folder
    assert [held.pop(place) for place in range(4)] == list(answers.values())
    assert held.pop(4).client == 4
    assert not list(folder.iterdir())
    held[5] = answers[0]
    assert held._outcomes[5].payload == answers[0].payload


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's record of a process's peak")
def test_fedavg_averages_many_replies_in_less_than_the_memory_of_three_and_ask_holds_all():
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import aggregation_memory as m;"
        "print(json.dumps([m.peak('4', 12, together) for together in (False, True)]))"
    )
    sys.path.insert(0, str(BENCHMARK.parent))
    try:
        from aggregation_memory import FREED_AT_ONCE
    finally:
        sys.path.pop(0)
    command = [sys.executable, "-c", code, str(BENCHMARK.parent)]
    environment = {**os.environ, **FREED_AT_ONCE, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    streamed, together = json.loads(done.stdout)
    assert 1.5 < streamed < 3
    assert together > 12


def test_a_reply_that_is_streamed_is_one_that_the_method_may_change():
    """Its tensors lie in the bytes that came, which nobody else reads."""

    class Changes(Streams):
        def round(self, state, cohort, server):
            found = {}
            for id, reply in cohort.stream(self.weights, Message()):
                found[id] = reply["w"]
                for tensor in reply["w"].values():
                    tensor.add_(1)
            return found

        @on_client
        def weights(self, client, message):
            return Message(w=parameters_of(client.model))

    once, _ = play(Changes())
    first = next(iter(once[0].values()))
    assert torch.isfinite(first).all()
