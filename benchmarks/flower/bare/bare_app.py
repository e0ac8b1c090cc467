"""A Flower app without Potluck: sends one array to every node and gets another one back. The yardstick for our share.

The numbers are drawn anew for every message, as trained weights would be new: Flower sends equal pieces only once.
"""

import json
import random
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    config = context.run_config
    count, size = int(config["nodes"]), int(config["bytes"])
    while len(list(grid.get_node_ids())) < count:
        time.sleep(0.2)
    seconds: list[float] = []
    for number in range(int(config["rounds"])):
        time.sleep(random.uniform(0, 3))  # as in echo.py
        started = time.perf_counter()
        content = _new(size)
        nodes = list(grid.get_node_ids())[:count]
        messages = [Message(content, node, "train.echo", ttl=600.0, group_id=str(number)) for node in nodes]
        left = set(grid.push_messages(messages))
        while left:
            left -= {reply.metadata.reply_to_message_id for reply in grid.pull_messages(list(left))}
            time.sleep(0.25)
        seconds.append(time.perf_counter() - started)
    Path(str(config["out"])).write_text(json.dumps(seconds))


@client_app.train("echo")
def _echo(message: Message, context: Context) -> Message:
    (size,) = message.content.array_records["payload"]["packed"].shape
    return Message(_new(size), reply_to=message)


def _new(size: int) -> RecordDict:
    """One array of so many bytes."""
    array = Array(dtype="uint8", shape=(size,), stype="raw", data=np.random.default_rng().bytes(size))
    return RecordDict({"payload": ArrayRecord({"packed": array})})
