"""Real nodes clip what they send, as clients in one process do, and make sums private by noise of their own."""

import json
from copy import deepcopy

import pytest

from potluck.parts.privacy import SumPrivacy
from potluck.records import CHECKPOINT, LAST, MANIFEST, Checkpoint

from ..carried_out import carried_out
from .deployed import TWO_CLIENTS, Deployment, rounds_of

pytestmark = pytest.mark.slow
CLIP = 0.05


def tables(clients=2, method=None, **run):
    tree = deepcopy(TWO_CLIENTS)
    tree["federation"]["clients"] = clients
    tree["federation"]["models"] = [{"name": "mlp2", "width": 8}]
    tree["method"] |= method or {}
    tree["run"] |= {"rounds": 2, "evaluate_every": 2, "outlier_factor": 0, "clip_update": CLIP, **run}
    return tree


def served(place, tree):
    """The folder of a run that real nodes have carried out."""
    deployment = Deployment(place, tree)
    names = [f"ward-{number}" for number in range(tree["federation"]["clients"])]
    try:
        deployment.keys(*(word for name in names for word in ("--node", name)))
        deployment.serve("run")
        deployment.hears("server", "nodes join by")
        for name in names:
            deployment.carry(name)
            deployment.join(name)
        assert deployment.running.pop("server").wait(400) == 0, deployment.lines("server")
    finally:
        deployment.close()
    return place / "run"


def digest_in(folder):
    return Checkpoint.read(folder / CHECKPOINT / LAST).digest


def test_real_nodes_clip_their_updates_as_clients_in_one_process_do(tmp_path):
    there = served(tmp_path, tables())
    records = rounds_of(there)
    assert all(0 < record["notes"]["clients/update_scale"] < 1 for record in records), records
    carried_out(tmp_path / "here", tables(executor="sequential"))
    assert digest_in(there) == digest_in(tmp_path / "here")
    free = tables(executor="sequential")
    del free["run"]["clip_update"]
    carried_out(tmp_path / "free", free)
    assert digest_in(there) != digest_in(tmp_path / "free")


def test_real_nodes_add_noise_and_count_it_and_their_server_states_what_it_comes_to(tmp_path):
    private = {"secure_sums": True, "private_weights": {"noise_multiplier": 2.0, "delta": 1e-5}}
    there = served(tmp_path, tables(3, {"sharing": {"weighting": "uniform"}}, **private))
    assert [record["replied"] for record in rounds_of(there)] == [[0, 1, 2]] * 2
    said = json.loads((there / MANIFEST).read_text())["privacy"]
    epsilon = SumPrivacy(2.0, 1e-5).spent(2)
    assert epsilon <= float(said.split("epsilon ")[1].split()[0]) < 1.01 * epsilon
    assert " did so 2 times; " in said
    counts = [json.loads(path.read_text()) for path in tmp_path.glob("state-ward-*/*/releases.json")]
    assert counts == [2, 2, 2]
    assert not any("update" in name for record in rounds_of(there) for name in record.get("notes", {}))
