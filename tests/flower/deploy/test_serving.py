"""A caller has its answer whole if it fetches it, at whatever pace is allowed, and is cut off if it does not."""

import ssl
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection

import pytest

from potluck.flower.deploy import serving
from potluck.flower.deploy.keys import certify
from potluck.flower.deploy.processes import free_port
from potluck.flower.deploy.serving import HttpAnswer, Serving, refusing_answer
from potluck.flower.deploy.tls import Security

LONG = bytes(range(256)) * 2**17  # 32 MiB, of which the kernel takes only a part ahead


@dataclass(frozen=True)
class Visitor:
    """A caller who may say little."""

    content: bytes
    key: bytes = b"a"
    longest: int = 10

    def too_long(self):
        return refusing_answer(413, "too long")

    async def answer(self, body):
        return HttpAnswer(200, self.content)


@dataclass(frozen=True)
class Clerk:
    """A desk that admits everybody, or bids everybody farewell."""

    farewell: HttpAnswer | None = None

    def greet(self, certificate, host):
        return self.farewell

    def admit(self, head):
        return Visitor(LONG if head.path == "/long" else b"short")

    def hung_up(self, error):
        pass

    async def watch(self):
        pass


@contextmanager
def served(clerk, keys):
    """A server, and what connects with it; encrypted where there are keys."""
    port = free_port()
    server = Serving(("127.0.0.1", port), clerk, None if keys is None else Security(keys))
    server.start()
    if keys is None:
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
    else:
        trust = ssl.create_default_context(cafile=str(keys / "ca.crt"))
        connection = HTTPSConnection("127.0.0.1", port, timeout=5, context=trust)
    try:
        with closing(connection):
            yield connection
    finally:
        server.stop()


@pytest.fixture(params=[True, False], ids=["encrypted", "plain"])
def keys(request, tmp_path):
    if not request.param:
        return None
    certify(tmp_path, [], days=9)
    return tmp_path


def asks_for_the_long_one(connection, before):
    """After some exchanges, since what asyncio counts under TLS once depended on whether their number is odd."""
    for _ in range(before):
        connection.request("GET", "/short")
        assert connection.getresponse().read() == b"short"
    connection.request("GET", "/long")


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 1])
def test_who_fetches_a_long_answer_slowly_has_it_whole(keys, monkeypatch, before):
    """It takes longer than a caller has for its next request."""
    monkeypatch.setattr(serving, "PROVEN_WITHIN", 0.5)
    with served(Clerk(), keys) as connection:
        asks_for_the_long_one(connection, before)
        reply = connection.getresponse()
        time.sleep(1.0)
        assert reply.read() == LONG


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 1])
def test_who_does_not_fetch_its_answer_is_cut_off(keys, monkeypatch, before):
    monkeypatch.setattr(serving, "_GRACE", 0.3)
    monkeypatch.setattr(serving, "SLOWEST", 2.0**30)
    with served(Clerk(), keys) as connection:
        asks_for_the_long_one(connection, before)
        time.sleep(1.0)
        with pytest.raises((OSError, HTTPException)):
            connection.getresponse().read()


def test_who_is_told_farewell_hears_it_in_one_piece_and_is_cut_off_soon_if_it_says_nothing(keys, monkeypatch):
    """In one piece, so that no end of it waits until the caller has acknowledged its beginning."""
    monkeypatch.setattr(serving, "_LINGER", 0.3)
    with served(Clerk(refusing_answer(403, "it is over")), keys) as connection:
        connection.connect()
        assert connection.sock.recv(4096).endswith(b'{"code": 0, "detail": "it is over"}')
        assert connection.sock.recv(1) == b""  # fails after five seconds; a caller has ten to prove who it is
