"""A node runs Potluck's app and no other, whatever app a server was given."""

import os
import subprocess

import pytest
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND
from flwr.supernode import cli
from flwr.supernode.runtime import run_clientapp

from potluck.flower.node import ourapp
from potluck.flower.node.clientapp import client_app

OURS = {"flwr-clientapp": "Run a Flower ClientApp", "flower-superexec": "Run Flower SuperExec"}


@pytest.mark.slow
def test_every_program_that_flower_could_start_for_an_app_is_stood_in_front_of(tmp_path):
    path = ourapp.stand_in_front(tmp_path)["PATH"]
    first, env = path.split(os.pathsep)[0], os.environ | {"PATH": path}
    assert sorted(os.listdir(first)) == sorted([*TASK_TYPE_TO_COMMAND.values(), "flower-superexec"])
    for name in os.listdir(first):
        done = subprocess.run([name, "--help"], env=env, capture_output=True, text=True, check=False)
        if name in OURS:
            assert OURS[name] in done.stdout, done.stderr
        else:
            assert (done.returncode, done.stderr) == (1, "a node of Potluck runs no app but its own\n")


@pytest.fixture
def flowers(monkeypatch):
    """Flower's program, which notes what it would run."""
    seen = []

    def program():
        run_clientapp.install_from_fab(b"an app that somebody sent", skip_prompt=True)
        find = run_clientapp.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
        seen.append(find("somebody/app", "1.0", "hash"))

    monkeypatch.setattr(cli, "flwr_clientapp", program)
    for name in ourapp._REPLACED:
        monkeypatch.setattr(run_clientapp, name, getattr(run_clientapp, name))  # put back afterwards
    return seen


def test_an_app_that_was_sent_is_neither_unpacked_nor_run(flowers):
    ourapp.answer()
    assert flowers == [client_app]


@pytest.mark.parametrize("name", ourapp._REPLACED)
def test_a_flower_that_loads_apps_in_another_way_is_not_used(flowers, monkeypatch, name):
    monkeypatch.delattr(run_clientapp, name)
    with pytest.raises(SystemExit, match=f"has no {name}"):
        ourapp.answer()
    assert flowers == []
