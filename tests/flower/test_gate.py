"""Through the gate pass the requests of nodes that are registered, and nothing else."""

import json
import socket
import ssl
import threading
import time
from base64 import b64encode
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from potluck.flower.deploy.gate import LONGEST_PART, LONGEST_REQUEST, Gate, reason_in
from potluck.flower.deploy.keys import add_node, certify, key_of, registered, revoke_node
from potluck.flower.deploy.processes import free_port
from potluck.flower.deploy.superlink import FlowerError
from potluck.flower.node.join import Credentials, Refused, Unreachable, probe

REFUSED = {"code": 0, "detail": "only requests of nodes pass here"}


class Inside(BaseHTTPRequestHandler):
    """Stands for the SuperLink: says what it was asked, and does what a header asks of it."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.seen.append((self.path, dict(self.headers), body))
        self.send_response(int(self.headers.get("x-status", 200)))
        content = self.path.encode() + b" " + body
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *arguments):
        pass


@pytest.fixture
def keys(tmp_path):
    certify(tmp_path, [], days=1)
    add_node(tmp_path, "a")
    return tmp_path


@contextmanager
def opened(keys):
    """A gate before a stand-in: the address, what the stand-in saw, what the gate told."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Inside)
    server.seen, told = [], []
    if keys is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "server.crt", keys / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    port = free_port()
    try:
        with Gate(("127.0.0.1", port), f"127.0.0.1:{server.server_port}", keys, told.append):
            yield f"127.0.0.1:{port}", server.seen, told
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def shown(keys, name="a"):
    return {"flwr-public-key": b64encode(key_of(registered(keys)[name])).decode()}


def ask(address, path, keys=None, method="POST", content=b"", headers=None):
    """One request whose path goes out as it is written: its status and what came back."""
    if keys is None:
        connection = HTTPConnection(address, timeout=10)
    else:
        connection = HTTPSConnection(
            address, timeout=10, context=ssl.create_default_context(cafile=str(keys / "ca.crt"))
        )
    with closing(connection):
        connection.request(method, path, body=content, headers=headers or {})
        reply = connection.getresponse()
        return reply.status, reply.read()


def test_a_nodes_request_passes_as_it_is(keys):
    with opened(keys) as (address, seen, told):
        found = ask(address, "/v1/fleet/pull-messages", keys, content=b"\0\1" * 70_000, headers=shown(keys))
        assert found == (200, b"/v1/fleet/pull-messages " + b"\0\1" * 70_000)
        ((path, headers, body),) = seen
        assert (path, body) == ("/v1/fleet/pull-messages", b"\0\1" * 70_000)
        assert shown(keys).items() <= {name.lower(): value for name, value in headers.items()}.items()
        assert told == []


@pytest.mark.parametrize(
    ("path", "longest"), [("/v1/fleet/push-object", LONGEST_PART), ("/v1/fleet/push-messages", LONGEST_REQUEST)]
)
def test_a_request_longer_than_any_of_flowers_is_cut_off(keys, path, longest):
    with opened(keys) as (address, seen, told):
        status, content = ask(address, path, keys, content=b"x" * (longest - 1), headers=shown(keys))
        assert (status, len(seen)) == (200, 1)
        status, content = ask(address, path, keys, content=b"x" * (longest + 1), headers=shown(keys))
        assert (status, json.loads(content)["detail"]) == (413, f"a request of more than {longest} bytes")
        assert len(seen) == 1
        assert told == [f"refused a request of a node at 127.0.0.1: it is longer than {longest} bytes"]


def test_a_request_that_does_not_say_how_long_it_is_is_counted(keys):
    parts = (b"x" * 2**16 for _ in range(LONGEST_REQUEST // 2**16 + 1))
    with opened(keys) as (address, _, told):
        status, _ = ask(address, "/v1/fleet/push-messages", keys, content=parts, headers=shown(keys))
        assert status == 413
        assert told == [f"refused a request of a node at 127.0.0.1: it is longer than {LONGEST_REQUEST} bytes"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet//control",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/api/v1/fleet/pull-messages",
        "/docs",
        "/",
    ],
)
def test_what_is_not_for_nodes_does_not_pass(keys, path):
    with opened(keys) as (address, seen, told):
        status, content = ask(address, path, keys, headers=shown(keys))
        assert seen == []
        assert (status, json.loads(content)) == (404, REFUSED)
        assert told == [f"refused 127.0.0.1: POST {path} is not for nodes"]


def test_other_methods_do_not_pass(keys):
    with opened(keys) as (address, seen, _):
        assert ask(address, "/v1/fleet/pull-messages", keys, "GET", headers=shown(keys))[0] == 404
        assert seen == []


def test_a_stranger_is_refused_and_both_sides_hear_why(keys, tmp_path):
    certify(tmp_path / "other", [], days=1)
    add_node(tmp_path / "other", "b")
    with opened(keys) as (address, seen, told):
        for headers in ({}, shown(tmp_path / "other", "b")):
            status, content = ask(address, "/v1/fleet/activate-node", keys, headers=headers)
            assert status == 403
            assert "not registered" in json.loads(content)["detail"]
        assert seen == []
        assert told == ["refused a node at 127.0.0.1: its key is not registered"]


def test_a_node_that_is_added_or_revoked_counts_at_once(keys):
    with opened(keys) as (address, _, _):
        add_node(keys, "b")
        old = shown(keys, "b")
        assert ask(address, "/v1/fleet/pull-messages", keys, headers=old)[0] == 200
        revoke_node(keys, "b")
        assert ask(address, "/v1/fleet/pull-messages", keys, headers=old)[0] == 403


def test_a_node_hears_that_it_is_revoked(keys):
    with opened(keys) as (address, _, told):
        place = add_node(keys, "b")
        probe(Credentials(address, place))
        (keys / "registered" / "b.pub").unlink()
        with pytest.raises(Refused, match="refuses this node: its key is not registered"):
            probe(Credentials(address, place))
        assert told == ["refused a node at 127.0.0.1: its key is not registered"]


def test_plain_text_is_refused_and_both_sides_hear_why(keys):
    with opened(keys) as (address, seen, told):
        with pytest.raises(Refused, match="hung up on plain text; it expects encryption"):
            probe(Credentials(address, None))
        deadline = time.monotonic() + 5
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
        assert told == ["refused a caller: it does not encrypt (no TLS)"]
        assert seen == []


def test_a_node_does_not_talk_to_another_server(keys, tmp_path):
    certify(tmp_path / "other", [], days=1)
    with opened(keys) as (address, _, _), pytest.raises(Refused, match="certificate is not one of ours"):
        probe(Credentials(address, add_node(tmp_path / "other", "a")))


def test_a_node_with_keys_does_not_talk_in_plain_text(keys):
    with opened(None) as (address, _, _), pytest.raises(Refused, match="does not encrypt"):
        probe(Credentials(address, keys / "nodes" / "a"))


def test_those_who_fit_hear_nothing(keys):
    with opened(keys) as (address, _, told):
        probe(Credentials(address, keys / "nodes" / "a"))
        assert told == []
    with opened(None) as (address, _, told):
        probe(Credentials(address, None))
        assert told == []


def test_nobody_there_is_said():
    with pytest.raises(Unreachable, match="nobody answers"):
        probe(Credentials(f"127.0.0.1:{free_port()}", None))


def test_an_error_of_the_superlink_reaches_the_node(keys):
    with opened(keys) as (address, _, told):
        headers = {**shown(keys), "x-status": "412"}
        assert ask(address, "/v1/fleet/activate-node", keys, headers=headers) == (412, b"/v1/fleet/activate-node ")
        assert told == ["a node at 127.0.0.1 has to wait until its previous connection counts as gone"]


def test_a_superlink_that_is_gone_is_no_error_of_the_gates():
    told = []
    with Gate(("127.0.0.1", port := free_port()), f"127.0.0.1:{free_port()}", None, told.append):
        assert ask(f"127.0.0.1:{port}", "/v1/fleet/pull-messages")[0] == 503


def test_a_port_that_is_taken_is_said():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        gate = Gate(("127.0.0.1", other.getsockname()[1]), "127.0.0.1:1", None, lambda line: None)
        with pytest.raises(FlowerError, match="is the port taken"):
            gate.__enter__()


def test_what_is_not_protected_without_keys_anybody_is_a_node():
    with opened(None) as (address, seen, _):
        assert ask(address, "/v1/fleet/pull-messages", content=b"anything")[0] == 200
        assert len(seen) == 1
        assert ask(address, "/v1/control/start-run")[0] == 404


def test_what_is_not_protected_the_gate_answers_everybody(keys):
    with opened(keys) as (address, seen, _):
        assert [ask(address, "/v1/fleet/pull-messages", keys)[0] for _ in range(30)] == [403] * 30
        assert seen == []


LOUD = b'{"detail": "\\u001b[2Jno\\n2026 INFO all is well"}'


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"[" * 100_000, LOUD])
def test_a_reason_is_one_line_whoever_gives_it(body):
    assert reason_in(body).isprintable()
