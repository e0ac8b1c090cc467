"""Flower's own simulation gives the bytes of one process too."""

import pytest

from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.watching.observers import Observer
from potluck.records import CHECKPOINT, LAST, Checkpoint

pytest.importorskip("ray", reason="the extra 'ray' is not installed, on which Flower simulates")

TREE = {
    "federation": {"dataset": "digits", "train_fraction": 0.1, "clients": 2, "models": ["cnn2", "cnn3"]},
    "method": {"name": "fedin"},
    "run": {"rounds": 1, "executor": "sequential"},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Flower calls its simulation deprecated, and Ray leaves files open
def test_a_simulated_round_is_that_of_one_process(tmp_path):
    from potluck.flower.server.simulation import simulate

    experiment, folders = resolve(TREE), [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    execute(prepare(experiment, assemble(experiment), folders[0]), experiment, folders[0])
    seen = []
    simulate(experiment, folders[1], Observer.of(on_round_end=seen.append))
    here, there = (Checkpoint.read(folder / CHECKPOINT / LAST) for folder in folders)
    assert len(seen) == 1
    assert here.digest == there.digest
