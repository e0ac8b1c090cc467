"""A server whose nodes are all gone for a while, leave while they reply, or never come: with Flower's own programs."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from potluck.experiment.running.execute import holding
from potluck.flower.deploy.keys import add_node, certify
from potluck.flower.deploy.processes import free_port
from potluck.records import ROUNDS

from .deployed import replied, rounds_of

pytestmark = pytest.mark.slow
SETTINGS = (
    *("federation.clients=3", "federation.train_fraction=0.1", "federation.models=['cnn2']"),
    *("run.rounds=3", "run.evaluate_every=3", "run.common_test=false"),
    *("run.rounds_close.quorum=2", "run.rounds_close.deadline_s=20"),
)
BREAKS_OFF = """
import sys, time
from pathlib import Path

if "potluck.flower.node.supernode" in sys.orig_argv:
    from flwr.supernode import start_client_internal as flower

    sends = flower.push_object_contents_from_iterable

    def send(contents, **options):
        if Path("breaks-off").exists():
            Path("broke-off").touch()
            time.sleep(3600)
        sends(contents, **options)

    flower.push_object_contents_from_iterable = send
"""
"""In the program that sends a node's replies: from when there is a certain file it announces them and sends no part."""


def potluck(*words, **streams):
    program = str(Path(sys.executable).parent / "potluck")
    return subprocess.Popen([program, *map(str, words)], stdin=subprocess.DEVNULL, **streams)


class Said:
    """The lines of a stream as they come."""

    def __init__(self, stream):
        self.lines = []
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(stream,))
        self._thread.start()

    def _read(self, stream):
        for line in stream:
            with self._more:
                self.lines.append(line.rstrip())
                self._more.notify()

    def until(self, words, within=400.0):
        """Wait for a line with these words."""
        deadline = time.monotonic() + within
        with self._more:
            while not (found := [line for line in self.lines if words in line]):
                left = deadline - time.monotonic()
                assert self._more.wait(max(0.0, left)), self.lines
        return found[0]

    def close(self):
        self._thread.join()


def test_a_server_waits_for_its_nodes_and_goes_on_when_they_are_back(tmp_path):
    keys, address, run = tmp_path / "keys", f"127.0.0.1:{free_port()}", tmp_path / "run"
    certify(keys, [], days=1)
    for name in "abc":
        add_node(keys, name)
    out = (tmp_path / "out.txt").open("wb")

    def joined():
        words = [("join", address, "--keys", keys / "nodes" / name, "--state", tmp_path / name) for name in "ab"]
        return [potluck(*of_node, stdout=out, stderr=subprocess.STDOUT) for of_node in words]

    words = ("serve", "fedavg", *SETTINGS, "--keys", keys, "--listen", address, "--folder", run)
    server = potluck(*words, stdout=out, stderr=subprocess.PIPE, text=True)
    said, nodes = Said(server.stderr), []
    try:
        said.until("nodes join by")
        nodes = joined()
        said.until("2 of 3 nodes take part; continuing without the others")  # c never comes
        said.until("round 1/3")
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(60)
        waits = said.until("waits: 0 of 2 clients are there, and 2 are needed")
        assert waits.endswith("missing: a (client 0), b (client 1)")
        nodes = joined()
        assert server.wait(400) == 0, said.lines
    finally:
        for process in (server, *nodes):
            process.terminate()
        for process in (server, *nodes):
            process.wait(60)
        said.close()
        server.stderr.close()
        out.close()
    records = [json.loads(line) for line in (run / ROUNDS).read_text().splitlines()]
    assert [record["replied"] for record in records] == [[0, 1]] * 3
    assert not any("lost" in record for record in records)
    number = waits.split(" waits: ")[0]  # any round: on a busy machine the nodes may leave in the first
    assert f"{number} goes on" in said.lines[said.lines.index(waits) :]


def test_a_node_that_leaves_in_the_middle_of_its_reply_costs_that_reply_and_no_time(deployment, monkeypatch):
    """Flower itself waits three minutes for the parts of a reply that was announced."""
    nodes = ("ward-1", "ward-2")
    deployment.keys("--node", nodes[0], "--node", nodes[1])
    for name in nodes:
        deployment.carry(name)
    deployment.serve("run")
    deployment.hears("server", "nodes join by")
    deployment.join("ward-1")
    (deployment.place / "sitecustomize.py").write_text(BREAKS_OFF.replace('Path("', f'Path("{deployment.place}/'))
    with monkeypatch.context() as then:
        then.setenv("PYTHONPATH", str(deployment.place), prepend=":")
        deployment.join("ward-2")
    deployment.hears("server", "^round 2/1000 ")
    (deployment.place / "breaks-off").touch()
    deadline = time.monotonic() + 60
    while not (deployment.place / "broke-off").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    deployment.keys("--revoke", "ward-2")
    since = deployment.hears("server", "^node ward-2 is revoked")
    deployment.hears("server", r"^round \d+/1000 ", since, within=90)
    (first, *_) = [record for record in rounds_of(deployment.place / "run") if record["replied"] != [0, 1]]
    assert (first["replied"], first["failed"]) == ([0], {"1": "its node left before all of its reply had come"})


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_leaves_the_runs_folder_to_the_next_one_however_it_ends(deployment, ending):
    """Flower's program for its app would go on asking for replies, with the folder locked."""
    deployment.begin("run", "ward-1", "ward-2")
    deployment.hears("server", "^round 2/1000 ")
    replied(deployment)
    server = deployment.running.pop("server")
    server.send_signal(ending)
    server.wait(60)
    with holding(deployment.place / "run", patience=10):
        pass  # nobody else holds it
