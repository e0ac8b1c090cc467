import ast
import inspect
import threading
import time

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.supercore.superexec import run_superexec

from potluck.flower.node import bell
from potluck.flower.node.bell import Bell


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
    threading.Timer(0.2, there.ring).start()
    assert 0.15 < waited(here) < 1.5


def test_a_bell_that_nobody_heard_rings_later_and_once(ends, monkeypatch):
    monkeypatch.setattr(bell, "_ANYWAY", 0.3)
    here, there = ends
    for _ in range(100_000):  # more than a pipe has room for
        there.ring()
    while waited(here) < 0.2:
        pass
    there.ring()
    assert waited(here) < 0.2
    assert waited(here) >= 0.3


def test_flowers_program_uses_nothing_else_of_the_module_time():
    tree = ast.parse(inspect.getsource(run_superexec))
    uses = [one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and getattr(one.value, "id", "") == "time"]
    assert {one.attr for one in uses} == {"sleep"}
