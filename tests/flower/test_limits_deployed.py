"""A node whose work needs more memory than its owner gives, one without room on its disk, and one that goes on."""

import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from .deployed import Deployment, rounds_of

pytestmark = pytest.mark.slow
MANY = 40_000  # examples of one batch, whose activations take gigabytes


@pytest.fixture
def deployment(tmp_path):
    federation = {"dataset": "digits", "clients": 3, "models": [{"name": "cnn2", "width": 64}]}
    method = {"name": "fedavg", "training": {"epochs": 1, "batch_size": MANY}}
    run = {"rounds": 2, "common_test": False, "evaluate_every": 2, "rounds_close": {"quorum": 1, "deadline_s": 120}}
    found = Deployment(tmp_path, {"federation": federation, "method": method, "run": run})
    try:
        yield found
    finally:
        found.close()


def digits_in(path, count):
    digits = load_digits()
    inputs, rows = (digits.images[:, None] * 15.9).astype("uint8"), np.arange(count) % 1500
    arrays = {"x_train": inputs[rows], "y_train": digits.target[rows]}
    np.savez(path, **arrays, x_test=inputs[1500:1600], y_test=digits.target[1500:1600])


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
def test_a_limit_that_is_reached_costs_that_reply_and_is_said_at_both_ends(deployment):
    place, names = deployment.place, ("small-memory", "small-disk", "usual")
    deployment.keys(*(word for name in names for word in ("--node", name)))
    deployment.serve("run")
    deployment.hears("server", "nodes join by")
    (place / "state-small-disk").mkdir(mode=0o700)
    (place / "state-small-disk" / "earlier").write_bytes(b"x" * 2**24)
    limits = {"small-memory": ["--most-memory-gib", "1.0"], "small-disk": ["--most-disk-gib", "0.01"], "usual": []}
    for name, words in limits.items():
        deployment.carry(name)
        digits_in(place / f"{name}.npz", MANY if name == "small-memory" else 100)
        own = ["--keys", name, "--state", f"state-{name}", "--data", f"{name}.npz"]
        deployment.start(name, "join", deployment.address, *own, *words)
    why = "NoRoom: this node's limit of disk is reached: its state would take "
    deployment.hears("server", f"^node small-disk takes no part: {why}")
    deployment.hears("small-disk", rf"^refused to a server \(introduction\): {why}")
    assert deployment.running.pop("server").wait(400) == 0, deployment.lines("server")
    why = "this node's limit of memory, 1 GiB, is reached; smaller batches or a smaller model need less"
    deployment.hears("small-memory", rf"^refused to a server \(local_update\): {why}")
    records = rounds_of(place / "run")
    assert [(len(record["replied"]), len(record["failed"])) for record in records] == [(1, 1)] * 2, records
    assert all(reason.startswith(why) for record in records for reason in record["failed"].values())
    assert all(process.poll() is None for process in deployment.running.values())
    assert not any("the worker ended" in line for name in names for line in deployment.lines(name))
