"""Serves the page of a run, to its operator or, in part, to observers; nobody who asks for it can hold up the run."""

import asyncio
import ipaddress
import ssl
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from potluck.cli.status.account import Account
from potluck.cli.status.metrics import METRICS_TYPE, metrics_of
from potluck.cli.status.observers import Observers, for_observers
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
        observers: who alone may read, over TLS and what is for them; None for everybody who reaches the address.
    """

    def __init__(self, address: tuple[str, int], account: Account, observers: Observers | None = None) -> None:
        self._address, self._option = address, "--status" if observers is None else "--observers"
        security = None if observers is None else observers.security
        desk = _Desk(account, observers, local=observers is None and is_loopback(address[0]))
        self._serving = Serving(address, desk, security, "status")

    def __enter__(self) -> Self:
        host, port = self._address
        try:
            self._serving.start()
        except OSError as error:
            raise ConfigError(
                f"{self._option} {host}:{port}: cannot listen there ({error.strerror}); choose another port, or end"
                " what listens at this one"
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

    def __init__(self, account: Account, observers: Observers | None, *, local: bool) -> None:
        self._account, self._observers, self._local = account, observers, local
        self._made: dict[str, tuple[Overview, bytes]] = {}

    def greet(self, certificate: bytes | None, host: str) -> HttpAnswer | None:
        """Send away who is no observer, where observers alone may read."""
        why = None if self._observers is None else self._observers.why_not(certificate)
        if self._observers is None or why is None:
            return None
        self._observers.refused(host, why)
        return _said(403, why)

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
        """A handshake failed; for an operator there is none."""
        if self._observers is not None:
            self._observers.hung_up(error)

    async def watch(self) -> None:
        """Look after observers' keys; for an operator there is nothing to do."""
        await (asyncio.Event().wait() if self._observers is None else self._observers.watch())

    def _fresh(self, path: str, make: Callable[[Overview], bytes]) -> bytes:
        """What an overview looks like; the same one is made once, however many ask."""
        seen = self._account.look()
        if path not in self._made or self._made[path][0] is not seen:
            self._made[path] = seen, make(seen if self._observers is None else for_observers(seen))
        return self._made[path][1]


def _host_in(headers: Mapping[str, str]) -> str:
    """The host under which the server was asked, without a port."""
    host = headers.get("host", "")
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()


def _said(status: int, line: str, *more: tuple[str, str]) -> HttpAnswer:
    return HttpAnswer(status, f"{line}\n".encode(), _TEXT, (*_GUARDED, *more))
