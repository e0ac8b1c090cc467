"""Flower's two apps: the server plays an experiment with `potluck`'s own engine, a node carries out its jobs.

`flwr run` looks the apps up in this file's text, so both are plain assignments. One's own Flower project can name
them: `potluck.flower.apps:server_app` and `potluck.flower.apps:client_app`.
"""

import json
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from potluck.flower.grid import HELLO, JOB
from potluck.flower.node import Home, node_at, refusal
from potluck.flower.serve import serve
from potluck.flower.wire import from_outcome, from_words, to_job, to_words

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    config = context.run_config
    serve(
        grid,
        json.loads(str(config["experiment"])),
        Path(str(config["folder"])),
        timeout=float(config["timeout"]),
        patience=float(config["patience"]),
    )


@client_app.query(HELLO.partition(".")[2])
def _hello(message: Message, context: Context) -> Message:
    try:
        _, words = node_at(Home.of(context.node_config), to_words(message.content))
    except Exception as error:
        words = refusal(error)
    return Message(from_words(words), reply_to=message)


@client_app.train(JOB.partition(".")[2])
def _job(message: Message, context: Context) -> Message:
    job, words = to_job(message.content)
    node, _ = node_at(Home.of(context.node_config), words)
    return Message(from_outcome(node.carry_out(job)), reply_to=message)
