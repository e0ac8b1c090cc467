import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from potluck.core.ground.errors import CheckpointError, StorageError
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.folder.folder import open_folder
from potluck.experiment.running.execute import execute, holding, prepare
from potluck.experiment.running.run import Run
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.watching.observers import Observer

HOLDS = """
import sys
from pathlib import Path
from potluck.experiment.running.execute import holding
with holding(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""

FROZEN = """
from torch import nn

def backbone(num_classes, input_shape):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))
    net[1].requires_grad_(False)
    net[2].eval()
    return net
"""


@pytest.fixture
def experiment():
    return experiment_for(
        "local", ["federation.models=[{name='cnn2', width=2}]", "federation.clients=2", "run.rounds=1"]
    )


def test_a_run_leaves_what_it_stands_on_and_how_it_ended(experiment, tmp_path):
    result, privacy = execute(prepare(experiment, assemble(experiment), tmp_path), experiment, tmp_path)
    manifest = open_folder(tmp_path)
    assert manifest["status"] == "finished"
    assert manifest["privacy"] is privacy is None
    assert "private_noise" not in manifest["computing"]
    assert manifest["computing"]["precision"] == "fp32"
    assert manifest["computing"]["executor"] in ("sequential", "workers")
    assert len(result.rounds) == 1


def test_a_manifest_says_what_the_models_builders_have_frozen(tmp_path):
    nets = tmp_path / "nets.py"
    nets.write_text(FROZEN)
    models = f"federation.models=['cnn2', '{nets}:backbone']"
    experiment = experiment_for("local", [models, "run.rounds=1", "federation.clients=2"])
    folder = tmp_path / "run"
    execute(prepare(experiment, assemble(experiment), folder), experiment, folder)
    statistics = [f"2.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")]
    assert open_folder(folder)["frozen"] == {f"{nets}:backbone": ["1.bias", "1.weight", *statistics]}


def test_a_run_that_fails_says_so(experiment, tmp_path):
    def fails(record):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        execute(
            prepare(experiment, assemble(experiment), tmp_path), experiment, tmp_path, Observer.of(on_round_end=fails)
        )
    assert open_folder(tmp_path)["status"] == "failed"


@pytest.mark.slow
def test_a_folder_that_another_process_plays_in_is_refused_until_that_ends(tmp_path):
    pytest.importorskip("fcntl", reason="this system has no file locks")
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match="another process is running in this folder"), holding(tmp_path):
            pass
        other.kill()
    with holding(tmp_path):
        pass


FORKS = """
import os, sys, time
from pathlib import Path
from potluck.experiment.running.execute import holding
with holding(Path(sys.argv[1])):
    worker = os.fork()
    if worker == 0:
        sys.stdin.read()
        os._exit(0)
    print(worker, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_process_takes_its_lock_with_it_though_its_workers_live_on(tmp_path):
    pytest.importorskip("fcntl", reason="this system has no file locks")
    command = [sys.executable, "-c", FORKS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        worker = int(process.stdout.readline())
        with pytest.raises(CheckpointError, match="another process is running in this folder"), holding(tmp_path):
            pass
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it is there still
        with holding(tmp_path):
            pass
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("name", ["lock", "log.txt", "config.toml.tmp"])
def test_a_folder_that_takes_no_files_is_one_line(name, experiment, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(StorageError, match=r"^cannot write .*: Is a directory$"), holding(tmp_path):
        execute(prepare(experiment, assemble(experiment), tmp_path), experiment, tmp_path)


@pytest.mark.slow
def test_a_manifest_says_how_the_run_stands_while_it_goes_on(experiment, tmp_path):
    said = []

    def watch(record):
        said.append(open_folder(tmp_path)["status"])

    execute(prepare(experiment, assemble(experiment), tmp_path), experiment, tmp_path, Observer.of(on_round_end=watch))
    longer = dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, rounds=2))
    run = prepare(longer, assemble(longer), tmp_path)
    assert "ended" not in open_folder(tmp_path)
    execute(run, longer, tmp_path, Observer.of(on_round_end=watch))
    assert said == ["running", "running"]


def test_a_manifest_of_another_version_or_damaged_is_refused(experiment, tmp_path):
    execute(prepare(experiment, assemble(experiment), tmp_path), experiment, tmp_path)
    manifest = open_folder(tmp_path)
    for content, expected in [
        (json.dumps({**manifest, "schema_version": 7}), "has schema version 7"),
        ("[]", "is damaged: found list"),
        ("{", "is damaged"),
        ("{}", "it has no 'schema_version'"),
    ]:
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(CheckpointError, match=expected):
            open_folder(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("earlier", [3, ["?"], [{"potluck_commit": "a"}]])
def test_a_run_whose_manifest_is_damaged_where_it_tells_of_earlier_rounds_does_not_go_on(experiment, tmp_path, earlier):
    execute(prepare(experiment, assemble(experiment), tmp_path), experiment, tmp_path)
    damaged = json.dumps({**open_folder(tmp_path), "earlier": earlier})
    (tmp_path / "manifest.json").write_text(damaged)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: of `earlier`"):
        prepare(experiment, assemble(experiment), tmp_path)
    assert (tmp_path / "manifest.json").read_text() == damaged


@pytest.mark.slow
def test_two_runs_in_two_threads_end_like_each_alone(tmp_path):
    (tmp_path / "dropout.py").write_text(DROPOUT)
    models = f"federation.models=['{tmp_path / 'dropout.py'}:net']"
    more = [models, "federation.clients=3", "federation.train_fraction=0.2", "run.rounds=2", "run.executor=sequential"]

    def digest(seed):
        experiment = experiment_for("fedavg", [*more, f"run.seed={seed}"])
        federation = assemble(experiment).federation
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return Run(experiment.method, federation, experiment.run, folder).run().checkpoint.digest

    alone = [digest(seed) for seed in range(3)]
    assert len(set(alone)) == 3
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(digest, range(3))) == alone


DROPOUT = """from torch import nn


def net(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(), nn.Linear(32, num_classes))
"""
