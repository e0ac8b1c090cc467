"""Observers see what happens when it happens, change no bit, and their failures end the run in order or not at all."""

import pytest

from potluck.experiment.config import RunConfig
from potluck.experiment.observers import Observer
from potluck.experiment.run import Run
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


def run(folder, *, method=None, clients=3, **config):
    method = quick(method or FedAvg)
    world = World(clients=clients)
    settings = RunConfig(**{"rounds": ROUNDS, "executor": "sequential", **config})
    return Run(method, toy_federation(world.fit_for(method)), settings, folder)


def bytes_of(folder):
    files = sorted(path for path in folder.rglob("*.json*") if path.name != "timings.jsonl")
    return {path.name: path.read_bytes() for path in files}


def test_an_observer_is_told_of_everything_in_order(tmp_path):
    diary = Diary()
    result = run(tmp_path).run(diary)
    kinds = [kind for kind, _ in diary.events]
    one = ["round", *["training"] * 3, "evaluate", *["evaluation"] * 6, "evaluated", "record"]
    assert [kind for kind, count in zip(kinds, range(len(kinds)))][0] == "run"
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
