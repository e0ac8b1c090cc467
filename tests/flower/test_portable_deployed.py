"""Portable kernels on real nodes: the digest of one process, though each program was started in its own way."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from potluck.engine.numerics.kernels import ENVIRONMENT
from potluck.flower.deploy.keys import add_node, certify
from potluck.flower.deploy.processes import free_port
from potluck.records import CHECKPOINT, LAST, Checkpoint

pytestmark = pytest.mark.slow
NODES = ("a", "b")
SETTINGS = (
    *("federation.dataset=digits", "federation.clients=2", 'federation.models=["cnn2", "cnn3"]'),
    *("run.rounds=1", "run.common_test=false", "run.executor=sequential", "run.computing.kernels=portable"),
    *("run.tolerate_failures=false", "run.outlier_factor=0"),
)


def started(place, *words, **environment):
    """A command, in a program with this environment; what it says goes to a file of its name."""
    unset = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    program = str(Path(sys.executable).parent / "potluck")
    with (place / f"{words[0]}.txt").open("ab") as said:
        return subprocess.Popen(
            [program, *map(str, words)], cwd=place, env={**unset, **environment}, stdout=said, stderr=said
        )


def digest_of(folder):
    return Checkpoint.read(folder / CHECKPOINT / LAST).digest


@pytest.fixture
def data(tmp_path):
    digits, files = load_digits(), []
    inputs = (digits.images[:, None] * 15.9).astype("uint8")
    for number, name in enumerate(NODES):
        train, test = slice(number, 200, 2), slice(200 + number, 300, 2)
        arrays = {"x_train": inputs[train], "y_train": digits.target[train]}
        np.savez(tmp_path / f"{name}.npz", **arrays, x_test=inputs[test], y_test=digits.target[test])
        files.append(tmp_path / f"{name}.npz")
    return files


def test_nodes_give_the_digest_of_one_process(tmp_path, data):
    (here := tmp_path / "here").mkdir()
    assert started(here, "run", "fedavg", *SETTINGS, f"federation.data={[*map(str, data)]}").wait(200) == 0
    (run,) = (here / "runs").iterdir()
    keys, address = tmp_path / "keys", f"127.0.0.1:{free_port()}"
    certify(keys, [], days=1)
    server = started(tmp_path, "serve", "fedavg", *SETTINGS, "--keys", add_all(keys), "--listen", address,
                     "--folder", tmp_path / "run", ATEN_CPU_CAPABILITY="avx2")  # fmt: skip
    nodes = []
    try:
        for name, file in zip(NODES, data, strict=True):
            (place := tmp_path / name).mkdir()
            words = ("join", address, "--keys", keys / "nodes" / name, "--data", file, "--state", place / "state")
            nodes.append(started(place, *words, **ENVIRONMENT))
        assert server.wait(400) == 0, (tmp_path / "serve.txt").read_text()
    finally:
        for process in (server, *nodes):
            process.terminate()
        for process in (server, *nodes):
            process.wait(60)
    assert digest_of(tmp_path / "run") == digest_of(run)


def add_all(keys):
    """The folder of keys, with one for every node."""
    for name in NODES:
        add_node(keys, name)
    return keys
