"""Observers see what happens when it happens, change no bit, and their failures end the run in order or not at all."""

import os
from dataclasses import dataclass

import pytest

from potluck.core.method import on_client
from potluck.core.roles import Failure
from potluck.engine.executors.choice import ChosenExecutor
from potluck.engine.executors.held import Held
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.workers import Workers, can_fork
from potluck.engine.rounds.engine import Engine
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.experiment.watching.observers import Observer
from potluck.methods.fedavg import FedAvg
from potluck.testing.worlds import World, quick, toy_federation

ROUNDS = 2


class Diary(Observer):
    """Writes down everything."""

    def __init__(self):
        self.events = []

    def on_run_start(self, event):
        self.events.append(("run", event))

    def on_round_start(self, event):
        self.events.append(("round", event))

    def on_client_end(self, event):
        self.events.append((event.work, event))

    def on_evaluation_start(self, event):
        self.events.append(("evaluate", event))

    def on_evaluation_end(self, event):
        self.events.append(("evaluated", event))

    def on_round_end(self, event):
        self.events.append(("record", event))

    def on_run_end(self, event):
        self.events.append(("end", event))

    def of(self, *kinds):
        return [event for kind, event in self.events if kind in kinds]


class Late(Sequential):
    """An executor whose clients cannot be reached at the first look."""

    looks = 0

    def absent(self, clients):
        self.looks += 1
        return dict.fromkeys(clients, "a machine") if self.looks == 1 else {}


def run(folder, *, method=None, clients=3, late=False, **config):
    method = quick(method or FedAvg)
    world = World(clients=clients)
    settings = RunConfig(**{"rounds": ROUNDS, "executor": "sequential", **config})
    choice = ChosenExecutor(Late(), "sequential", 1, "a test") if late else None
    return Run(method, toy_federation(world.fit_for(method)), settings, folder, choice)


def bytes_of(folder):
    files = sorted(path for path in folder.rglob("*.json*") if path.name != "timings.jsonl")
    return {path.name: path.read_bytes() for path in files}


def test_an_observer_is_told_of_everything_in_order(tmp_path):
    diary = Diary()
    result = run(tmp_path).run(diary)
    kinds = [kind for kind, _ in diary.events]
    evaluations = kinds.count("evaluation") // ROUNDS  # own parts, and each distinct model on the common test set
    one = ["round", *["training"] * 3, "evaluate", *["evaluation"] * evaluations, "evaluated", "record"]
    assert kinds == ["run", *one * ROUNDS, "end"]
    (start,) = diary.of("run")
    assert (start.rounds, start.rounds_done, start.clients, start.cohort_size) == (ROUNDS, 0, 3, 3)
    assert start.metric.name == "accuracy"
    assert start.settings["run"]["rounds"] == ROUNDS
    assert start.folder == tmp_path
    trained = diary.of("training")
    assert [(event.round, event.client, event.done, event.of) for event in trained] == [
        (number, client, client + 1, 3) for number in (1, 2) for client in range(3)
    ]
    assert {event.handler for event in trained} == {"local_update"}
    for number, record in enumerate(result.rounds, start=1):
        losses = [event.loss for event in trained if event.round == number]
        assert sum(losses) / 3 == pytest.approx(record.loss_local)
    assert diary.of("record") == result.rounds
    assert [event.scores for event in diary.of("evaluated")][-1] == result.evaluation.scores
    (end,) = diary.of("end")
    assert (end.status, end.rounds_done, end.result, end.error) == ("finished", ROUNDS, result, None)


def test_a_resumed_run_tells_which_rounds_were_done_before(tmp_path):
    earlier = run(tmp_path, rounds=2).run().rounds
    diary = Diary()
    run(tmp_path, rounds=3).run(diary)
    (start,) = diary.of("run")
    assert (start.rounds, start.rounds_done) == (3, 2)
    assert start.earlier() == earlier
    assert [record.round for record in diary.of("record")] == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [{"executor": "sequential"}, {"executor": "stacked"}, {"executor": "workers", "workers": 2}],
    ids=lambda config: config["executor"],
)
def test_observers_change_no_bit_with_any_executor(config, tmp_path):
    run(tmp_path / "alone", **config).run()
    diary = Diary()
    run(tmp_path / "observed", **config).run(diary)
    assert bytes_of(tmp_path / "observed") == bytes_of(tmp_path / "alone")
    for number in range(1, ROUNDS + 1):
        events = [event for event in diary.of("training") if event.round == number]
        assert sorted(event.client for event in events) == [0, 1, 2]
        assert [event.done for event in events] == [1, 2, 3]


class Fails(Observer):
    """Raises at one event."""

    def __init__(self, at, error):
        self.at, self.error, self.heard = at, error, []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def told(event):
            self.heard.append(name)
            if name == self.at:
                raise self.error

        return told


class MayFail(Fails):
    may_fail = True


EVENTS = [name for name in vars(Observer) if name.startswith("on_")]


@pytest.mark.slow
@pytest.mark.parametrize("event", EVENTS)
def test_what_an_observer_raises_ends_the_run_which_resumes_to_the_same_bytes(event, tmp_path, monkeypatch):
    monkeypatch.setattr("potluck.engine.rounds.clock._LOOK_EVERY", 0.0)
    tolerant = {"tolerate_failures": True, "on_divergence": "drop"}
    run(tmp_path / "whole").run()
    diary, error = Diary(), ValueError("enough")
    with pytest.raises(ValueError, match="enough") as caught:
        run(tmp_path / "stopped", late=True, **tolerant).run(diary, Fails(event, error))
    assert caught.value is error
    (end,) = diary.of("end")
    assert end.status == ("finished" if event == "on_run_end" else "failed")
    run(tmp_path / "stopped", **tolerant).run()
    names = ("rounds.jsonl", "clients.jsonl")
    assert [(tmp_path / "stopped" / name).read_bytes() for name in names] == [
        (tmp_path / "whole" / name).read_bytes() for name in names
    ]


@pytest.mark.slow
@pytest.mark.parametrize("event", EVENTS)
def test_a_run_goes_on_without_an_observer_that_may_fail_and_says_so_once(event, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("potluck.engine.rounds.clock._LOOK_EVERY", 0.0)
    run(tmp_path / "alone").run()
    fails, diary = MayFail(event, OSError("no room")), Diary()
    run(tmp_path / "observed", late=True).run(fails, diary)
    assert bytes_of(tmp_path / "observed") == bytes_of(tmp_path / "alone")
    said = [record for record in caplog.records if "is left out" in record.getMessage()]
    assert [(record.on_screen, "MayFail" in record.message, "no room" in record.message) for record in said] == [
        (True, True, True)
    ]
    assert fails.heard.count(event) == 1
    assert fails.heard[-1] == "on_run_end"  # so that it can let go of what it holds
    assert len(diary.of("record")) == ROUNDS


@dataclass(frozen=True)
class OneFails(FedAvg):
    """Client 1 fails, so that an error in the same round could pass for the loss of the round."""

    @on_client
    def local_update(self, client, message):
        if client.id == 1:
            raise RuntimeError("no")
        return (yield from super().local_update(client, message))


def test_what_an_observer_raises_is_no_lost_round(tmp_path):
    def stop(event):
        if event.failure:
            seen.append(event)
        if event.client == 2:
            raise ValueError("enough")

    seen = []
    with pytest.raises(ValueError, match="enough"):
        run(tmp_path, method=OneFails, tolerate_failures=True).run(Observer.of(on_client_end=stop))
    assert [(event.client, event.loss, event.failure) for event in seen] == [(1, None, "RuntimeError: no")]
    assert run(tmp_path, method=OneFails, tolerate_failures=True).run().rounds[0].lost is None


def test_a_keyboard_interrupt_in_an_observer_ends_the_run_in_order(tmp_path):
    def interrupt(record):
        raise KeyboardInterrupt

    diary = Diary()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path).run(diary, Observer.of(on_round_end=interrupt))
    (end,) = diary.of("end")
    assert (end.status, end.rounds_done, end.result) == ("interrupted", 1, None)
    assert len(run(tmp_path).run().rounds) == ROUNDS - 1


def test_a_client_is_reported_when_its_outcome_arrives_and_not_when_its_turn_comes():
    """The last client in order is done first, as where forked workers take the longest work first."""
    told = []
    held = Held(lambda place, outcome: told.append(place))
    held[2] = held[0] = Failure(0, "work", "no")
    assert told == [2, 0]


def test_workers_report_the_longest_work_first_since_they_do_it_first(tmp_path):
    if not can_fork():
        pytest.skip("this system cannot fork")
    method = quick(FedAvg)
    federation = toy_federation(World(clients=3).fit_for(method))
    choice = ChosenExecutor(Workers(1), "workers", 1, "the test")
    diary = Diary()
    Run(method, federation, RunConfig(rounds=1), tmp_path, choice).run(diary)
    order = [event.client for event in diary.of("training")]
    engine = Engine(method, federation)
    costs = {client: engine._dispatch.cost(client, ("train",)) for client in range(3)}
    assert order == sorted(costs, key=lambda client: (-costs[client], client))
    assert order != [0, 1, 2]


def test_events_come_from_this_process(tmp_path):
    if not can_fork():
        pytest.skip("this system cannot fork")
    seen = []
    run(tmp_path, executor="workers", workers=2).run(Observer.of(on_client_end=lambda event: seen.append(os.getpid())))
    assert set(seen) == {os.getpid()}
