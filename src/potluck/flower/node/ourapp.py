"""The only app that a node runs: Potluck's own, as installed there, whatever app was submitted to the server.

Flower sends an app's code to every node and imports it there: anyone who may submit a run to a SuperLink can have nodes
run any code. Flower's programs start one another by name. So `potluck join` puts programs of the same names first on
the path: the one for a node's app fetches and answers a message as Flower does, but with Potluck's app instead of the
one that was sent, which is not even unpacked; the one that takes tasks and starts the app is Flower's own; the others
refuse. Both fetch through the node's own socket (`potluck.flower.deploy.private`).

Flower starts a program for every message, which takes a small device seconds, for all that is imported. So the program
that takes tasks has one beside it that has imported this, and is copied for each message.
"""

import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType

from potluck.flower import ASKING_AGAIN
from potluck.flower.deploy.private import ToSocket, replace
from potluck.flower.deploy.processes import environment
from potluck.flower.node.bell import Bell
from potluck.flower.node.copied import Copied
from potluck.flower.node.supernode import SIGNS

_APP, _TASKS = TASK_TYPE_TO_COMMAND[TaskType.CLIENT_APP], "flower-superexec"
_CLIENT = "RuntimeHttpClient"
_REPLACED = ("install_from_fab", "get_load_client_app_fn", _CLIENT, "pull_and_inflate_object_from_tree")
"""By what Flower's program unpacks an app, finds its client app, and asks for the message, and for its parts."""


def stand_in_front(home: Path) -> dict[str, str]:
    """Write the programs; return the environment in which they are found before Flower's.

    Args:
        home: the folder of Flower's own files.
    """
    place = home / "programs"
    place.mkdir(parents=True, exist_ok=True)
    refusing = "echo 'a node of Potluck runs no app but its own' >&2\nexit 1\n"
    for name in (_TASKS, *TASK_TYPE_TO_COMMAND.values()):
        ours = f'exec {shlex.quote(sys.executable)} -P -m potluck.flower.node.ourapp {name} "$@"\n'
        program = place / name
        program.write_text(f"#!/bin/sh\n{ours if name in _PROGRAMS else refusing}")
        program.chmod(0o700)
    return {"PATH": f"{place.resolve()}{os.pathsep}{environment(home)['PATH']}"}


def take_tasks() -> None:
    """Act as Flower's program that takes a node's tasks."""
    copied = Copied(_APP, _imports, answer)  # before there are threads, which a copy would lack

    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.superexec.executor import subprocess_executor

    replace(run_superexec, _CLIENT, ToSocket)
    replace(run_superexec, "time", Bell(Path(os.environ.get(SIGNS, ""))))
    replace(subprocess_executor, "subprocess", copied)
    flower_superexec()


def answer() -> None:
    """Act as Flower's program for one message to a node."""
    from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp

    from potluck.flower.node.clientapp import client_app

    def none(*args: Any, **options: Any) -> None:
        """Unpack nothing."""

    def ours(*args: Any, **options: Any) -> Callable[..., ClientApp]:
        """Load nothing but Potluck's own."""
        return lambda *args, **options: client_app

    parts = partial(pull_and_inflate_object_from_tree, **ASKING_AGAIN)
    for name, replacement in zip(_REPLACED, (none, ours, ToSocket, parts), strict=True):
        replace(run_clientapp, name, replacement)
    flwr_clientapp()


def _imports() -> None:
    """Import what `answer` needs, also what httpx imports when it is first used."""
    for name in (
        "flwr.supernode.cli",
        "flwr.supernode.runtime.run_clientapp",
        "potluck.flower.node.clientapp",
        "httpcore",
    ):
        import_module(name)


_PROGRAMS = {_APP: answer, _TASKS: take_tasks}

if __name__ == "__main__":
    sys.argv = sys.argv[1:]  # Flower tells its programs apart by their names
    _PROGRAMS[sys.argv[0]]()
