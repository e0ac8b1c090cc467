"""A node's resident worker: it holds data and modules between messages, for each of which there is a process.

Both ends are here. They communicate through a socket in the node's state folder, in frames: type, header, payload.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from potluck.core.ground.errors import PotluckError, WireError
from potluck.engine.frames import receive, send
from potluck.flower import Envelope
from potluck.flower.deploy.processes import socket_in
from potluck.flower.wire.envelope import LONGEST_ENVELOPE_HEADER, read_header

SOCKET = "resident.sock"
"""Where it listens, in the folder for the node's state."""

_LONGEST_KIND = 100  # bytes of the type of a message
_COMES_WITHIN = 60.0  # seconds: it imports torch


class ResidentLost(PotluckError):
    """The resident worker ended while it answered a message."""


def delegate(config: Mapping[str, Any], kind: str, envelope: Envelope) -> Envelope | None:
    """Have the resident worker answer a message; None if this node has none.

    Raises:
        ResidentLost: it ended before it answered.
    """
    if not config.get("resident"):
        return None
    header, payload = envelope
    with _reached(Path(str(config["state"]))) as resident:
        try:
            send(resident, kind.encode(), json.dumps(header).encode(), payload)
            found, payload = receive(resident, longest=LONGEST_ENVELOPE_HEADER), receive(resident)
        except (EOFError, ConnectionError) as error:
            raise ResidentLost("the node's worker ended in the middle of the job; is there enough memory?") from error
    return read_header(found), payload


def serve_forever(config: Mapping[str, Any]) -> None:
    """Run the resident worker of a node with this configuration until terminated."""
    from potluck.engine.numerics.allocator import keep_freed_memory
    from potluck.flower.node.config import NodeConfig
    from potluck.flower.node.confined import confine
    from potluck.flower.node.room import limit_memory
    from potluck.flower.node.service import NodeService

    keep_freed_memory()
    home = NodeConfig.of(config)
    limit_memory(home.most_memory_gib)
    confine(home)
    service, path = NodeService(home), socket_in(home.state, SOCKET)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen()
        _make_ready()  # while others may still be joining
        while True:
            asking, _ = door.accept()
            with asking, suppress(EOFError, ConnectionError, WireError, MemoryError):  # gone, out of step, too long
                kind, header = (
                    receive(asking, longest=_LONGEST_KIND).decode(errors="replace"),
                    receive(asking, longest=LONGEST_ENVELOPE_HEADER),
                )
                answer, payload = service.answer(kind, (read_header(header), receive(asking)))
                send(asking, json.dumps(answer).encode(), payload)


def _make_ready() -> None:
    """Make an optimizer: for the first one of a process torch imports modules, which takes a slow device seconds."""
    import torch

    torch.optim.SGD([torch.zeros(1)])


def _reached(state: Path) -> socket.socket:
    """A connection to the resident worker, which may still be starting."""
    deadline = time.monotonic() + _COMES_WITHIN
    while True:
        there = socket.socket(socket.AF_UNIX)
        try:
            there.connect(str(socket_in(state, SOCKET)))
            return there
        except (FileNotFoundError, ConnectionRefusedError):
            there.close()
            if time.monotonic() > deadline:
                raise ResidentLost(f"no worker listens at {socket_in(state, SOCKET)}") from None
            time.sleep(0.05)


if __name__ == "__main__":
    os.umask(0o077)
    serve_forever(json.loads(sys.argv[1]))
