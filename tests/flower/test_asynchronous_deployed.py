"""Asynchronous rounds with Flower's own programs: a slow node, one that is killed, and a server that is stopped."""

import json
import signal
import subprocess

import numpy as np
import pytest
from sklearn.datasets import load_digits

from potluck.flower.deploy.keys import add_node, certify
from potluck.flower.deploy.processes import free_port
from potluck.records import CLIENTS, ROUNDS

from .test_outage_deployed import Said, potluck

pytestmark = pytest.mark.slow
ROUNDS_IN_ALL = 30
SETTINGS = (
    *("federation.clients=3", "federation.models=['cnn2']", f"run.rounds={ROUNDS_IN_ALL}"),
    *(f"run.evaluate_every={ROUNDS_IN_ALL}", "run.common_test=false", "run.rounds_close.deadline_s=60"),
    *("run.rounds_close.asynchronous.rule=fedbuff", "run.rounds_close.asynchronous.buffer=2"),
)
EXAMPLES = {"a": 40, "b": 40, "c": 20_000}  # a round takes a and b a second or two, c ten or more


def write_data(place):
    digits = load_digits()
    inputs, targets = (digits.images[:, None] * 15.9).astype("uint8"), digits.target
    for name, count in EXAMPLES.items():
        rows = np.arange(count) % 900
        test = slice(900, 1000)
        arrays = {"x_train": inputs[rows], "y_train": targets[rows], "x_test": inputs[test], "y_test": targets[test]}
        np.savez(place / f"{name}.npz", **arrays)


def test_rounds_go_on_without_slow_and_killed_nodes_and_after_the_server(tmp_path):
    keys, address, run = tmp_path / "keys", f"127.0.0.1:{free_port()}", tmp_path / "run"
    certify(keys, [], days=1)
    write_data(tmp_path)
    for name in EXAMPLES:
        add_node(keys, name)
    out, streams = (tmp_path / "out.txt").open("wb"), []

    def joined(name):
        own = ("--keys", keys / "nodes" / name, "--data", tmp_path / f"{name}.npz", "--state", tmp_path / name)
        return potluck("join", address, *own, stdout=out, stderr=subprocess.STDOUT)

    def serving(*words):
        words = ("serve", *words, "--keys", keys, "--listen", address, "--folder", run)
        process = potluck(*words, stdout=out, stderr=subprocess.PIPE, text=True)
        streams.append((Said(process.stderr), process.stderr))
        return process, streams[-1][0]

    server, said = serving("fedavg", *SETTINGS)
    nodes = {}
    try:
        said.until("nodes join by")
        nodes = {name: joined(name) for name in EXAMPLES}
        said.until(f"round 2/{ROUNDS_IN_ALL}")  # c is at work on its first job
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 128 + signal.SIGINT
        server, again = serving()
        again.until(f"round 5/{ROUNDS_IN_ALL}")
        nodes["b"].kill()
        nodes["b"].wait(60)
        nodes["b"] = joined("b")
        assert server.wait(400) == 0, again.lines
    finally:
        for process in (server, *nodes.values()):
            process.terminate()
        for process in (server, *nodes.values()):
            process.wait(60)
        for heard, stream in streams:
            heard.close()
            stream.close()
        out.close()
    records = [json.loads(line) for line in (run / ROUNDS).read_text().splitlines()]
    assert [record["round"] for record in records] == list(range(1, ROUNDS_IN_ALL + 1))
    assert not any("lost" in record for record in records)
    assert [record["replied"] for record in records[:2]] == [[0, 1]] * 2
    late = [record["stale"]["2"] for record in records if "2" in record.get("stale", {})]
    assert late, records
    anew = "client 2 is asked anew, since it had not answered when the run was stopped"
    assert any(anew in line for line in again.lines), again.lines
    assert any("1" in record["failed"] for record in records), records
    last = [json.loads(line)["client"] for line in (run / CLIENTS).read_text().splitlines()]
    assert 0 in last
