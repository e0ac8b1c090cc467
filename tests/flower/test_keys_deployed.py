"""Keys, certificates and the authority change, and versions differ, under real programs of a server and its nodes."""

import json
import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from potluck._version import __version__
from potluck.flower.deploy.keys import certify

from .deployed import numbers_apart, replied, rounds_of

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs/guides/keys.md"
OLD = "0.0.9"
OTHER_VERSION = f"import potluck._version\n\npotluck._version.__version__ = {OLD!r}\n"


ROLES, VERSIONS, NEXT = "\n## Who may do what\n", "\n## Versions\n", "\n## From one version to the next\n"


def shown(start, end):
    """The lines of terminals that the page shows between two headings, or from the first one on."""
    page = PAGE.read_text().partition(start)[2]
    blocks = re.findall(r"^```text\n(.*?)^```", page.partition(end)[0] if end else page, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def test_keys_certificates_and_the_authority_change_while_all_run(deployment, days_ago):
    """One test, so that there is one federation."""
    deployment.keys("--node", "ward-1", "--node", "ward-2", "--days", "20")
    deployment.serve("run")
    deployment.hears("server", "nodes join by")
    for name in ("ward-1", "ward-2"):
        deployment.carry(name)
        deployment.join(name)
    for name in ("ward-1", "ward-2"):
        deployment.hears(name, "at work on round 1")
        deployment.hears(name, r"warning: the server's certificate expires on .* \(says the server\)")
    a_node_gets_another_key(deployment)
    the_server_gets_another_certificate(deployment)
    the_authority_is_another_and_nodes_follow_one_by_one(deployment)
    a_certificate_that_has_ended_is_refused_at_both_ends(deployment, days_ago)
    a_revoked_node_is_told_and_comes_back_with_another_key(deployment)
    deployment.keys("--revoke", "ward-2")
    deployment.keys()
    the_run_waits_for_a_node(deployment)
    heard = deployment.heard
    assert [line for line in shown("# Keys for years", ROLES) if numbers_apart(line) not in heard] == []
    the_logs_have_each_line_of_the_terminals(deployment)


def a_node_gets_another_key(deployment):
    node = deployment.running["ward-1"]
    deployment.keys("--renew", "ward-1")
    deployment.hears("server", "node ward-1 has a new key")
    replied(deployment)  # with its former one
    since = len(deployment.lines("ward-1"))
    deployment.carry("ward-1")
    since = deployment.hears("ward-1", "the keys are new; joining with them", since)
    deployment.hears("ward-1", "^connected", since)
    deployment.hears("server", "a former key of node ward-1 counts no more")
    replied(deployment)
    assert node.poll() is None


def the_server_gets_another_certificate(deployment):
    since = {name: len(deployment.lines(name)) for name in ("ward-1", "ward-2")}
    deployment.keys("--renew-server")
    deployment.hears("server", r"nodes are shown the new keys/server\.crt, which expires on")
    replied(deployment)
    for name, before in since.items():
        assert not any("disconnected" in line or "nobody" in line for line in deployment.lines(name)[before:])


def the_authority_is_another_and_nodes_follow_one_by_one(deployment):
    since = len(deployment.lines("server"))
    deployment.keys("--change-authority")
    deployment.hears("server", "nodes are shown the new", since)
    before = len(deployment.lines("ward-1"))
    deployment.carry("ward-1", "ca.crt")
    before = deployment.hears("ward-1", "the keys are new; joining with them", before)
    deployment.hears("ward-1", "^connected", before)
    deployment.hears("server", r"node ward-1 says that it has the new ca\.crt")
    assert deployment.end("ward-2") in (0, 130)
    before = len(deployment.lines("ward-2"))
    deployment.join("ward-2")  # it knows the former authority alone
    deployment.hears("ward-2", r"warning: the server has another ca\.crt than this node", before)
    deployment.hears("ward-2", "^connected", before)
    deployment.hears("server", r"node ward-2 has another ca\.crt than the server")
    replied(deployment)
    before = len(deployment.lines("ward-2"))
    deployment.carry("ward-2", "ca.crt")
    before = deployment.hears("ward-2", "the keys are new; joining with them", before)
    deployment.hears("ward-2", "^connected", before)


def a_certificate_that_has_ended_is_refused_at_both_ends(deployment, days_ago):
    assert deployment.end("ward-2") in (0, 130)
    since = len(deployment.lines("server"))
    with days_ago(3):
        certify(deployment.place / "keys", [], days=1)
    deployment.hears("server", "nodes are shown the new", since)
    deployment.join("ward-2")
    assert deployment.running.pop("ward-2").wait(120) == 2
    deployment.hears("ward-2", f"^potluck: {deployment.address}: its certificate has expired; make a new one there")
    deployment.hears("server", "refused a caller: our certificate has expired; make a new one: potluck keys KEYS")
    since = len(deployment.lines("server"))
    deployment.keys("--renew-server")
    deployment.hears("server", "nodes are shown the new", since)
    before = len(deployment.lines("ward-2"))
    deployment.join("ward-2")
    deployment.hears("ward-2", "^connected", before)


def a_revoked_node_is_told_and_comes_back_with_another_key(deployment):
    node, before = deployment.running["ward-2"], len(deployment.lines("ward-2"))
    deployment.keys("--revoke", "ward-2")
    deployment.hears("server", "node ward-2 is revoked")
    why = r"refuses this node: its key, of node ward-2, was revoked on \d{4}-\d\d-\d\d at \d\d:\d\d UTC; trying again"
    before = deployment.hears("ward-2", why, before)
    deployment.keys("--node", "ward-2")
    deployment.carry("ward-2")
    deployment.hears("ward-2", "^connected", before)
    assert node.poll() is None
    replied(deployment)


def the_run_waits_for_a_node(deployment):
    """Rounds that wait, or are undone before, are the lines about the run that a log of any speed has."""
    since = len(deployment.lines("server"))
    assert deployment.end("ward-1") in (0, 130)
    deployment.hears("server", r"^round \d+ waits: 0 of 2 clients are there", since)
    assert deployment.running["server"].poll() is None


def the_logs_have_each_line_of_the_terminals(deployment):
    deployment.running["server"].send_signal(signal.SIGINT)
    assert deployment.running.pop("server").wait(60) == 130
    found = {}
    for name in ("server", "ward-1", "ward-2"):
        if name in deployment.running:
            deployment.end(name)
        content = (deployment.place / f"{name}.jsonl").read_text()
        assert str(deployment.place) not in content
        found[name] = [json.loads(line) for line in content.splitlines()]
        of_keys = "keys" if name == "server" else name
        terminal = [" ".join(line.removeprefix("potluck: ").split()) for line in deployment.lines(name)]
        said = [re.sub(rf"(?<![\w./-]){of_keys}/", "KEYS/", line) for line in terminal]
        assert [entry["text"] for entry in found[name]] == said
    assert {entry["event"] for entry in found["server"]} >= {"server", "node", "gate", "run", "round", "ended"}
    assert {entry["event"] for name in ("ward-1", "ward-2") for entry in found[name]} == {
        *("connection", "work", "request", "keys", "warning", "ended")
    }
    about = [entry for entry in found["server"] if entry["text"] == "node ward-2 is revoked"]
    assert {(entry["event"], entry["node"], entry["run"]) for entry in about} == {("node", "ward-2", "run")}
    ended = [entry["round"] for entry in found["server"] if entry["event"] == "round"]
    assert ended == list(range(1, len(ended) + 1))
    at_work = next(entry for entry in found["ward-1"] if entry["event"] == "work" and "round" in entry)
    assert (at_work["round"], at_work["text"]) == (1, "at work on round 1")
    assert any(entry.get("run", "").startswith("run-") for entry in found["ward-1"])


@contextmanager
def another_version(deployment, monkeypatch):
    """What is started inside the block takes itself for another version of Potluck."""
    place = deployment.place / "old"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(OTHER_VERSION)
    with monkeypatch.context() as then:
        then.setenv("PYTHONPATH", str(place), prepend=":")
        yield


def test_a_node_with_another_version_is_named_and_refused_unless_it_is_allowed(deployment, monkeypatch):
    deployment.keys("--node", "ward-1", "--node", "ward-2")
    for name in ("ward-1", "ward-2"):
        deployment.carry(name)
    deployment.serve("run", "run.rounds=1")
    deployment.hears("server", "nodes join by")
    deployment.join("ward-1")
    with another_version(deployment, monkeypatch):
        deployment.join("ward-2")
    differs = re.escape(
        f"the node has Potluck {OLD}, and the server {__version__}; install {__version__} at the node, or"
    )
    deployment.hears("server", f"^node ward-2 takes no part: {differs}")
    deployment.hears("ward-2", f"^takes no part, says the server: {differs}")
    assert deployment.running.pop("server").wait(240) == 0
    assert rounds_of(deployment.place / "run")[0]["replied"] == [0]
    since = len(deployment.lines("server"))
    deployment.serve("both", "run.rounds=1", "--allow-versions")
    deployment.hears("server", f"^node ward-2 takes part all the same: {differs}", since)
    assert deployment.running.pop("server").wait(240) == 0
    assert rounds_of(deployment.place / "both")[0]["replied"] == [0, 1]
    again = ["serve", "run.rounds=2", "--keys", "keys", "--listen", deployment.address, "--folder", "both"]
    deployment.start("server", *again)  # allowed no more, though it was met
    assert deployment.running.pop("server").wait(240) == 0
    last = rounds_of(deployment.place / "both")[-1]
    assert last["replied"] == [0]
    assert re.search(differs, json.dumps(last["failed"]))
    deployment.hears("ward-2", rf"refused to a server \(local_update\): .*{differs}")
    heard = deployment.heard
    assert [line for line in shown(VERSIONS, NEXT) if numbers_apart(line) not in heard] == []


def test_a_federation_goes_from_one_version_to_the_next_while_its_run_goes_on(deployment, monkeypatch):
    nodes = ("ward-1", "ward-2")
    deployment.keys("--node", nodes[0], "--node", nodes[1])
    with another_version(deployment, monkeypatch):
        deployment.serve("run")
        deployment.hears("server", "nodes join by")
        for name in nodes:
            deployment.carry(name)
            deployment.join(name)
        deployment.hears("server", r"^round 1/1000 ")
    the_server_is_started_anew(deployment, "--allow-versions")
    replied(deployment)  # nodes that are behind it
    for name in nodes:
        assert deployment.end(name) in (0, 130)
        before = len(deployment.lines(name))
        deployment.join(name)
        deployment.hears(name, "^connected", before)
        replied(deployment)
    the_server_is_started_anew(deployment)
    replied(deployment)
    assert deployment.end("ward-2") in (0, 130)
    before = len(deployment.lines("ward-2"))
    with another_version(deployment, monkeypatch):
        deployment.join("ward-2")
    deployment.hears("ward-2", r"^refused to a server \(local_update\)", before)
    last = refused_reply(deployment)
    assert last["replied"] == [0]
    assert f"the node has Potluck {OLD}, and the server {__version__}" in last["failed"]["1"]
    records = rounds_of(deployment.place / "run")
    assert [record["round"] for record in records] == list(range(1, len(records) + 1))
    assert not any("lost" in record for record in records)
    heard = deployment.heard
    assert [line for line in shown(NEXT, None) if numbers_apart(line) not in heard] == []


def the_server_is_started_anew(deployment, *words):
    deployment.running["server"].send_signal(signal.SIGINT)
    assert deployment.running.pop("server").wait(60) == 130
    since = len(deployment.lines("server"))
    again = ("--keys", "keys", "--listen", deployment.address, "--folder", "run")
    deployment.start("server", "serve", *again, *words)
    deployment.hears("server", "nodes join by", since)


def refused_reply(deployment, within=240):
    """Wait for a round in which a reply failed that says something of versions."""
    deadline = time.monotonic() + within
    while not (found := [one for one in rounds_of(deployment.place / "run") if "Potluck" in str(one["failed"])]):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found[-1]
