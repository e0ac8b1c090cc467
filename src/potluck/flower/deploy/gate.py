"""The gate to a SuperLink: from outside, only nodes' requests pass.

Flower serves nodes, users who start runs and its own processes at one port, and authenticates only the nodes. Anyone
who reached that port could have any code run. So the SuperLink listens on this machine alone, and this gate, which
nodes reach, forwards what a node needs and nothing else.
"""

import json
import logging
import re
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import uvicorn

from potluck.core.text import one_line
from potluck.flower.deploy.keys import CA, SERVER, SERVER_KEY, key_of, registered
from potluck.flower.deploy.superlink import FlowerError

Say = Callable[[str], None]
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

_NODES = re.compile(rb"/v1/fleet/[a-z-]+")
_NOT_FOR_NODES = "only requests of nodes pass here"
_UNKNOWN_KEY = "its key is not registered"
HEALTH, KEY_HEADER = "/health", "flwr-public-key"
"""The path at which a node may check whether it is registered, and the header with a node's key in Flower's
requests."""

LONGEST_PART = 2**23
"""The most bytes of a request that carries a part of a message; Flower makes parts of 5 MiB."""

LONGEST_REQUEST = 2**18
"""The most bytes of any other request. One of them names the parts of a message, 70 bytes each: enough for replies of
18 GiB."""

_PARTS = "/v1/fleet/push-object"
_OF_ONE_CONNECTION = {b"connection", b"host", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
_AGAIN_AFTER = 60.0  # seconds until the same refusal is reported again


class Gate:
    """Serves a public address in its own thread.

    Args:
        address: the `host:port` to listen at.
        inside: the SuperLink's address.
        keys: folder of `potluck keys`; None for no encryption.
        say: called at most once a minute with each refusal and its reason.
    """

    def __init__(self, address: tuple[str, int], inside: str, keys: Path | None, say: Say) -> None:
        self._address = address
        proxy = _ProxyApp(inside, keys, _RateLimited(say))
        config = uvicorn.Config(
            proxy,
            host=address[0],
            port=address[1],
            log_level=logging.CRITICAL,
            access_log=False,
            loop="asyncio",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        config.load()
        if keys is not None:
            config.ssl = _context(keys, proxy.tell)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="gate", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise FlowerError(f"cannot listen at {self._address[0]}:{self._address[1]}; is the port taken?")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join()

    def _serve(self) -> None:
        with suppress(SystemExit):  # how uvicorn reports a port that is taken
            self._server.run()


class _ProxyApp:
    """The gate as an ASGI application."""

    def __init__(self, inside: str, keys: Path | None, tell: "_RateLimited") -> None:
        self.tell = tell
        self._members = None if keys is None else _Members(keys)
        trust = ssl.create_default_context(cafile=str(keys / CA)) if keys is not None else False
        self._base = f"{'http' if keys is None else 'https'}://{inside}"
        self._inside = httpx.AsyncClient(verify=trust, timeout=httpx.Timeout(300.0), trust_env=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request, or refuse it; at ASGI's shutdown, close the inner connections too."""
        if scope["type"] != "http":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await self._inside.aclose()
            await send({"type": "lifespan.shutdown.complete"})
            return
        path, host = bytes(scope["raw_path"]), (scope["client"] or ("somebody",))[0]
        asks = scope["method"] == "GET" and path == HEALTH.encode()
        known = self._members is None or self._members.know(dict(scope["headers"]).get(KEY_HEADER.encode(), b""))
        if not asks and (scope["method"] != "POST" or not _NODES.fullmatch(path)):
            self.tell(f"refused {host}: {scope['method']} {_printable(path)} is not for nodes")
            await _refuse(send, 404, _NOT_FOR_NODES)
        elif not known:
            self.tell(f"refused a node at {host}: {_UNKNOWN_KEY}")
            await _refuse(send, 403, _UNKNOWN_KEY)
        elif asks:
            await _answer(send, 200, b'{"status": "ok"}')
        else:
            await self._pass_on(path.decode("ascii"), host, scope, receive, send)

    async def _pass_on(self, path: str, host: str, scope: Scope, receive: Receive, send: Send) -> None:
        longest = LONGEST_PART if path == _PARTS else LONGEST_REQUEST
        if _claimed(scope["headers"]) > longest:
            await self._cut_off(longest, host, send)
            return
        request = self._inside.build_request(
            "POST", self._base + path, headers=_between(scope["headers"]), content=_body(receive, longest)
        )
        try:
            reply = await self._inside.send(request, stream=True)
        except _TooLong:
            await self._cut_off(longest, host, send)
            return
        except httpx.TransportError:
            await _refuse(send, 503, "the SuperLink is not there")
            return
        try:
            if reply.status_code in (401, 403):
                self.tell(f"refused a node at {host}: {reason_in(await reply.aread())}")
            elif reply.status_code == 412:
                self.tell(f"a node at {host} has to wait until its previous connection counts as gone")
            await send(
                {"type": "http.response.start", "status": reply.status_code, "headers": _between(reply.headers.raw)}
            )
            async for chunk in _content(reply):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await reply.aclose()

    async def _cut_off(self, longest: int, host: str, send: Send) -> None:
        self.tell(f"refused a request of a node at {host}: it is longer than {longest} bytes")
        await _refuse(send, 413, f"a request of more than {longest} bytes")


class _Members:
    """The registered keys, read again when files are added or removed."""

    def __init__(self, keys: Path) -> None:
        self._keys = keys
        self._files: dict[str, Path] = {}
        self._known: set[bytes] = set()

    def know(self, shown: bytes) -> bool:
        """Whether this key, in the format of requests, is registered."""
        files = registered(self._keys)
        if files != self._files:
            self._known = {b64encode(key_of(public)) for public in files.values()}
            self._files = files
        return shown in self._known


class _RateLimited:
    """Reports each message at most once a minute, since a refused node keeps trying."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._told: dict[str, float] = {}

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now - self._told.get(line, -_AGAIN_AFTER) >= _AGAIN_AFTER:
            self._told = {known: at for known, at in self._told.items() if now - at < _AGAIN_AFTER} | {line: now}
            self._say(line)


def _context(keys: Path, tell: "_RateLimited") -> ssl.SSLContext:
    """The server's side of TLS; reports callers that do not speak it."""

    class Listener(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                tell(f"refused a caller: {_fault(error)}")
                raise

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(keys / SERVER, keys / SERVER_KEY)
    context.sslobject_class = Listener
    return context


def _fault(error: ssl.SSLError) -> str:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if reason in ("http request", "wrong version number"):
        return "it does not encrypt (no TLS)"
    if "certificate expired" in reason:
        return "our certificate has expired; make a new one, and start the server anew"
    if "unknown ca" in reason or "certificate unknown" in reason:
        return "it does not trust our certificate; has it the ca.crt of these keys?"
    return f"TLS failed ({reason})"


def _claimed(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """The length that a request states; without one its bytes are counted as they arrive."""
    said = dict(headers).get(b"content-length", b"0")
    return int(said) if said.isdigit() and len(said) < 20 else 0


class _TooLong(Exception):
    """A request is longer than any of Flower's."""


async def _body(receive: Receive, longest: int) -> AsyncIterator[bytes]:
    more, seen = True, 0
    while more:
        part = await receive()
        if part["type"] != "http.request":
            return
        more = bool(part.get("more_body"))
        seen += len(part.get("body", b""))
        if seen > longest:
            raise _TooLong
        yield part.get("body", b"")


async def _content(reply: httpx.Response) -> AsyncIterator[bytes]:
    if reply.is_stream_consumed:
        yield reply.content
    else:
        async for chunk in reply.aiter_raw():
            yield chunk


def _between(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that are forwarded."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_ONE_CONNECTION]


async def _refuse(send: Send, status: int, why: str) -> None:
    await _answer(send, status, json.dumps({"code": 0, "detail": why}).encode())


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def reason_in(body: bytes) -> str:
    """The reason for a refusal, from the body of the answer, sanitised to one line."""
    try:
        return one_line(str(json.loads(body)["detail"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return "no reason given"


def _printable(path: bytes) -> str:
    return path[:80].decode("ascii", errors="replace")
