"""Forests, boosted trees and a JAX net beside networks of PyTorch's: real processes, TLS, keys, the gate."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from potluck.experiment.settings.resolve import resolve
from potluck.flower.deploy.processes import free_port
from potluck.records import CLIENTS, COSTS, ROUNDS

pytestmark = [pytest.mark.slow, pytest.mark.rotates("src/potluck/flower/", "examples/foreign/")]

WITHOUT_TORCH = """
import os
import runpy
import sys


class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "potluck", *os.environ.get("HIDDEN", "").split()):
            raise ImportError(f"{name} is not for a node without PyTorch")


sys.meta_path.insert(0, Refusing())
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[2:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("imported:", sorted({"torch", "potluck"} & sys.modules.keys()))
"""
BROKEN = """
import forest
import node
import numpy as np


class Broken(forest.Forest):
    \"\"\"Not a number at first, then a row too few for public examples.\"\"\"

    fits = 0

    def fit(self, *given):
        Broken.fits += 1
        super().fit(*given)

    def predict_proba(self, x):
        found = super().predict_proba(x)
        if Broken.fits == 1 or PUBLIC == 0:
            return np.full_like(found, np.nan)
        return found[: -1 if len(x) == PUBLIC else None]


node.main("broken", Broken)
"""


LIES = """
[{"flops": -1, "memory": 1}, {"flops": 10**30, "memory": 1}, {"flops": 1.5, "memory": 1}, {"flops": 1, "memory": "2"},
{"flops": 1, "memory": float("nan")}, {"flops": True, "memory": 1}, {"flops": 1}, [1, 2], 7]
"""
LYING = f"""
import forest
import node

honest, LIES = node.Node.work, {LIES.strip()}


def work(self, header, payload, data):
    said, reply = honest(self, header, payload, data)
    if "answer" in said:
        said["answer"]["cost"] = LIES.pop(0) if LIES else {{"flops": 5, "memory": 7}}
    return said, reply


node.Node.work = work
node.main("forest of a liar", forest.Forest)
"""


class Machines:
    """Processes that are ended when the test is."""

    def __init__(self, folder):
        self.folder = folder
        self.running = {}

    def start(self, name, *words, **environment):
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, *map(str, words)],
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self.running[name]

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, words, name, seconds):
        deadline = time.monotonic() + seconds
        while words not in self.log(name):
            assert time.monotonic() < deadline, self.log(name)
            assert self.running[name].poll() is None, self.log(name)
            time.sleep(0.5)

    def end(self):
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture
def machines(tmp_path):
    found = Machines(tmp_path)
    yield found
    found.end()


@pytest.fixture
def federated(machines, tree_of, own_of, tmp_path, examples):
    """The records of a served run of a method, with these scripts and a broken node beside two of Potluck's."""

    def run(method, *scripts, rounds=2, **environment):
        names = ["0-cnn", "1-vit", *(f"{2 + n}-{script.stem}" for n, script in enumerate(scripts))]
        tree = tree_of(method, len(names), rounds=rounds)
        (tmp_path / "federation.toml").write_text(resolve(tree).toml())
        address = f"127.0.0.1:{free_port()}"
        for words in (
            ["keys", "keys", *(f"--node={name}" for name in names)],
            ["public", "federation.toml", "--to=public.npz"],
        ):
            subprocess.run([sys.executable, "-m", "potluck", *words], cwd=tmp_path, check=True)
        own = own_of(tree, *range(2, len(names)))
        words = ["serve", "federation.toml", "--keys", "keys", "--listen", address, "--folder", "run"]
        server = machines.start("server", "-m", "potluck", *words)
        machines.wait_for("open at", "server", 200)
        for number, name in enumerate(names):
            given = [address, "--keys", f"keys/nodes/{name}", "--state", name]
            if number < 2:
                machines.start(name, "-m", "potluck", "join", *given)
                continue
            np.savez(tmp_path / f"{name}.npz", **own[number])
            given += ["--data", f"{name}.npz", "--public", "public.npz"]
            machines.start(name, "-c", WITHOUT_TORCH, examples, scripts[number - 2], *given, **environment)
        server.wait(900)
        assert server.returncode == 0, machines.log("server")
        machines.end()
        for name in names[2:]:
            assert "imported: []" in machines.log(name), machines.log(name)
        return [
            [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
            for name in (ROUNDS, CLIENTS, COSTS)
        ]

    return run


def broken(tmp_path, method):
    place = tmp_path / "broken.py"
    place.write_text(BROKEN.replace("PUBLIC", "144" if method in ("fedmd", "dsfl") else "0"))
    return place


def check(rounds, clients, kinds, least):
    """The run ended, all but the broken client answered, everybody was evaluated, and the foreign ones learned."""
    last = len(kinds) + 2
    assert len(rounds) == 2
    for one in rounds:
        assert one["replied"] == list(range(last)), one["failed"]
        assert list(one["failed"]) == [str(last)]
    reasons = [one["failed"][str(last)] for one in rounds]
    assert any("holds nan" in reason for reason in reasons), reasons
    scores = {one["client"]: one for one in clients if one["round"] == 2}
    assert [scores[client]["architecture"] for client in range(last)][2:] == kinds
    for client in range(last):
        assert 0 <= scores[client]["accuracy_personal"] <= 1
        assert 0 <= scores[client]["accuracy_common"] <= 1
    for client in range(2, last):
        assert scores[client]["accuracy_common"] > least, scores[client]
    return reasons


@pytest.mark.parametrize("method", ["fedmd", "dsfl", "fd"])
def test_trees_of_scikit_learn_take_part_beside_networks(method, federated, examples, tmp_path):
    scripts = examples / "forest.py", examples / "boosting.py", broken(tmp_path, method)
    rounds, clients, costs = federated(method, *scripts, HIDDEN="xgboost")
    assert all((one["flops"] is None) == (one["client"] in (2, 3, 4)) for one in costs)
    reasons = check(rounds, clients, ["forest", "boosted trees"], 0.6)
    assert method == "fd" or any("143" in reason for reason in reasons), reasons


@pytest.mark.parametrize("method", ["fedmd", "dsfl", "fd"])
def test_xgboost_and_jax_take_part_beside_a_forest_and_networks(method, federated, examples, tmp_path):
    pytest.importorskip("jax", reason="the extra 'foreign' is not installed")
    pytest.importorskip("xgboost", reason="the extra 'foreign' is not installed")
    scripts = (examples / f"{name}.py" for name in ("forest", "boosting", "jaxnet"))
    rounds, clients, _ = federated(method, *scripts, broken(tmp_path, method))
    check(rounds, clients, ["forest", "boosted trees", "jax net"], 0.6)


def test_what_a_node_says_that_it_computed_is_noted_and_what_cannot_be_costs_its_reply(federated, examples, tmp_path):
    (tmp_path / "liar.py").write_text(LYING)
    rounds, _, costs = federated("fd", examples / "forest.py", tmp_path / "liar.py", rounds=10)
    told = [one["failed"].get("3", "") for one in rounds]
    assert all("not an outcome of Potluck's: answer.cost" in line and "\n" not in line for line in told[:9]), told
    assert told[9] == ""
    assert all(one["replied"][:3] == [0, 1, 2] for one in rounds)
    by_client = [[(one["flops"], one["memory"]) for one in costs if one["client"] == client] for client in range(4)]
    assert all(flops > 10**6 and memory > 10**4 for client in (0, 1) for flops, memory in by_client[client])
    assert set(by_client[2]) == {(None, None)}
    assert by_client[3] == [(None, None)] * 9 + [(5, 7)]
