"""A server cannot have a node's worker take more memory or disk than the node's owner gives it."""

import json
import subprocess
import sys
from collections import namedtuple

import pytest

from potluck.core.ground.machine import all_memory, size_of
from potluck.flower import HELLO, JOB
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.room import NoRoom, Room, default_disk_gib, default_memory_gib, of_limits
from potluck.flower.node.service import NodeService
from potluck.flower.node.store import NodeStore

GIB = 2**30
FULL = "this node's limit of disk is reached: its state would take "
TAKING = """
import json
from potluck.flower.node.room import limit_memory
import numpy, torch
limit_memory(1.0)
reasons = []
for take in (lambda: torch.ones(2**28), lambda: numpy.ones(2**27), lambda: bytearray(2**30), lambda: torch.ones(2**20)):
    try:
        take()
    except Exception as error:
        reasons.append(f"{type(error).__name__}: {error}")
print(json.dumps(reasons))
"""


def test_a_folder_has_room_up_to_its_limit(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "state").write_bytes(b"x" * 1000)
    (tmp_path / "node.log").write_bytes(b"x" * 24)
    assert size_of(tmp_path) == 1024
    room = Room(tmp_path, 2048 / GIB)
    room.check(1024)
    with pytest.raises(NoRoom, match=rf"{FULL}.* GiB, and may .*--most-disk-gib$"):
        room.check(1025)
    Room(tmp_path, None).check(10**18)


def test_a_state_for_which_there_is_no_room_is_not_written(tmp_path):
    store = NodeStore(tmp_path / "run", Room(tmp_path, 2500 / GIB))
    first = store.write(b"a" * 1000, None, 1)
    store.write(b"b" * 1000, first, 2)
    before = {path.name for path in (tmp_path / "run").iterdir()}
    with pytest.raises(NoRoom, match=FULL):
        store.write(b"c" * 1000, first, 3)
    assert {path.name for path in (tmp_path / "run").iterdir()} == before
    assert store.read(first.decode()) == b"a" * 1000
    assert store.write(None, first, 3) is None  # who keeps nothing needs no room


def test_a_node_without_room_refuses_whatever_it_is_asked(tmp_path):
    home = NodeConfig(tmp_path / "state", most_disk_gib=1000 / GIB)
    service = NodeService(home)
    (home.state / "filled").write_bytes(b"x" * 1001)
    said, _ = service.answer(HELLO, ({}, b""))
    assert said["refusal"].startswith(f"NoRoom: {FULL}")
    job = {"handler": "local_update", "key": [0, 0, 0, 0, 0], "round": 1, "record": None, "client": 0}
    said, _ = service.answer(JOB, (job, b""))
    assert said["failure"]["reason"].startswith(f"NoRoom: {FULL}"), said
    (home.state / "filled").unlink()
    said, _ = service.answer(HELLO, ({}, b""))
    assert "not a message of Potluck's" in said["refusal"]


def test_by_default_a_quarter_of_what_is_free_stays_free(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("potluck.flower.node.room.shutil.disk_usage", lambda place: usage(99 * GIB, 91 * GIB, 8 * GIB))
    assert default_disk_gib(tmp_path / "none" / "yet") == 6.0
    (tmp_path / "file").write_bytes(b"x" * 2**20)
    assert default_disk_gib(tmp_path) == 6.0 + 2**-10


def test_by_default_a_worker_on_a_processor_has_three_quarters_of_the_memory():
    assert default_memory_gib("cpu") == pytest.approx(0.75 * all_memory() / GIB)
    assert default_memory_gib("cuda:1") is None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_what_needs_more_memory_than_the_limit_fails_in_one_line_and_what_needs_less_goes_on():
    done = subprocess.run([sys.executable, "-c", TAKING], capture_output=True, text=True, check=True)
    reasons = json.loads(done.stdout)
    assert len(reasons) == 3, reasons
    for reason in reasons:
        assert of_limits(reason, 1.0).startswith("this node's limit of memory, 1 GiB, is reached; ")
        assert "--most-memory-gib" in of_limits(reason, 1.0)
        assert of_limits(reason, None) == reason
    assert "--most-memory-gib" in of_limits("RuntimeError: could not create a primitive", 1.0)  # oneDNN, near the limit
    assert of_limits("ValueError: no such class", 1.0) == "ValueError: no such class"


def test_limits_reach_the_worker(tmp_path):
    home = NodeConfig(tmp_path, most_disk_gib=1.5, most_memory_gib=2.0)
    assert NodeConfig.of(home.as_config()) == home
    assert NodeConfig.of(NodeConfig(tmp_path).as_config()) == NodeConfig(tmp_path)
