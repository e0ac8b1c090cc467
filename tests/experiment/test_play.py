import subprocess
import sys

import pytest

from potluck.core.errors import CheckpointError
from potluck.experiment.assemble import assemble
from potluck.experiment.folder import open_folder
from potluck.experiment.play import holding, play, prepare
from potluck.experiment.presets import experiment_for

HOLDS = """
import sys
from pathlib import Path
from potluck.experiment.play import holding
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
    return experiment_for("local", ["federation.models=[{name='cnn2', width=2}]", "run.rounds=1"])


def test_a_run_leaves_what_it_stands_on_and_how_it_ended(experiment, tmp_path):
    result, privacy = play(prepare(experiment, assemble(experiment), tmp_path), experiment, tmp_path)
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
    play(prepare(experiment, assemble(experiment), folder), experiment, folder)
    statistics = [f"2.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")]
    assert open_folder(folder)["frozen"] == {f"{nets}:backbone": ["1.bias", "1.weight", *statistics]}


def test_a_run_that_fails_says_so(experiment, tmp_path):
    def fails(record):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        play(prepare(experiment, assemble(experiment), tmp_path), experiment, tmp_path, fails)
    assert open_folder(tmp_path)["status"] == "failed"


@pytest.mark.slow
def test_a_folder_that_another_process_plays_in_is_refused_until_that_ends(tmp_path):
    pytest.importorskip("fcntl", reason="this system has no file locks")
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match="another process plays this run"), holding(tmp_path):
            pass
        other.kill()
    with holding(tmp_path):
        pass
