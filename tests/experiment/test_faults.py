"""A run that is killed, finds the disk full, or loses its power at any single step resumes to the same bytes."""

import shutil
from functools import cache

import pytest

from potluck.core.ground.errors import CheckpointError, StorageError
from potluck.engine.disk.files import using
from potluck.experiment.federation.assemble import Assembly
from potluck.experiment.folder.folder import open_folder
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.presets import experiment_for
from potluck.testing.faults import FAULTS, Faulty, Killed
from potluck.testing.worlds import World, toy_federation

RECORDS = ("config.toml", "rounds.jsonl", "clients.jsonl")
WRITTEN = (*RECORDS, *(f"checkpoint/{name}.json" for name in ("last", "best", "round-000001")))
ASSEMBLY = Assembly(toy_federation(World(clients=2, architectures=1)), "data", "parts")


@cache
def asked(rounds):
    words = ["method.training.epochs=1", "method.training.batch_size=64", "run.executor=sequential"]
    return experiment_for("local", [*words, "run.common_test=false", "run.keep_every=1", f"run.rounds={rounds}"])


def played(folder, rounds=2, disk=None):
    """Start a run or go on with it, as the command line does."""
    experiment = asked(rounds)
    with using(disk or Faulty()):
        execute(prepare(experiment, ASSEMBLY, folder), experiment, folder)
    return {name: (folder / name).read_bytes() for name in WRITTEN}


def failed(folder, rounds, disk, fault):
    """Play until the fault strikes; what the user reads if it is one that a user can read of."""
    with pytest.raises(StorageError if fault == "full" else Killed) as caught:
        played(folder, rounds, disk)
    if fault == "full":
        assert str(caught.value).startswith("cannot ")
        assert "No space left on device" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an undisturbed run writes."""
    return played(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def stopped(tmp_path):
    """A run that was killed when it had recorded a second round and not checkpointed it."""
    folder = tmp_path / "stopped"
    played(folder, rounds=1)
    steps = Faulty()
    played(shutil.copytree(folder, tmp_path / "copy"), disk=steps)
    within = next(place for place, step in enumerate(steps.steps) if step.startswith("append states-"))
    failed(folder, 2, Faulty(within, "torn"), "torn")
    assert (folder / "rounds.jsonl").read_text().count("\n") == 2
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_fails_at_any_step_resumes_to_the_same_bytes(fault, whole, tmp_path):
    counted = Faulty()
    played(tmp_path, disk=counted)
    begun = 0
    for step in range(len(counted.steps)):
        folder = tmp_path / "failed"
        folder.mkdir()
        failed(folder, 2, Faulty(step, fault), fault)
        try:
            open_folder(folder)
            begun += 1
        except CheckpointError:
            assert not list(folder.glob("*.jsonl")), "it has computed something and cannot be resumed"
        assert played(folder) == whole, counted.steps[step]
        assert open_folder(folder)["status"] == "finished"
        shutil.rmtree(folder)
    assert begun > len(counted.steps) / 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_resume_that_fails_at_any_step_resumes_to_the_same_bytes(fault, whole, stopped, tmp_path):
    counted = Faulty()
    played(shutil.copytree(stopped, tmp_path / "counted"), disk=counted)
    assert "rename rounds.jsonl" in counted.steps  # it had lines to drop
    for step in range(len(counted.steps)):
        folder = shutil.copytree(stopped, tmp_path / str(step))
        failed(folder, 2, Faulty(step, fault), fault)
        assert played(folder) == whole, counted.steps[step]
        shutil.rmtree(folder)


def test_what_a_checkpoint_stands_on_lasts_before_it_does(tmp_path):
    counted = Faulty()
    played(tmp_path, rounds=1, disk=counted)
    steps = counted.steps
    for before in ("sync rounds.jsonl", "sync clients.jsonl", "sync checkpoint"):
        assert steps.index(before) < steps.index("rename last.json")


def test_a_killed_run_leaves_nothing_aside_for_good(stopped, tmp_path):
    (stopped / "checkpoint" / "state-0.safetensors.tmp").write_bytes(b"half")
    played(stopped)
    assert not list(stopped.rglob("*.tmp"))
