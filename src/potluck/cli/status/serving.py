"""Serves the operator's page: it is read only, and nobody who asks for it can hold up the run."""

import asyncio
import ipaddress
import ssl
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from potluck.cli.status.account import Account
from potluck.cli.status.metrics import METRICS_TYPE, metrics_of
from potluck.cli.status.overview import Overview
from potluck.cli.status.page import page_of, policy_of_page
from potluck.core.ground.errors import ConfigError
from potluck.flower.deploy.serving import Head, HttpAnswer, Serving

_HTML, _TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
_GUARDED = (
    ("cache-control", "no-store"),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
)
_READING = ("GET", "HEAD")


class StatusPage:
    """Serves an account at an address, in a thread of its own: `/`, `/metrics` and `/healthz`.

    Args:
        address: the host and port to listen at.
        account: what is shown.
    """

    def __init__(self, address: tuple[str, int], account: Account) -> None:
        self._address = address
        self._serving = Serving(address, _Desk(account, local=is_loopback(address[0])), None, "status")

    def __enter__(self) -> Self:
        host, port = self._address
        try:
            self._serving.start()
        except OSError as error:
            raise ConfigError(
                f"--status {host}:{port}: cannot listen there ({error.strerror}); choose another port, or end what"
                " listens at this one"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._serving.stop()


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own, which no other one reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Desk:
    """Answers whoever asks, right away."""

    def __init__(self, account: Account, *, local: bool) -> None:
        self._account, self._local = account, local
        self._made: dict[str, tuple[Overview, bytes]] = {}

    def admit(self, head: Head) -> HttpAnswer:
        """The answer to a request."""
        if head.method not in _READING:
            return _said(405, "it can only be read: GET or HEAD", ("allow", ", ".join(_READING)))
        if self._local and not is_loopback(_host_in(head.headers)):
            # A page from elsewhere whose name was made to mean this machine could read it in the operator's browser.
            return _said(403, "ask for it as localhost or 127.0.0.1, under which name alone it is shown")
        path = head.path.partition("?")[0]
        if path == "/":
            return HttpAnswer(
                200, self._fresh(path, page_of), _HTML, (*_GUARDED, ("content-security-policy", policy_of_page()))
            )
        if path == "/metrics":
            return HttpAnswer(200, self._fresh(path, metrics_of), METRICS_TYPE, _GUARDED)
        if path == "/healthz":
            return _said(200, "ok")
        return _said(404, "there are /, /metrics and /healthz")

    def hung_up(self, error: ssl.SSLError) -> None:
        """Nobody's handshake fails, since there is none."""

    async def watch(self) -> None:
        """Nothing to do beside."""
        await asyncio.Event().wait()

    def _fresh(self, path: str, make: Callable[[Overview], bytes]) -> bytes:
        """What an overview looks like; the same one is made once, however many ask."""
        seen = self._account.look()
        if path not in self._made or self._made[path][0] is not seen:
            self._made[path] = seen, make(seen)
        return self._made[path][1]


def _host_in(headers: Mapping[str, str]) -> str:
    """The host under which the server was asked, without a port."""
    host = headers.get("host", "")
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()


def _said(status: int, line: str, *more: tuple[str, str]) -> HttpAnswer:
    return HttpAnswer(status, f"{line}\n".encode(), _TEXT, (*_GUARDED, *more))
