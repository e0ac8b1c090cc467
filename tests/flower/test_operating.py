"""A server with its page and five nodes, all real: one is slow, one away, one comes late, and one never."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from potluck.flower.deploy.keys import add_node, certify
from potluck.flower.deploy.processes import free_port
from potluck.records import ROUNDS

from .test_outage_deployed import Said, potluck

pytestmark = pytest.mark.slow
SETTINGS = (
    *("federation.clients=3", "federation.train_fraction=0.1", "federation.models=['cnn2']"),
    *("run.rounds=24", "run.evaluate_every=24", "run.common_test=false", "run.rounds_close.quorum=3"),
)


class Server:
    """A served run, its page, and the terminals of server and nodes."""

    def __init__(self, place):
        self.place, self.keys, self.run = place, place / "keys", place / "run"
        self.address, self.page = (f"127.0.0.1:{free_port()}" for _ in range(2))
        certify(self.keys, [], days=1)
        for name in "abcde":
            add_node(self.keys, name)
        words = ("--keys", self.keys, "--listen", self.address, "--folder", self.run, "--status", self.page)
        self.process = potluck(
            "serve", "fedavg", *SETTINGS, *words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self.said, self.nodes, self.heard, self._ended = Said(self.process.stderr), {}, {}, []

    def go_on(self, *settings):
        """Interrupt the server, and start it again with other settings."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(120)
        self._ended.append((self.process, self.said))
        words = ("--keys", self.keys, "--listen", self.address, "--folder", self.run, "--status", self.page)
        self.process = potluck("serve", *settings, *words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.said = Said(self.process.stderr)

    def join(self, name):
        words = ("--keys", self.keys / "nodes" / name, "--state", self.place / name)
        self.nodes[name] = node = potluck(
            "join", self.address, *words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self.heard[name] = Said(node.stderr)

    def leave(self, name):
        node = self.nodes.pop(name)
        node.terminate()
        node.wait(60)
        self._ended.append((node, self.heard[name]))

    def get(self, path="/"):
        with urlopen(f"http://{self.page}{path}", timeout=30) as reply:
            return reply.read().decode()

    def shows(self, words):
        """Wait for words on the page, which may be a second old; return it."""
        deadline = time.monotonic() + 10
        while words not in (page := self.get()):
            assert time.monotonic() < deadline, (words, page)
            time.sleep(0.2)
        return page

    def states(self):
        """By node, what it is."""
        families = text_string_to_metric_families(self.get("/metrics"))
        (found,) = [family for family in families if family.name == "potluck_node_state"]
        return {sample.labels["node"]: sample.labels["state"] for sample in found.samples if sample.value}

    def until(self, **states):
        """Wait until nodes are what they should be."""
        deadline = time.monotonic() + 300
        while not states.items() <= (found := self.states()).items():
            assert time.monotonic() < deadline, (found, self.said.lines)
            assert self.process.poll() is None, self.said.lines
            time.sleep(0.2)

    def worker_of(self, name):
        """The process that computes at a node."""
        for status in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                parent = int(status.read_text().rpartition(")")[2].split()[1])
                words = status.with_name("cmdline").read_bytes()
                if parent == self.nodes[name].pid and b"potluck.flower.node.resident" in words:
                    return int(status.parent.name)
        raise AssertionError(f"{name} has no worker")

    def close(self):
        for process in (self.process, *self.nodes.values()):
            process.terminate()
        for process in (self.process, *self.nodes.values()):
            process.wait(60)
        ended = [(node, self.heard[name]) for name, node in self.nodes.items()]
        for process, said in ((self.process, self.said), *ended, *self._ended):
            said.close()
            process.stderr.close()


@pytest.fixture
def server(tmp_path):
    found = Server(tmp_path)
    try:
        yield found
    finally:
        found.close()


def test_the_page_and_the_terminals_say_what_becomes_of_each_node(server):
    server.said.until("nodes join by")
    assert server.states() == dict.fromkeys("abcde", "never seen")
    for name in "abc":
        server.join(name)
    server.said.until("round 1/24")
    assert server.states().items() >= dict.fromkeys("de", "never seen").items()

    server.leave("b")
    server.until(b="away")
    server.said.until("waits: 2 of 3 clients are there, and 3 are needed; missing: b (client 1)")
    assert "has left" in server.shows("waits: 2 of 3 clients are there")
    server.go_on("run.rounds_close={quorum=2, deadline_s=30, set_aside={late=2, of=2, rest=5}}")
    server.said.until("continuing without b, which may come later")
    server.until(b="never seen")
    server.join("b")
    server.heard["b"].until("at work on round")

    worker = server.worker_of("c")
    os.kill(worker, signal.SIGSTOP)
    try:
        aside = server.said.until("client 2 is set aside for rounds ")
        server.until(c="set aside")
        assert "is not drawn up to round" in server.shows("is still at work on a job that was given up")
    finally:
        os.kill(worker, signal.SIGCONT)  # at once, to hear of its rest before that is over
    last = int(aside.rpartition(" to ")[2].partition(":")[0])
    words = f"says the server: set aside up to round {last}, since it was late in 2 or more of its last 2 rounds"
    assert server.heard["c"].until("set aside").endswith(words)
    server.join("e")
    told = server.heard["e"].until("takes no part")
    assert told.endswith("says the server: the run began without it; it may take part in the next one")
    server.until(e="takes no part")
    page = server.get()
    assert str(server.place) not in page
    assert "server.crt" in page
    assert server.get("/healthz") == "ok\n"

    assert server.process.wait(500) == 0, server.said.lines
    for name in "ab":
        server.heard[name].until("takes no part, says the server: the run has ended")
    records = [json.loads(line) for line in (server.run / ROUNDS).read_text().splitlines()]
    assert len(records) == 24
    (first, *_) = [line["round"] for line in records if "2" in line.get("set_aside", {})]
    assert records[first - 1]["set_aside"]["2"] == first + 5 == last
    assert [2 in line["late"] for line in records[first - 2 : first]] == [True, True]
    assert [line["cohort"] for line in records[first:last]] == [[0, 1]] * 5
    back = next(line["round"] for line in records[1:] if 1 in line["replied"])
    away = [line["failed"].get("1") for line in records[1 : back - 1]]
    assert 1 < back <= first
    assert away == ["its node b is not online"] * len(away), "who comes late comes in at the next round"
    assert any(line["replied"] == [0, 1, 2] for line in records[last:]), "who was slow begins anew"
