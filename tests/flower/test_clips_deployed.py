"""Real nodes clip what they send: their server gets the bytes of a run in one process that clips."""

from copy import deepcopy

import pytest

from potluck.records import CHECKPOINT, LAST, Checkpoint

from ..carried_out import carried_out
from .deployed import TWO_CLIENTS, Deployment, rounds_of

pytestmark = pytest.mark.slow
CLIP = 0.05


def tables(**run):
    tree = deepcopy(TWO_CLIENTS)
    tree["run"] |= {"rounds": 2, "evaluate_every": 2, "outlier_factor": 0, "clip_update": CLIP, **run}
    return tree


def digest_in(folder):
    return Checkpoint.read(folder / CHECKPOINT / LAST).digest


def test_real_nodes_clip_their_updates_as_clients_in_one_process_do(tmp_path):
    deployment = Deployment(tmp_path, tables())
    try:
        deployment.keys("--node", "a", "--node", "b")
        deployment.serve("run")
        deployment.hears("server", "nodes join by")
        for name in ("a", "b"):
            deployment.carry(name)
            deployment.join(name)
        assert deployment.running.pop("server").wait(400) == 0, deployment.lines("server")
    finally:
        deployment.close()
    records = rounds_of(tmp_path / "run")
    assert all(0 < record["notes"]["clients/update_scale"] < 1 for record in records), records
    run = {"executor": "sequential"}
    carried_out(tmp_path / "here", tables(**run))
    assert digest_in(tmp_path / "run") == digest_in(tmp_path / "here")
    free = tables(**run)
    del free["run"]["clip_update"]
    carried_out(tmp_path / "free", free)
    assert digest_in(tmp_path / "run") != digest_in(tmp_path / "free")
