"""Flower's two apps: the server plays an experiment with `potluck`'s own engine, a node carries out its jobs.

`flwr run` looks the apps up in this file's text, so both are plain assignments. One's own Flower project can name
them: `potluck.flower.apps:server_app` and `potluck.flower.apps:client_app`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from potluck.core.errors import PotluckError
from potluck.flower.grid import HELLO, JOB
from potluck.flower.hosting import Said
from potluck.flower.node import Home, node_at, refusal
from potluck.flower.serve import serve
from potluck.flower.wire import from_outcome, from_words, to_job, to_words

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    config = context.run_config
    folder = Path(str(config["folder"]))
    said = Said(folder)
    try:
        serve(
            grid,
            json.loads(str(config["experiment"])),
            folder,
            timeout=float(config["timeout"]),
            patience=float(config["patience"]),
            say=said.say,
        )
    except BaseException as error:
        said.end(str(error) if isinstance(error, PotluckError) else f"{type(error).__name__}: {error}")
        raise
    said.end()


@client_app.query(HELLO.partition(".")[2])
def _hello(message: Message, context: Context) -> Message:
    try:
        words = to_words(message.content)
        _, words = node_at(_home(context, words), words)
    except Exception as error:
        words = refusal(error)
    return Message(from_words(words), reply_to=message)


@client_app.train(JOB.partition(".")[2])
def _job(message: Message, context: Context) -> Message:
    job, words = to_job(message.content)
    node, _ = node_at(_home(context, words), words)
    return Message(from_outcome(node.carry_out(job)), reply_to=message)


def _home(context: Context, words: Mapping[str, Any]) -> Home:
    """Of this node. One in Flower's simulation has no owner, but a number, and a server that is no stranger."""
    config = context.node_config
    if "state" not in config and "partition-id" in config and "simulated" in words:
        return Home(Path(words["simulated"]) / str(config["partition-id"]))
    return Home.of(config)
