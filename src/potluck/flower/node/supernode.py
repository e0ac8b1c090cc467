"""Flower's program for nodes, as `potluck join` runs it: private, watched, and alive only while it works.

It serves its API at the node's own socket; it touches files by which `potluck join` sees how its requests fare; it
looks for messages often while it gets some; it has a certificate for servers that ask for one, which Flower's own has
not; it makes a request again whatever broke the connection, where Flower's own drops the message that it is at work on
after an error of TLS; and it ends when its main thread does, which Flower's own may outlive, doing nothing.
"""

import os
import ssl
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from potluck.flower import ASKING_AGAIN
from potluck.flower.node.bell import Bell

SIGNS = "POTLUCK_SIGNS"
"""The environment variable with the folder for `Signs`."""

CARRIED = "POTLUCK_CARRIED"
"""The environment variable with the folder of the node's keys; absent without keys."""

_ASKS, _LOOKS = 0.2, 0.05  # seconds after which the program asks the server again, and looks for an answer here
_ALIVE = ("/v1/fleet/activate-node", "/v1/fleet/send-node-heartbeat")


class Signs:
    """How the program's requests fare, as the times of two files.

    Args:
        folder: the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._answered, self._failed = folder / "answered", folder / "failed"

    def note(self, request: httpx.Request, reply: httpx.Response | None) -> None:
        """Note a request's reply, None if there is none: the server knows the node is alive, or there is a doubt."""
        if reply is None or reply.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            self._failed.touch()
        elif reply.is_success and request.url.path in _ALIVE:
            self._answered.touch()

    def seen(self) -> tuple[int, int]:
        """When the last sign of life was answered and the last request failed: numbers that change with each."""
        return _touched(self._answered), _touched(self._failed)


class Patience:
    """How long the program waits before it looks again, for a message or for the answer to one.

    Flower's own waits three seconds, or half of one. This one waits as long at the most, but no longer than a sixteenth
    of the time for which it has waited already: a node that has just answered is likely to be asked again soon, and
    one that nobody asks looks as seldom as Flower's. It takes the place of the module `time` there.
    """

    def __init__(self) -> None:
        self._for, self._began = 0.0, 0.0

    def sleep(self, seconds: float) -> None:
        """Wait, where Flower would for so many seconds; another number than before is for something else."""
        now, soonest = time.monotonic(), _ASKS if seconds > 1 else _LOOKS
        if seconds != self._for:
            self._for, self._began = seconds, now
        time.sleep(min(seconds, max(soonest, (now - self._began) / 16)))


def _touched(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


class Noting:
    """Notes each reply, and names no error after TLS; an interceptor of Flower's clients.

    Flower makes a request again after any error of a connection but one whose text speaks of TLS. A network that
    changes a byte causes such an error too, and what is wrong for longer `potluck join` finds out by itself.
    """

    def __init__(self, signs: Signs) -> None:
        self._signs = signs

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        """The reply to a request.

        Raises:
            TransportError: there is none, whatever broke the connection.
        """
        try:
            reply = call_next(context)
        except httpx.TransportError as error:
            self._signs.note(context.request, None)
            raise type(error)("the connection broke", request=context.request) from error
        self._signs.note(context.request, reply)
        return reply


def main() -> None:
    """Act as Flower's program for a node."""
    import uvicorn
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.cli import flower_supernode
    from flwr.supernode.fleet_http_client import FleetHttpClient

    from potluck.flower.deploy.private import AtSocket, replace
    from potluck.flower.deploy.tls import show_certificate

    signs, bell = Signs(Path(os.environ[SIGNS])), Bell(Path(os.environ[SIGNS]))

    class Client(FleetHttpClient):
        """Flower's client of the server, whose replies are noted, with the node's certificate."""

        def __init__(
            self, base_url: str, *, interceptors: Sequence[Any] = (), verify: Any = True, **options: Any
        ) -> None:
            if CARRIED in os.environ and isinstance(verify, ssl.SSLContext):
                show_certificate(verify, Path(os.environ[CARRIED]))
            super().__init__(base_url, interceptors=[*interceptors, Noting(signs)], verify=verify, **options)

    def pulled(*args: Any, **options: Any) -> dict[str, bytes]:
        """Flower's `pull_objects`, which is called as soon as there is a task."""
        bell.ring()
        return pull_objects(*args, **options, **ASKING_AGAIN)

    replace(fleet_http_connection, "FleetHttpClient", Client)
    replace(uvicorn, "Config", AtSocket)
    replace(start_client_internal, "time", Patience())
    replace(start_client_internal, "pull_objects", pulled)
    sys.argv[0] = "flower-supernode"  # Flower tells its programs apart by this
    try:
        flower_supernode()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)  # threads of Flower's would keep it alive


if __name__ == "__main__":
    main()
