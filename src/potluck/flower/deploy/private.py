"""Flower's API between its programs on one machine, at a socket that only their user can reach.

Flower serves this API at a port of the loopback interface, which every user of the machine reaches, and gives tasks to
whoever asks; whoever sees a task's token, which is on a command line, may answer in its stead. A socket in a folder of
one user keeps all others out, whatever they have seen: the system asks who they are.
"""

import os
from types import ModuleType
from typing import Any

import httpx
import uvicorn
from flwr.supercore.runtime import RuntimeHttpClient

RUNTIME = "POTLUCK_RUNTIME"
"""The environment variable with the path of the socket, which Flower's programs inherit from one another."""


def replace(module: ModuleType, name: str, ours: Any) -> None:
    """Have a module of Flower's use something of ours.

    Raises:
        SystemExit: it uses nothing of this name; this version would not do what Potluck relies on.
    """
    if getattr(module, name, None) is None:
        raise SystemExit(
            f"this version of Flower has no {name} in {module.__name__}; install the one that Potluck asks for"
        )
    setattr(module, name, ours)


class AtSocket(uvicorn.Config):
    """A server's settings, with the socket in place of the host and port that are given."""

    def __init__(self, app: Any, *, host: str, port: int, **options: Any) -> None:
        super().__init__(app, uds=os.environ[RUNTIME], **options)


class ToSocket(RuntimeHttpClient):
    """Flower's client of this API, which calls the socket in place of the address that is given."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        given = self._client
        # Who is at a socket the system says, and no certificate: to read them takes a tenth of a second.
        there = httpx.HTTPTransport(uds=os.environ[RUNTIME], verify=False)
        self._client = httpx.Client(transport=there, timeout=given.timeout, follow_redirects=False)
        given.close()
