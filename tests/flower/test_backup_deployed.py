"""A server is copied while its run goes on, killed, and put back elsewhere, with Flower's own programs."""

import json
import shutil
import subprocess

import pytest

from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.tables import read_toml
from potluck.records import CHECKPOINT, CLIENTS, CONFIG, COSTS, LAST, ROUNDS, Checkpoint

from .deployed import Deployment

pytestmark = pytest.mark.slow


@pytest.fixture
def deployment(tmp_path):
    """A federation whose clients keep something from round to round."""
    federation = {"dataset": "digits", "clients": 2, "train_fraction": 0.1, "models": ["cnn2", "cnn3"]}
    run = {"rounds": 6, "common_test": False, "evaluate_every": 6, "executor": "sequential"}
    tree = {"federation": federation, "method": {"name": "fedin"}, "run": run}
    found = Deployment(tmp_path, tree)
    try:
        yield found
    finally:
        found.close()


def found_in(folder):
    records = [(folder / name).read_bytes() for name in (ROUNDS, CLIENTS, COSTS)]
    return [*records, Checkpoint.read(folder / CHECKPOINT / LAST).digest]


def test_a_server_that_is_put_back_elsewhere_ends_with_the_same_bytes(deployment):
    place = deployment.place
    deployment.begin("run", "a", "b")
    deployment.hears("a", "at work on round 3")
    for source, copy in (("run", "backup"), ("keys", "backup-keys")):
        subprocess.run(["cp", "-a", place / source, place / copy], check=True)
    deployment.running["server"].kill()
    deployment.running.pop("server").wait(60)
    for lost in (place / "run", place / "keys", place / "backup/flower"):
        shutil.rmtree(lost, ignore_errors=True)
    (place / "backup/flower.jsonl").unlink(missing_ok=True)
    assert Checkpoint.read(place / "backup" / CHECKPOINT / LAST).round in (2, 3)
    words = ("serve", "--keys", "backup-keys", "--listen", deployment.address, "--folder", "backup")
    deployment.start("server", *words)
    assert deployment.running.pop("server").wait(500) == 0, deployment.lines("server")
    assert all(process.poll() is None for process in deployment.running.values()), "nodes come back by themselves"
    records = [json.loads(line) for line in (place / "backup" / ROUNDS).read_text().splitlines()]
    assert [record["replied"] for record in records] == [[0, 1]] * 6
    experiment, here = resolve(read_toml(place / "backup" / CONFIG)), place / "here"
    here.mkdir()
    execute(prepare(experiment, assemble(experiment), here), experiment, here)
    assert found_in(place / "backup") == found_in(here)


def test_a_copy_that_does_not_say_which_node_is_which_is_refused(deployment):
    place = deployment.place
    deployment.keys("--node", "a", "--node", "b")
    (place / "backup" / CHECKPOINT).mkdir(parents=True)
    (place / "backup" / CHECKPOINT / LAST).write_bytes(Checkpoint(1, (), {}, None, None, {}, {}).sealed())
    deployment.serve("backup")
    assert deployment.running.pop("server").wait(120) == 2
    deployment.hears("server", r"^potluck: .*backup/nodes\.json is missing, which says which node is which client")
