"""Each tracker has what the records have, by its own reader: every round once, however the run was killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from potluck.core.ground.errors import ConfigError
from potluck.experiment.running.run import Run
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import RunConfig
from potluck.experiment.watching.trackers.tracker import Tracker, flat_settings, numbers_of
from potluck.methods.fedavg import FedAvg
from potluck.records import experiment_hash
from potluck.testing.worlds import World, quick, toy_federation

pytestmark = pytest.mark.filterwarnings("ignore")  # the trackers' own

PLACES = {"MLFLOW_TRACKING_URI": "sqlite:///{}/mlflow.db", "TRACKIO_DIR": "{}/trackio", "WANDB_MODE": "offline"}


def run(folder, track, rounds=3):
    method = quick(FedAvg)
    config = RunConfig(rounds=rounds, executor="sequential", track=track)
    return Run(method, toy_federation(World().fit_for(method)), config, folder)


def of_tensorboard(folder, place):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def of_mlflow(folder, place):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{place}/mlflow.db")
    (only,) = client.search_runs([client.get_experiment_by_name("potluck").experiment_id])
    assert only.info.run_name == folder.name
    assert only.data.params["method.training.epochs"] == "1"
    histories = {key: client.get_metric_history(only.info.run_id, key) for key in only.data.metrics}
    return {key: sorted((metric.step, metric.value) for metric in history) for key, history in histories.items()}


def of_wandb(folder, place):
    from wandb.proto.wandb_internal_pb2 import Record

    from potluck.experiment.watching.trackers.wandb import _records

    found = {}
    names = set()
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        names.add(path.name)
        for content in _records(path.read_bytes()):
            record = Record.FromString(content)
            for item in record.history.item:
                key = item.key or item.nested_key[0]
                if not key.startswith("_"):
                    found.setdefault(key, []).append((record.history.step.num, json.loads(item.value_json)))
    assert len(names) == 1  # of one run
    return found


def of_trackio(folder, place):
    from trackio.sqlite_storage import SQLiteStorage

    (only,) = SQLiteStorage.get_runs("potluck")
    assert only.startswith(folder.name)
    found = {}
    for entry in SQLiteStorage.get_logs("potluck", only):
        for key, value in entry.items():
            if key not in ("step", "timestamp"):
                found.setdefault(key, []).append((entry["step"], value))
    return {key: sorted(values) for key, values in found.items()}


READERS = {"tensorboard": of_tensorboard, "mlflow": of_mlflow, "wandb": of_wandb, "trackio": of_trackio}


@pytest.fixture(params=READERS)
def tracker(request, tmp_path, monkeypatch):
    """A tracker's name, if it is installed; it stores what it is sent below the test's folder."""
    for key, value in PLACES.items():
        monkeypatch.setenv(key, value.format(tmp_path))
    monkeypatch.chdir(tmp_path)
    pytest.importorskip(request.param, reason=f"the extra {request.param!r} is not installed")
    if request.param == "trackio":
        monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    return request.param


def check_same(name, folder, place, records):
    found = READERS[name](folder, place)
    expected = {}
    for record in records:
        for key, value in numbers_of(record).items():
            expected.setdefault(key, []).append((record.round, value))
    if name == "mlflow":
        from potluck.experiment.watching.trackers.mlflow import _key

        expected = {_key(key): values for key, values in expected.items()}
    assert found.keys() >= expected.keys()
    for key, values in expected.items():
        assert [step for step, _ in found[key]] == [step for step, _ in values], key
        assert [value for _, value in found[key]] == pytest.approx([value for _, value in values], rel=1e-6)


@pytest.mark.slow
def test_a_tracker_has_every_number_of_a_run_that_was_resumed_once(tracker, tmp_path):
    first = run(tmp_path / "run", tracker, rounds=2).run().rounds
    rest = run(tmp_path / "run", tracker, rounds=3).run().rounds
    check_same(tracker, tmp_path / "run", tmp_path, [*first, *rest])


KILLED = """
import os, signal, sys
from pathlib import Path
import test_trackers
from potluck.experiment.watching.observers import Observer
from potluck.experiment.watching.trackers.tracker import Tracker

folder, name, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

before = Tracker.on_round_end
if when == "before":
    Tracker.on_round_end = lambda self, event: kill() if event.round == 2 else before(self, event)
after = Observer.of(on_round_end=lambda record: record.round == 2 and kill())
test_trackers.run(folder, name).run(after)
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_run_that_is_resumed_has_no_round_twice_and_lacks_none(tracker, when, tmp_path):
    """It was killed when the round was checkpointed, before or after the tracker had it."""
    there = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path / "run"), tracker, when]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": there}, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run(tmp_path / "run", tracker).run()
    whole = run(tmp_path / "whole", ()).run().rounds
    check_same(tracker, tmp_path / "run", tmp_path, whole)


class Notes(Tracker):
    """Keeps what it is sent."""

    def __init__(self, has=()):
        super().__init__()
        self.has, self.got, self.closed = has, [], []

    def open(self, folder, name, identity, settings):
        self.identity, self.settings = identity, settings
        return self.has

    def send(self, round, numbers):
        self.got.append(round)

    def close(self, status):
        self.closed.append(status)


def test_a_tracker_is_sent_the_earlier_rounds_that_it_lacks(tmp_path):
    run(tmp_path / "run", (), rounds=3).run()
    notes = Notes(has=[1, 3])
    run(tmp_path / "run", (), rounds=4).run(notes)
    assert (notes.got, notes.closed) == ([2, 4], ["finished"])
    again, other = Notes(), Notes()
    run(tmp_path / "run", (), rounds=4).run(again)
    run(tmp_path / "other", (), rounds=1).run(other)
    assert again.identity == notes.identity != other.identity
    assert notes.settings["run.rounds"] == 4
    assert notes.settings["method.training.epochs"] == 1


def test_a_run_that_is_tracked_is_the_same_experiment_with_the_same_bytes(tmp_path, monkeypatch):
    tables = {"federation": {"dataset": "digits"}, "run": {"rounds": 2}}
    tracked = resolve({**tables, "run": {"rounds": 2, "track": ["tensorboard", "wandb"]}})
    assert tracked.experiment_id == resolve(tables).experiment_id
    assert tracked.run.track == ("tensorboard", "wandb")
    assert resolve(tracked.tree()).run == tracked.run
    old = {key: value for key, value in resolve(tables).tree()["run"].items() if key != "track"}
    assert experiment_hash({**resolve(tables).tree(), "run": old}) == tracked.experiment_id
    monkeypatch.setattr("potluck.experiment.running.run.check_installed", lambda track: None)
    monkeypatch.setattr("potluck.experiment.running.run.trackers", lambda track: [Notes()] if track else [])
    digests = [run(tmp_path / str(len(track)), track).run().checkpoint for track in ((), ("tensorboard",))]
    assert digests[0] == digests[1]
    run(tmp_path / "0", "mlflow", rounds=4).run()  # it may be tracked from here on


@pytest.mark.parametrize(
    ("track", "expected"),
    [("tensorbord", "run.track"), (["tensorboard", "neptune"], "run.track"), (3, "run.track")],
)
def test_a_tracker_that_there_is_not_is_one_line(track, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        resolve({"run": {"track": track}})
    assert "'tensorboard'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tracker_that_is_not_installed_is_one_line_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"wandb is not installed: pip install 'potluck\[wandb\]'"):
        run(tmp_path / "run", "wandb")
    monkeypatch.undo()
    monkeypatch.setattr("potluck.experiment.running.run.check_installed", lambda track: None)
    with pytest.raises(ConfigError, match="expected a run with a folder"):
        run(None, "tensorboard")


def test_numbers_of__names_what_a_record_holds(tmp_path):
    (record,) = run(tmp_path / "run", (), rounds=1).run().rounds
    numbers = numbers_of(record)
    assert numbers["personal/accuracy"] == record.value("personal", "accuracy")
    assert numbers["bytes/up"] == record.bytes_up
    assert numbers["loss/local"] == record.loss_local
    assert numbers["clients/replied"] == len(record.replied)
    architecture, value = next(iter(record.by_architecture("personal", "accuracy").items()))
    assert numbers[f"personal/accuracy/{architecture}"] == value


def test_flat__leaves_out_what_is_not_set():
    assert dict(flat_settings({"a": {"b": 1, "c": None}, "d": [1, 2]})) == {"a.b": 1, "d": "[1, 2]"}
