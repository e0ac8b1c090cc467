import ast
import inspect
import sys
import threading
import time

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

import uvicorn
from flwr.supercore import cli as core_cli
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import subprocess_executor
from flwr.supernode import cli as node_cli
from flwr.supernode import fleet_http_connection, start_client_internal

from potluck.flower.node import bell, ourapp, supernode
from potluck.flower.node.bell import Bell

REPLACED = {
    fleet_http_connection: ["FleetHttpClient"],
    uvicorn: ["Config"],
    start_client_internal: ["time", "pull_objects"],
    run_superexec: ["RuntimeHttpClient", "time"],
}


@pytest.fixture
def ends(tmp_path):
    """The bell as two programs have it."""
    return Bell(tmp_path), Bell(tmp_path)


def waited(end):
    began = time.monotonic()
    end.sleep(0.1)
    return time.monotonic() - began


def test_who_waits_goes_on_as_soon_as_it_rings(ends):
    here, there = ends
    threading.Timer(0.6, there.ring).start()
    assert 0.15 < waited(here) < 2.5


@pytest.mark.slow
def test_a_bell_that_nobody_heard_rings_later_and_once(ends, monkeypatch):
    monkeypatch.setattr(bell, "_ANYWAY", 1.0)
    here, there = ends
    for _ in range(100_000):  # more than a pipe has room for
        there.ring()
    while waited(here) < 0.9:
        pass
    there.ring()
    assert waited(here) < 0.9
    assert waited(here) >= 0.9


def test_the_node_rings_it_for_a_message_and_its_program_for_tasks_waits_for_it(tmp_path, monkeypatch):
    heard = []

    def takes_a_message():
        start_client_internal.pull_objects([], pull_object_fn=bytes)

    def waits():
        run_superexec.time.sleep(0.1)
        heard.append(run_superexec.time)

    monkeypatch.setenv(supernode.SIGNS, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    for module, names in REPLACED.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    monkeypatch.setattr(node_cli, "flower_supernode", takes_a_message)
    monkeypatch.setattr(core_cli, "flower_superexec", waits)
    monkeypatch.setattr(supernode.os, "_exit", heard.append)
    monkeypatch.setattr(subprocess_executor, "subprocess", subprocess_executor.subprocess)
    listening = Bell(tmp_path)
    listening.ring()  # both ends are open before
    listening.sleep(0.1)
    supernode.main()
    assert waited(listening) < 2.5
    listening.ring()
    monkeypatch.setattr(ourapp, "Copied", lambda *of: subprocess_executor.subprocess)
    ourapp.take_tasks()
    assert isinstance(heard[-1], Bell)


def test_flowers_program_uses_nothing_else_of_the_module_time():
    tree = ast.parse(inspect.getsource(run_superexec))
    uses = [one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and getattr(one.value, "id", "") == "time"]
    assert {one.attr for one in uses} == {"sleep"}
