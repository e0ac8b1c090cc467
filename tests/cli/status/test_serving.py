"""Whoever asks for the operator's page reads it, and does nothing else."""

import socket
import time
from contextlib import ExitStack, closing
from http.client import HTTPConnection

import pytest

from potluck.cli.status.account import Account
from potluck.cli.status.page import policy_of_page
from potluck.cli.status.serving import StatusPage, is_loopback
from potluck.core.ground.errors import ConfigError
from potluck.experiment.watching.observers import RunStart
from potluck.flower.deploy import serving
from potluck.flower.deploy.keys import NODE_KEY, add_node, certify
from potluck.flower.deploy.processes import free_port
from potluck.records import ACCURACY

PATHS = ("/", "/metrics", "/healthz")


class Asked:
    """A page at a free port."""

    def __init__(self, port):
        self.port = port

    def ask(self, path="/", method="GET", body=None, **headers):
        """The status, the headers and the body of an answer."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            connection.request(method, path, body=body, headers=headers)
            reply = connection.getresponse()
            return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()


@pytest.fixture
def account():
    return Account(None)


@pytest.fixture
def page(account):
    port = free_port()
    with StatusPage(("127.0.0.1", port), account):
        yield Asked(port)


def test_there_are_a_page_numbers_and_a_word_for_those_who_watch(page, account):
    account.begin(RunStart("fedavg", 9, 0, 3, 3, ACCURACY), None)
    status, headers, body = page.ask()
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["content-security-policy"] == policy_of_page()
    assert b"fedavg: round 0 of 9" in body
    status, headers, body = page.ask("/metrics?x=y")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    assert b"potluck_rounds 9.0\n" in body
    assert page.ask("/healthz")[::2] == (200, b"ok\n")
    assert page.ask("/other")[::2] == (404, b"there are /, /metrics and /healthz\n")
    for path in PATHS:
        headers = page.ask(path)[1]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_the_page_can_only_be_read(page, method, path):
    status, headers, body = page.ask(path, method, body=b"x" * 10 if method != "TRACE" else None)
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert body == b"it can only be read: GET or HEAD\n"


@pytest.mark.parametrize("path", PATHS)
def test_a_head_is_answered_by_the_header_alone(page, path):
    status, headers, body = page.ask(path, "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) == len(page.ask(path)[2])


@pytest.mark.parametrize("path", PATHS)
def test_a_name_that_was_made_to_mean_this_machine_is_refused(page, path):
    for name in (
        "evil.example",
        "evil.example:8600",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "192.0.2.1",
        "",
    ):
        status, _, body = page.ask(path, Host=name)
        assert status in (400, 403), name  # without any name it is no HTTP
        assert b"potluck" not in body
    for name in ("localhost", "LOCALHOST:9000", "127.0.0.1:8600", "[::1]:8600"):
        assert page.ask(path, Host=name)[0] == 200, name


def test_what_is_not_protected_the_page_is_read_by_whoever_reaches_it(account):
    port = free_port()
    with StatusPage(("0.0.0.0", port), account):
        assert Asked(port).ask(Host="any.example")[0] == 200


def test_only_this_machines_own_addresses_are_its_own():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.0.2.1", "example.org", "")))


def test_callers_who_hang_hold_up_nobody(page):
    """More of them than there are places, who say nothing, or begin a request and never end it."""
    with ExitStack() as stack:
        for number in range(2 * serving.WAITING):
            line = stack.enter_context(socket.create_connection(("127.0.0.1", page.port)))
            if number % 2:
                line.sendall(b"GET / HTTP/1.1\r\nHost: localh")
        start = time.monotonic()
        assert page.ask()[0] == 200
        assert time.monotonic() - start < 3.0


def test_a_caller_has_an_end_whether_it_asks_or_reads(page, monkeypatch):
    monkeypatch.setattr(serving, "PROVEN_WITHIN", 0.3)
    with closing(socket.create_connection(("127.0.0.1", page.port))) as line:
        line.settimeout(5.0)
        line.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        assert line.recv(1) == b""


def test_an_address_that_is_taken_is_named_before_anything_starts(account):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=rf"--status 127\.0\.0\.1:{port}: cannot listen there \(Address already"),
            StatusPage(("127.0.0.1", port), account),
        ):
            pass


def test_the_page_shows_no_key_and_no_path(tmp_path):
    keys, port = tmp_path / "keys", free_port()
    certify(keys, [], days=1)
    add_node(keys, "a")
    account = Account(keys)
    account.begin(RunStart("fedavg", 9, 0, 3, 3, ACCURACY, folder=tmp_path), None)
    with StatusPage(("127.0.0.1", port), account):
        shown = b"".join(Asked(port).ask(path)[2] for path in PATHS)
    assert b"server.crt" in shown
    assert str(tmp_path).encode() not in shown
    secrets = [keys / "ca.key", keys / "server.key", keys / "nodes" / "a" / NODE_KEY]
    lines = [
        line for path in (*secrets, keys / "registered/a.pub") for line in path.read_bytes().split() if len(line) > 20
    ]
    assert len(lines) > 10
    assert not [line for line in lines if line in shown]
