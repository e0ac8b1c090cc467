"""Ray's actors give what one process gives, also when a machine is lost."""

import pytest

from potluck.experiment.assemble import assemble
from potluck.experiment.config import resolve
from potluck.experiment.play import play, prepare
from potluck.records import CHECKPOINT, CLIENTS, LAST, ROUNDS, Checkpoint

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes on this machine."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    found.second = found.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    yield found
    ray.shutdown()
    found.shutdown()


def experiment(executor, rounds=2):
    return resolve(
        {
            "federation": {"dataset": "digits", "train_fraction": 0.2, "clients": 4, "models": ["cnn2", "cnn3"]},
            "method": {"name": "fedin", "training": {"epochs": 1}},
            "run": {"rounds": rounds, "executor": executor, "workers": 2},
        }
    )


def played(folder, executor, watch=lambda record: None):
    folder.mkdir()
    chosen = experiment(executor)
    play(prepare(chosen, assemble(chosen), folder), chosen, folder, watch)
    records = [(folder / name).read_bytes() for name in (ROUNDS, CLIENTS)]
    return [*records, Checkpoint.read(folder / CHECKPOINT / LAST).digest]


def test_two_machines_give_the_bits_of_one_process(cluster, tmp_path):
    assert played(tmp_path / "ray", "ray") == played(tmp_path / "here", "sequential")


def test_a_lost_machine_costs_no_round(cluster, tmp_path):
    def lose(record):
        if record.round == 1:
            cluster.remove_node(cluster.second, allow_graceful=False)
            cluster.add_node(num_cpus=1)

    assert played(tmp_path / "ray", "ray", lose) == played(tmp_path / "here", "sequential")
