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
