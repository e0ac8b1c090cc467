"""Ray's actors give what one process gives, also when a machine is lost."""

import threading

import pytest

from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.watching.observers import Observer
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


def experiment(executor, method):
    return resolve(
        {
            "federation": {"dataset": "digits", "train_fraction": 0.2, "clients": 4, "models": ["cnn2", "cnn3"]},
            "method": {"name": method, "training": {"epochs": 1}},
            "run": {"rounds": 2, "executor": executor, "workers": 2},
        }
    )


def played(folder, executor, method="fedin", watch=lambda record: None, told=lambda event: None):
    folder.mkdir()
    chosen = experiment(executor, method)
    execute(
        prepare(chosen, assemble(chosen), folder), chosen, folder, Observer.of(on_round_end=watch, on_client_end=told)
    )
    records = [(folder / name).read_bytes() for name in (ROUNDS, CLIENTS)]
    return [*records, Checkpoint.read(folder / CHECKPOINT / LAST).digest]


def test_two_machines_give_the_bits_of_one_process_which_is_told_of_each_client(cluster, tmp_path):
    told = []
    found = played(tmp_path / "ray", "ray", told=told.append)
    assert found == played(tmp_path / "here", "sequential")
    trained = [event for event in told if event.work == "training" and event.round == 1]
    assert sorted(event.client for event in trained) == [0, 1, 2, 3]
    assert [event.done for event in trained] == [1, 2, 3, 4]


SLOW = """
import time
from dataclasses import dataclass

from potluck.core.method import on_client
from potluck.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Slow(FedAvg):
    @on_client
    def local_update(self, client, message):
        time.sleep(1.0)
        return (yield from super().local_update(client, message))
"""


def test_a_machine_that_is_lost_in_the_middle_of_a_round_costs_nothing(cluster, tmp_path):
    """And a method from a file of one's own reaches machines that do not have the file."""
    (tmp_path / "slow.py").write_text(SLOW)
    timers = []

    def lose_soon(record):
        if record.round == 1:
            timers.append(threading.Timer(0.5, cluster.remove_node, (cluster.second, False)))
            timers[0].start()

    method = str(tmp_path / "slow.py")
    found = played(tmp_path / "ray", "ray", method, lose_soon)
    timers[0].join()
    assert found == played(tmp_path / "here", "sequential", method)
