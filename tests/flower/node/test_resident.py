"""The worker that stays at a node answers as one that is made for each message, and its end is noticed."""

import json
import subprocess
import sys

import pytest

from potluck.core.ground.errors import ConfigError
from potluck.flower import HELLO
from potluck.flower.deploy.processes import socket_in
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.resident import SOCKET, ResidentLost, delegate
from potluck.flower.node.service import NodeService

WORDS = {
    "experiment": {"federation": {"dataset": "digits", "clients": 2}, "method": {"name": "local"}},
    "run": "run-1",
    "client": 0,
    "classes": {"count": 10, "names": None},
}


def test_a_node_without_a_resident_does_the_work_itself():
    assert delegate({"state": "somewhere"}, HELLO, (WORDS, b"")) is None


def test_a_path_that_no_socket_can_have_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has 1.. bytes; expected at most 103; choose"):
        socket_in(tmp_path / ("x" * 120), SOCKET)


def test_an_app_of_a_node_imports_nothing_heavy():
    code = "import sys, potluck.flower.node.clientapp; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.slow
def test_a_resident_answers_until_it_ends(tmp_path):
    home = NodeConfig(tmp_path)
    config = {**home.as_config(), "resident": True}
    process = subprocess.Popen([sys.executable, "-m", "potluck.flower.node.resident", json.dumps(home.as_config())])
    try:
        expected = NodeService(NodeConfig(tmp_path / "other")).answer(HELLO, (WORDS, b""))
        assert delegate(config, HELLO, (WORDS, b"")) == expected
        refused, _ = delegate(config, HELLO, ({**WORDS, "client": 9}, b""))
        assert "has 2 clients" in refused["refusal"]
        assert delegate(config, HELLO, (WORDS, b"")) == expected
    finally:
        process.kill()
        process.wait()


def test_a_resident_that_never_comes_is_missed(tmp_path, monkeypatch):
    monkeypatch.setattr("potluck.flower.node.resident._COMES_WITHIN", 0.1)
    with pytest.raises(ResidentLost, match="no worker listens"):
        delegate({"state": str(tmp_path), "resident": True}, HELLO, (WORDS, b""))
