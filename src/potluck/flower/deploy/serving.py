"""An HTTP server for callers who may be hostile: everything that a caller can draw out has an end.

A general server waits as long as a caller likes for its handshake, its header and its body, and holds a task and a
connection meanwhile. Here a caller has seconds to prove who it is, a request's body is read whole, in bounded time and
length, before anybody else is troubled with it, and an answer that is not fetched is dropped.
"""

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import h11

from potluck.flower.deploy.limits import Shares, WaitingRoom
from potluck.flower.deploy.tls import Security

PROVEN_WITHIN = 10.0
"""Seconds from a caller's connection to the end of its first header, and from an answer to the end of the next one."""

SLOWEST = 2**14
"""Bytes per second, on average, at which a body must come and an answer be fetched, after a grace of ten seconds."""

WAITING = 128
"""The most connections whose callers have not proven who they are."""

CONNECTIONS_OF_ONE = 8
"""The most connections with one key; a node has up to four, and for some seconds those of its predecessor."""

_GRACE = 10.0
_LINGER = 2.0  # seconds in which a refused caller's body is thrown away, so that it can read why
_CHUNK = 2**17
_PIECE = 2**15  # of an answer; how much of it may still be here when it counts as fetched, beside asyncio's 64 KiB
_LONGEST_HEADER = 2**14
_BACKLOG = 512
_OUT_OF_FILES = 0.1  # seconds until a connection that could not be accepted is tried again


@dataclass(frozen=True)
class Head:
    """A request without its body.

    Attributes:
        headers: by name, in lower case.
        host: the address of the caller.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    host: str

    @property
    def claimed(self) -> int | None:
        """The length that it states for its body."""
        said = self.headers.get("content-length")
        return None if said is None else int(said)


@dataclass(frozen=True)
class HttpAnswer:
    """An answer to a request; `more` are further headers."""

    status: int
    body: bytes
    kind: str = "application/json"
    more: tuple[tuple[str, str], ...] = ()


def refusing_answer(status: int, why: str) -> HttpAnswer:
    """An answer in the form of Flower's errors."""
    return HttpAnswer(status, json.dumps({"code": 0, "detail": why}).encode())


class Visit(Protocol):
    """A request whose caller has proven who it is."""

    @property
    def key(self) -> bytes:
        """The caller's key."""
        ...

    @property
    def longest(self) -> int:
        """The most bytes of its body."""
        ...

    def too_long(self) -> HttpAnswer:
        """The answer if the body is longer."""
        ...

    async def answer(self, body: bytes) -> HttpAnswer:
        """The answer to the body."""
        ...


class Desk(Protocol):
    """Decides on requests."""

    def greet(self, certificate: bytes | None, host: str) -> HttpAnswer | None:
        """What a caller is told before anything of its is read, after which it is sent away; None to hear it.

        Args:
            certificate: the one that it has shown in its handshake, in DER; None if it was not asked for one.
            host: the address of the caller.
        """
        ...

    def admit(self, head: Head) -> Visit | HttpAnswer:
        """A visit; or an answer right away, after which the connection is closed."""
        ...

    def hung_up(self, error: ssl.SSLError) -> None:
        """A caller's handshake failed."""
        ...

    async def watch(self) -> None:
        """Runs beside the server until it is cancelled at the server's end."""
        ...


class Serving:
    """Serves an address in its own thread.

    Args:
        address: the `host:port` to listen at.
        desk: decides on requests.
        security: the server's side of TLS; None for no encryption.
        name: of the thread.
    """

    def __init__(self, address: tuple[str, int], desk: Desk, security: Security | None, name: str = "gate") -> None:
        self._address = address
        self._desk = desk
        self._security = security
        self._waiting = WaitingRoom(WAITING)
        self._connections = Shares(CONNECTIONS_OF_ONE)
        self._listening: list[socket.socket] = []
        self._started = threading.Event()
        self._end: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=name, daemon=True)

    def start(self) -> None:
        """Begin to listen.

        Raises:
            OSError: the address is taken, or not this machine's.
        """
        host, port = self._address
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, name in sorted({(family, str(address[0])) for family, _, _, _, address in found}):
            place = socket.create_server((name, port), family=family, backlog=_BACKLOG)
            place.setblocking(False)
            self._listening.append(place)
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        """Close all connections."""
        self._end()
        self._thread.join()

    async def _serve(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._end = lambda: loop.call_soon_threadsafe(ended.set)
        watching, callers = loop.create_task(self._desk.watch()), set[asyncio.Task[None]]()
        callers |= {loop.create_task(self._accept(place, callers)) for place in self._listening}
        self._started.set()
        await ended.wait()
        for tasks in (callers, {watching}):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for place in self._listening:
            place.close()

    async def _accept(self, place: socket.socket, callers: set[asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(place)
            except OSError:  # out of files, or the caller has gone
                await asyncio.sleep(_OUT_OF_FILES)
                continue
            caller = loop.create_task(self._converse(connection, str(address[0])))
            callers.add(caller)
            caller.add_done_callback(callers.discard)
            caller.add_done_callback(self._waiting.leave)
            caller.add_done_callback(lambda _, connection=connection: connection.close())
            self._waiting.enter(caller)

    async def _converse(self, connection: socket.socket, host: str) -> None:
        """Serve one connection."""
        with suppress(OSError, TimeoutError, h11.ProtocolError):
            deadline = asyncio.get_running_loop().time() + PROVEN_WITHIN
            async with self._opened(connection) as line:
                if (farewell := self._desk.greet(line.certificate, host)) is not None:
                    await line.say_last(farewell)
                    return
                async with asyncio.timeout_at(deadline):
                    head = await line.head(host)
                visit = self._desk.admit(head) if head else None
                if isinstance(visit, HttpAnswer):
                    await line.say_last(visit)
                elif visit and head:
                    me = asyncio.current_task()
                    assert me is not None
                    self._waiting.leave(me)
                    with self._connections.one(visit.key) as free:
                        if free:
                            await self._go_on(line, head, visit)
                        else:
                            await line.say_last(refusing_answer(503, "too many connections with this key"))

    async def _go_on(self, line: "_Line", head: Head, visit: Visit) -> None:
        """Serve a caller who has proven who it is."""
        key = visit.key
        while True:
            body = await line.body(head, visit.longest)
            if body is None:
                await line.say_last(visit.too_long())
                return
            await line.say(await visit.answer(body))
            async with asyncio.timeout(PROVEN_WITHIN):
                following = await line.head(head.host)
            if following is None:
                return
            head, admitted = following, self._desk.admit(following)
            if isinstance(admitted, HttpAnswer) or admitted.key != key:
                why = (
                    admitted
                    if isinstance(admitted, HttpAnswer)
                    else refusing_answer(401, "another key on the same connection")
                )
                await line.say_last(why)
                return
            visit = admitted

    @asynccontextmanager
    async def _opened(self, connection: socket.socket) -> AsyncGenerator["_Line"]:
        """A connection after its handshake; it is closed at the end, and cut off at an error."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_CHUNK)
        protocol = asyncio.StreamReaderProtocol(reader)
        limits = {"ssl_handshake_timeout": PROVEN_WITHIN, "ssl_shutdown_timeout": 1.0} if self._security else {}
        context = self._security.context if self._security else None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio: only where a socket names TCP
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context, **limits)
        except ssl.SSLError as error:
            self._desk.hung_up(error)
            raise
        transport.set_write_buffer_limits(1)  # with 0 an empty buffer counts as full under TLS, at every other look
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        session: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        try:
            yield _Line(reader, writer, session.getpeercert(binary_form=True) if session else None)
            writer.close()
            async with asyncio.timeout(_LINGER):
                await writer.wait_closed()
        finally:
            transport.abort()


class _Line:
    """One connection, as requests and answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, certificate: bytes | None) -> None:
        self.certificate = certificate
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_LONGEST_HEADER)
        self._of_head = False

    async def head(self, host: str) -> Head | None:
        """The next request; None if there is none any more."""
        if self._http.our_state is h11.MUST_CLOSE:
            return None
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        try:
            event = await self._event()
        except h11.RemoteProtocolError:
            await self.say_last(refusing_answer(400, "this is no HTTP"))
            return None
        if not isinstance(event, h11.Request):
            return None
        self._of_head = event.method == b"HEAD"
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
        return Head(event.method.decode("ascii"), event.target.decode("ascii"), headers, host)

    async def body(self, head: Head, longest: int) -> bytes | None:
        """The request's body; None if it is longer."""
        expected = longest if head.claimed is None else head.claimed
        if expected > longest:
            return None
        body = bytearray()
        async with asyncio.timeout(_GRACE + expected / SLOWEST):
            while isinstance(event := await self._event(), h11.Data):
                body += event.data
                if len(body) > longest:
                    return None
        if not isinstance(event, h11.EndOfMessage):
            raise ConnectionError
        return bytes(body)

    async def say(self, answer: HttpAnswer, *, last: bool = False) -> None:
        """Send an answer; to a HEAD its header alone."""
        headers = [("content-type", answer.kind), ("content-length", str(len(answer.body))), *answer.more]
        head = h11.Response(status_code=answer.status, headers=[*headers, *([("connection", "close")] if last else [])])
        body = () if self._of_head else (h11.Data(data=answer.body),)
        content = b"".join(self._http.send(event) or b"" for event in (head, *body, h11.EndOfMessage()))
        async with asyncio.timeout(_GRACE + len(answer.body) / SLOWEST):
            await self._send(content)

    async def say_last(self, answer: HttpAnswer) -> None:
        """Send an answer and have the caller hang up, which it can once it has sent its body and read the answer."""
        await self.say(answer, last=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                while await self._reader.read(_CHUNK):
                    pass

    async def _send(self, content: bytes) -> None:
        """Send it, and wait until all but a little of it is gone.

        Under TLS a transport knows only what is not encrypted yet. So it goes in pieces: one is taken when the one
        before has left for the connection beneath, and that takes none while it has more than 64 KiB to send.
        """
        for start in range(0, len(content), _PIECE):
            self._writer.write(content[start : start + _PIECE])
            await self._writer.drain()

    async def _event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_CHUNK))
        return event
