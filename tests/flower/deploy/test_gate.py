"""Through the gate pass the requests of nodes that are registered, and nothing else."""

import json
import re
import shutil
import socket
import ssl
import threading
import time
from base64 import b64encode
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    PullMessagesRequest,
    PullMessagesResponse,
)
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree, PullObjectRequest
from flwr.proto.node_pb2 import Node

from potluck.flower.deploy import serving
from potluck.flower.deploy.certificates import as_pem, certificate_of_holder
from potluck.flower.deploy.gate import Gate, reason_in
from potluck.flower.deploy.keys import (
    add_node,
    add_observer,
    certify,
    change_authority,
    renew_authority,
    renew_node,
    renew_server,
    revoke_node,
)
from potluck.flower.deploy.limits import LOG_LINES, Pace, Reports
from potluck.flower.deploy.processes import free_port
from potluck.flower.deploy.registry import present_and_former
from potluck.flower.deploy.requests import LONGEST_ANNOUNCEMENT, LONGEST_PART, LONGEST_REQUEST
from potluck.flower.deploy.superlink import FlowerError
from potluck.flower.deploy.tls import side_of_node
from potluck.flower.node.join import Credentials, Refused, Unreachable, probe, question
from potluck.locks import locked

REFUSED = {"code": 0, "detail": "only requests of nodes pass here"}
NUMBER = 7
PULL = "/v1/fleet/pull-messages"


class Inside(BaseHTTPRequestHandler):
    """Stands for the SuperLink: gives every node the same number, and answers with the status that it is told.

    Attributes of its server: `says`, by path, are answers that it gives once.
    """

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.seen.append((self.path, dict(self.headers), body))
        self.send_response(self.server.status)
        content = self.server.says.pop(self.path, ActivateNodeResponse(node_id=NUMBER)).SerializeToString()
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *arguments):
        pass


@pytest.fixture
def keys(tmp_path):
    certify(tmp_path, [], days=365)
    add_node(tmp_path, "a")
    return tmp_path


class Gated:
    """A gate before a stand-in: its address, what the stand-in saw, what the gate told."""

    def __init__(self, server, address, keys, told, sightings):
        self.sightings = sightings
        self.server = server
        self.seen = server.seen
        self.address = address
        self.keys = keys
        self.told = told

    def ask(self, path, content=b"", headers=None, method="POST"):
        """One request whose path goes out as it is written: its status and what came back."""
        with closing(self.connected()) as connection:
            connection.request(method, path, body=content, headers=headers or {})
            reply = connection.getresponse()
            return reply.status, reply.read()

    def connected(self):
        if self.keys is None:
            return HTTPConnection(self.address, timeout=10)
        trust = ssl.create_default_context(cafile=str(self.keys / "ca.crt"))
        return HTTPSConnection(self.address, timeout=10, context=trust)

    def why(self, *words, **options):
        status, content = self.ask(*words, **options)
        return status, json.loads(content)["detail"]

    def activate(self, key):
        """Have a node come, so that the gate knows its number."""
        asked = ActivateNodeRequest(public_key=pem_of(key), heartbeat_interval=30.0)
        status, _ = self.ask("/v1/fleet/activate-node", asked.SerializeToString(), signed(key))
        assert status == 200
        self.seen.clear()


@contextmanager
def opened(keys, *, mutual=False):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Inside)
    server.seen, server.status, server.says, told = [], 200, {}, []
    if keys is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "server.crt", keys / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)  # how often it looks for its end
    thread.start()
    port = free_port()
    try:
        trust = None if keys is None else keys / "ca.crt"
        inside = f"127.0.0.1:{server.server_port}"
        with Gate(("127.0.0.1", port), inside, keys, told.append, trust, mutual=mutual) as gate:
            yield Gated(server, f"127.0.0.1:{port}", keys, told, gate.sightings)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def key_of(keys, name="a"):
    """A node's secret key."""
    return load_ssh_private_key((keys / "nodes" / name / "node.key").read_bytes(), None)


def pem_of(key):
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def signed(key, at=None):
    """The headers of a node's request, as Flower's program makes them."""
    at = (at or datetime.now(UTC)).isoformat()
    signature = key.sign(at.encode(), ec.ECDSA(hashes.SHA256()))
    return {**shown(key), "flwr-timestamp": at, "flwr-signature": b64encode(signature).decode()}


def shown(key):
    return {"flwr-public-key": b64encode(pem_of(key)).decode()}


def polling(number=NUMBER):
    return PullMessagesRequest(node=Node(node_id=number)).SerializeToString()


def test_a_nodes_request_passes_and_none_of_its_headers_but_the_proof(keys):
    key = key_of(keys)
    words = {
        "x-forwarded-for": "forged",
        "user-agent": "forged",
        "content-type": "forged",
        "flwr-package-name": "forged",
    }
    with opened(keys) as gate:
        gate.activate(key)
        status, content = gate.ask(f"{PULL}", polling(), {**signed(key), **words})
        assert (status, ActivateNodeResponse.FromString(content).node_id) == (200, NUMBER)
        ((path, headers, body),) = gate.seen
        assert (path, body) == (PULL, polling())
        assert shown(key).items() <= {name.lower(): value for name, value in headers.items()}.items()
        assert "forged" not in str(headers)
        assert gate.told == []


def test_a_message_that_may_be_lost_is_given_again_without_the_superlink(keys):
    key, name = key_of(keys), f"{1:064x}"
    message = Message(metadata=Metadata(run_id=1, message_id=name, dst_node_id=NUMBER))
    given = PullMessagesResponse(messages_list=[message], message_object_trees=[ObjectTree(object_id=name)])
    fetching = PullObjectRequest(node=Node(node_id=NUMBER), run_id=1, object_id=name)
    with opened(keys) as gate:
        gate.activate(key)
        gate.server.says[PULL] = given
        for _ in range(3):
            status, content = gate.ask(PULL, polling(), signed(key))
            assert (status, PullMessagesResponse.FromString(content)) == (200, given)
        assert [path for path, _, _ in gate.seen] == [PULL]
        assert gate.ask("/v1/fleet/pull-object", fetching.SerializeToString(), signed(key))[0] == 200
        assert gate.ask(PULL, polling(), signed(key))[1] != content
        assert [path for path, _, _ in gate.seen] == [PULL, "/v1/fleet/pull-object", PULL]
        assert gate.sightings.look()["a"].bytes_down > 3 * len(content)


def test_the_gate_notes_who_spoke_and_what_was_refused_by_registered_name(keys):
    before = time.time()
    with opened(keys) as gate:
        assert gate.sightings.look() == {}
        gate.ask(PULL, polling(), shown(key_of(keys)))  # it does not prove who it is
        assert gate.sightings.look() == {}
        gate.activate(key_of(keys))
        assert gate.ask(PULL, polling(), signed(key_of(keys)))[0] == 200
        (found,) = gate.sightings.look().values()
        assert gate.sightings.look().keys() == {"a"}
        assert (found.host, found.refused, found.work, found.left) == ("127.0.0.1", 0, None, False)
        assert before <= found.last <= time.time()
        assert found.bytes_up > len(polling())
        assert found.bytes_down > 0
        gate.ask(PULL, polling(NUMBER + 1), signed(key_of(keys)))
        found = gate.sightings.look()["a"]
        assert (found.refused, found.why) == (1, "its number is not its key's")


def test_without_keys_a_node_is_noted_by_its_number(keys):
    with opened(None) as gate:
        gate.activate(key_of(keys))
        assert gate.sightings.look().keys() == {str(NUMBER)}


def test_a_field_that_flower_does_not_have_does_not_pass(keys):
    with opened(keys) as gate:
        gate.activate(key_of(keys))
        assert gate.ask(PULL, polling() + b"\xfa\x3e\x05words", signed(key_of(keys)))[0] == 200
        assert [body for _, _, body in gate.seen] == [polling()]
        assert gate.why(PULL, b"\xff\xff", signed(key_of(keys))) == (400, "its request cannot be read")


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("push-object", LONGEST_PART),
        ("push-messages", LONGEST_ANNOUNCEMENT),
        ("pull-messages", LONGEST_REQUEST),
        ("get-fab", LONGEST_REQUEST),
    ],
)
def test_a_request_longer_than_any_of_flowers_is_cut_off(keys, name, longest):
    with opened(keys) as gate:
        found = gate.why(f"/v1/fleet/{name}", b"x" * (longest + 1), signed(key_of(keys)))
        assert found == (413, f"it is longer than {longest} bytes")
        assert gate.seen == []
        assert gate.told == [f"refused a request of node a at 127.0.0.1: it is longer than {longest} bytes"]


def test_a_request_that_does_not_say_how_long_it_is_is_counted(keys):
    parts = (b"x" * 2**16 for _ in range(LONGEST_ANNOUNCEMENT // 2**16 + 1))
    with opened(keys) as gate:
        assert gate.why("/v1/fleet/push-messages", parts, signed(key_of(keys)))[0] == 413
        assert gate.seen == []


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
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
        "/v1/fleet/pull-messages?forged=line",
        "/docs",
        "/",
    ],
)
def test_what_is_not_for_nodes_does_not_pass(keys, path):
    with opened(keys) as gate:
        status, content = gate.ask(path, headers=signed(key_of(keys)))
        assert gate.seen == []
        assert (status, json.loads(content)) == (404, REFUSED)
        assert gate.told == [f"refused 127.0.0.1: POST {path} is not for nodes"]


def test_other_methods_do_not_pass(keys):
    with opened(keys) as gate:
        assert gate.ask(PULL, headers=signed(key_of(keys)), method="GET")[0] == 404
        assert gate.seen == []


def test_a_stranger_is_refused_and_both_sides_hear_why(keys):
    with opened(keys) as gate:
        for headers in ({}, signed(ec.generate_private_key(ec.SECP384R1()))):
            assert gate.why(PULL, headers=headers) == (403, "its key is not registered")
        assert gate.seen == []
        assert gate.told == ["refused 127.0.0.1: its key is not registered"]


def test_a_registered_public_key_opens_nothing(keys):
    key, other = key_of(keys), ec.generate_private_key(ec.SECP384R1())
    old, early = (datetime.now(UTC) + timedelta(seconds=seconds) for seconds in (-400, 120))
    attempts = {
        "it does not sign its requests": shown(key),
        "its signature is not its key's": {**signed(other), **shown(key)},
        r"its clock is 4\d\d s behind the server's": signed(key, old),
        r"its clock is \d+ s ahead of the server's": signed(key, early),
    }
    with opened(keys) as gate:
        gate.activate(key)
        for reason, headers in attempts.items():
            status, why = gate.why(PULL, polling(), headers)
            assert (status, gate.told[-1]) == (401, f"refused 127.0.0.1: {why}")
            assert re.fullmatch(reason, why)
        assert gate.seen == []


def test_what_is_not_signed_is_refused_before_it_has_been_read(keys):
    with opened(None) as gate, closing(gate.connected()) as connection:
        connection.putrequest("POST", "/v1/fleet/push-object")
        connection.putheader("content-length", str(LONGEST_PART))
        for name, value in shown(key_of(keys)).items():
            connection.putheader(name, value)
        connection.endheaders(b"x")
        assert connection.getresponse().status == 401


def test_a_node_does_not_speak_with_anothers_number(keys):
    with opened(keys) as gate:
        assert gate.why(PULL, polling(), signed(key_of(keys))) == (401, "its number is not its key's")
        gate.activate(key_of(keys))
        assert gate.ask(PULL, polling(), signed(key_of(keys)))[0] == 200
        assert gate.why(PULL, polling(NUMBER + 1), signed(key_of(keys)))[0] == 401
        assert len(gate.seen) == 1


def test_a_node_that_is_added_or_revoked_counts_at_once(keys):
    with opened(keys) as gate:
        add_node(keys, "b")
        key = key_of(keys, "b")
        gate.activate(key)
        assert gate.ask(PULL, polling(), signed(key))[0] == 200
        revoke_node(keys, "b")
        assert gate.ask(PULL, polling(), signed(key))[0] == 403


def test_a_node_hears_that_it_is_revoked(keys):
    with opened(keys) as gate:
        place = add_node(keys, "b")
        probe(Credentials(gate.address, place))
        (keys / "registered" / "b.pub").unlink()
        with pytest.raises(Refused, match="refuses this node: its key is not registered"):
            probe(Credentials(gate.address, place))
        assert gate.told == ["refused 127.0.0.1: its key is not registered"]


def test_plain_text_is_refused_and_both_sides_hear_why(keys):
    with opened(keys) as gate:
        with pytest.raises(Refused, match="hung up on plain text; it expects encryption"):
            probe(Credentials(gate.address, None))
        deadline = time.monotonic() + 5
        while not gate.told and time.monotonic() < deadline:
            time.sleep(0.01)
        assert gate.told == ["refused a caller: it does not encrypt (no TLS)"]
        assert gate.seen == []


def test_a_node_does_not_talk_to_another_server(keys, tmp_path):
    certify(tmp_path / "other", [], days=1)
    with opened(keys) as gate, pytest.raises(Refused, match="certificate is not one of ours"):
        probe(Credentials(gate.address, add_node(tmp_path / "other", "a")))


def test_a_node_with_keys_does_not_talk_in_plain_text(keys):
    with opened(None) as gate, pytest.raises(Refused, match="does not encrypt"):
        probe(Credentials(gate.address, keys / "nodes" / "a"))


def test_those_who_fit_hear_nothing(keys):
    for trust, place in ((keys, keys / "nodes" / "a"), (None, None)):
        with opened(trust) as gate:
            probe(Credentials(gate.address, place))
            assert gate.told == []


def test_nobody_there_is_said():
    with pytest.raises(Unreachable, match="nobody answers"):
        probe(Credentials(f"127.0.0.1:{free_port()}", None))


def test_an_error_of_the_superlink_reaches_the_node(keys):
    asked = ActivateNodeRequest(public_key=pem_of(key_of(keys)), heartbeat_interval=30.0).SerializeToString()
    with opened(keys) as gate:
        gate.server.status = 412
        assert gate.ask("/v1/fleet/activate-node", asked, signed(key_of(keys)))[0] == 412
        assert gate.told == ["node a at 127.0.0.1 has to wait until its previous connection counts as gone"]


def test_a_superlink_that_is_gone_is_no_error_of_the_gates(keys):
    key = key_of(keys)
    asked = ActivateNodeRequest(public_key=pem_of(key), heartbeat_interval=30.0).SerializeToString()
    connection = HTTPConnection("127.0.0.1", port := free_port(), timeout=10)
    with Gate(("127.0.0.1", port), f"127.0.0.1:{free_port()}", None, print), closing(connection):
        connection.request("POST", "/v1/fleet/activate-node", asked, signed(key))
        assert connection.getresponse().status == 503


def test_a_port_that_is_taken_is_said():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        gate = Gate(("127.0.0.1", other.getsockname()[1]), "127.0.0.1:1", None, lambda line: None)
        with pytest.raises(FlowerError, match="is the port taken"):
            gate.__enter__()


def test_what_is_not_protected_without_keys_anybody_is_a_node():
    with opened(None) as gate:
        gate.activate(key := ec.generate_private_key(ec.SECP384R1()))
        assert gate.ask(PULL, polling(), signed(key))[0] == 200
        assert gate.ask("/v1/control/start-run", headers=signed(key))[0] == 404


def test_what_is_not_protected_the_gate_answers_everybody(keys):
    with opened(keys) as gate:
        assert [gate.ask(PULL)[0] for _ in range(30)] == [403] * 30
        assert gate.seen == []


def trickling(gate, headers):
    """A connection on which a request's header has gone out, and one byte of its body."""
    connection = gate.connected()
    connection.putrequest("POST", PULL)
    for name, value in {**headers, "content-length": "20"}.items():
        connection.putheader(name, value)
    connection.endheaders(b"x")
    return connection


@pytest.mark.parametrize("proof", [signed, shown, lambda key: {}], ids=["signed", "shown", "none"])
def test_callers_who_never_finish_do_not_hold_up_an_honest_node(keys, proof):
    """One node, or a stranger who knows its public key, opens more connections than a client has for itself."""
    evil, honest = key_of(keys), ec.generate_private_key(ec.SECP384R1())
    with opened(None) as gate, ExitStack() as stack:
        gate.activate(honest)
        for _ in range(120):
            stack.enter_context(closing(trickling(gate, proof(evil))))
        start = time.monotonic()
        assert gate.ask(PULL, polling(), signed(honest))[0] == 200
        assert time.monotonic() - start < 3.0
        assert len(gate.seen) == 1


def test_callers_who_say_nothing_make_room_for_those_who_do(keys):
    host = "127.0.0.1"
    with opened(None) as gate, ExitStack() as stack:
        gate.activate(key_of(keys))
        port = int(gate.address.partition(":")[2])
        silent = [stack.enter_context(socket.create_connection((host, port))) for _ in range(2 * serving.WAITING)]
        assert gate.ask(PULL, polling(), signed(key_of(keys)))[0] == 200
        silent[0].settimeout(5.0)
        assert silent[0].recv(1) == b""


def test_a_caller_has_an_end_whatever_it_draws_out(keys, monkeypatch):
    """Its handshake, its header, its body, its next request."""
    monkeypatch.setattr(serving, "PROVEN_WITHIN", 0.3)
    monkeypatch.setattr(serving, "_GRACE", 0.3)
    with opened(keys) as gate, ExitStack() as stack:
        silent = socket.create_connection(("127.0.0.1", int(gate.address.partition(":")[2])))
        nameless = gate.connected()
        nameless.connect()
        unfinished = trickling(gate, signed(key_of(keys)))
        for line in (silent, nameless.sock, unfinished.sock):
            stack.enter_context(closing(line))
            line.settimeout(5.0)
            assert ended(line)


def ended(line):
    """Whether the other side has hung up."""
    try:
        return line.recv(1) == b""
    except (ConnectionError, ssl.SSLEOFError):
        return True


def test_a_key_has_so_many_connections_and_one_that_is_left_is_free_again(keys):
    key = key_of(keys)
    with opened(None) as gate, ExitStack() as stack:
        gate.activate(key)
        held = [stack.enter_context(closing(trickling(gate, signed(key)))) for _ in range(serving.CONNECTIONS_OF_ONE)]
        assert gate.why(PULL, polling(), signed(key)) == (503, "too many connections with this key")
        held[0].close()
        deadline = time.monotonic() + 5.0
        while gate.ask(PULL, polling(), signed(key))[0] != 200:
            assert time.monotonic() < deadline


def test_a_stranger_does_not_flood_the_operators_console(keys):
    """Every line differs, and there are more than anybody reads."""
    with opened(None) as gate:
        for number in range(10 * LOG_LINES):
            gate.ask(f"/v1/fleet/{number}")
        assert len(gate.told) == LOG_LINES


def test_reports_are_counted_when_they_are_too_many_and_told_again_after_a_while():
    told = []
    reports = Reports(told.append, "strangers")
    for number in range(LOG_LINES + 5):
        reports(f"line {number}")
        reports("line 0")
    assert told == [f"line {number}" for number in range(LOG_LINES)]
    reports.turn()
    assert told[LOG_LINES:] == ["and 5 more refusals of strangers"]
    reports("line 0")
    reports.turn()
    assert told[LOG_LINES + 1 :] == ["line 0"]


def test_a_node_that_asks_too_often_waits(monkeypatch):
    import asyncio

    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)

    async def ask(times):
        pace = Pace(rate=10.0, burst=3.0)
        for _ in range(times):
            await pace.wait()

    asyncio.run(ask(5))
    assert slept == pytest.approx([0.1, 0.2])


LOUD = b'{"detail": "\\u001b[2Jno\\n2026 INFO all is well"}'


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"[" * 100_000, LOUD])
def test_a_reason_is_one_line_whoever_gives_it(body):
    assert reason_in(body).isprintable()


def passes(gate, key):
    """Whether a signed request of a node passes."""
    asked = ActivateNodeRequest(public_key=pem_of(key), heartbeat_interval=30.0).SerializeToString()
    return gate.ask("/v1/fleet/activate-node", asked, signed(key))[0] == 200


@pytest.mark.parametrize("is_written", [True, False])
def test_a_renewed_node_may_come_with_its_former_key_until_it_has_come_with_the_new_one(keys, is_written):
    former = key_of(keys)
    with opened(keys) as gate, ExitStack() as stack:
        renew_node(keys, "a", overlap=30)
        new = key_of(keys)
        assert passes(gate, former)
        probe(Credentials(gate.address, keys / "nodes" / "a"))  # whoever knows the new public key can ask this
        assert passes(gate, former)
        if not is_written:  # as where the server may only read the folder
            stack.enter_context(locked(keys / ".lock", 0.0, "held"))
        assert passes(gate, new)
        status, why = gate.why(PULL, polling(), signed(former))
        assert status == 403
        assert why.startswith(
            "its key, of node a, has a successor and counts no more; copy nodes/a of the server's keys"
        )
        assert passes(gate, new)
        now = datetime.now(UTC)
        assert sum(key.counts(now) for key in present_and_former(keys)) == 2 - is_written


def test_a_former_key_counts_no_more_when_its_time_is_over(keys):
    former = key_of(keys)
    with opened(keys) as gate:
        renew_node(keys, "a", overlap=0)
        assert not passes(gate, former)
        assert passes(gate, key_of(keys))


def test_a_revoked_node_is_told_since_when_and_the_operator_which_it_is(keys):
    with opened(keys) as gate:
        place = add_node(keys, "b")
        copy = shutil.copytree(place, keys / "copy")
        revoke_node(keys, "b")
        since = r"its key, of node b, was revoked on \d{4}-\d\d-\d\d at \d\d:\d\d UTC"
        with pytest.raises(Refused, match=rf"refuses this node: {since}\Z"):
            probe(Credentials(gate.address, copy))
        (line,) = gate.told
        assert re.fullmatch(rf"refused 127\.0\.0\.1: {since}", line)


def test_a_node_hears_what_its_owner_should_know(tmp_path, looks_often):
    keys = tmp_path / "keys"
    certify(keys, [], days=20)
    for name in ("a", "b"):
        add_node(keys, name)
    copy = shutil.copytree(keys / "nodes" / "a", tmp_path / "a")
    with opened(keys) as gate:
        renew_node(keys, "a", overlap=9)
        change_authority(keys, days=20, overlap=9)
        until(lambda: any("nodes are shown the new" in line for line in gate.told))
        key, authority, server = question(Credentials(gate.address, copy))()
        assert re.match(r"this node's key has a successor, and counts until \d{4}-\d\d-\d\d: copy nodes/a of the", key)
        assert re.match(r"the server has another ca.crt than this node: copy the server's over it; a former", authority)
        assert server.startswith("the server's certificate expires on ")
        assert question(Credentials(gate.address, keys / "nodes" / "b"))() == [server]
        told = [line for line in gate.told if line.startswith("node ")]
        assert [line.partition(";")[0] for line in told] == [
            "node a has another ca.crt than the server",
            "node b says that it has the new ca.crt",
        ]


@pytest.mark.parametrize("said", ["x" * 64, "0" * 64, "\x1b[2J", "é"])
def test_what_a_caller_says_that_it_trusts_is_never_repeated(keys, said):
    with opened(keys) as gate:
        headers = {**shown(key_of(keys)), "potluck-trust": said.encode("latin-1")}
        status, body = gate.ask("/health", headers=headers, method="GET")
        assert status in (200, 400)
        assert said not in body.decode() + "".join(gate.told)


@pytest.fixture
def looks_often(monkeypatch):
    monkeypatch.setattr("potluck.flower.deploy.gate._LOOK_EVERY", 0.02)


def until(holds, seconds=20):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def certificate_of(gate):
    """The certificate that a gate shows to a new caller."""
    connection = gate.connected()
    with closing(connection):
        connection.connect()
        return connection.sock.getpeercert()["serialNumber"]


def test_a_gate_shows_a_renewed_certificate_without_a_stop(keys, looks_often):
    with opened(keys) as gate:
        before, line = certificate_of(gate), gate.connected()
        with closing(line):
            line.connect()
            end = renew_server(keys, days=365)
            until(lambda: certificate_of(gate) != before)
            line.request("GET", "/health", headers=shown(key_of(keys)))  # a connection of before goes on
            assert line.getresponse().status == 200
        probe(Credentials(gate.address, keys / "nodes" / "a"))
        assert passes(gate, key_of(keys))  # and the SuperLink is still known by what it has shown at its start
        assert gate.told == [f"nodes are shown the new {keys / 'server.crt'}, which expires on {end:%Y-%m-%d}"]


def test_a_gate_goes_on_with_its_certificate_if_the_new_one_cannot_be_used(keys, looks_often):
    with opened(keys) as gate:
        before = certificate_of(gate)
        (keys / "server.crt").write_text("none")
        until(lambda: any(f"the new {keys / 'server.crt'} cannot be used" in line for line in gate.told))
        assert certificate_of(gate) == before
        certify(keys, [], days=365)  # as an operator mends it
        until(lambda: certificate_of(gate) != before)


def test_nodes_with_the_former_and_the_new_authority_pass_a_gate_that_was_open_all_the_time(keys, looks_often):
    former = shutil.copytree(keys / "nodes" / "a", keys / "copy")
    with opened(keys) as gate:
        change_authority(keys, days=365, overlap=30)
        until(lambda: any("nodes are shown the new" in line for line in gate.told))
        for place in (former, keys / "nodes" / "a"):
            probe(Credentials(gate.address, place))
            assert passes(gate, key_of(keys))


def test_a_gate_warns_its_operator_of_what_ends_and_of_what_is_damaged(tmp_path, days_ago, looks_often):
    with days_ago(2):
        certify(tmp_path, [], days=1)
        add_node(tmp_path, "a")
    told = []
    with Gate(("127.0.0.1", free_port()), "127.0.0.1:1", tmp_path, told.append):
        until(lambda: told)
    assert told[0].startswith(f"warning: {tmp_path / 'server.crt'} expired on ")
    certify(tmp_path, [], days=365)
    (tmp_path / "registered" / "b.pub").write_text("none")
    told.clear()
    with Gate(("127.0.0.1", free_port()), "127.0.0.1:1", tmp_path, told.append):
        until(lambda: told)
    assert told[0].startswith(f"warning: {tmp_path / 'registered' / 'b.pub'} holds no public key")


SOON = datetime.now(UTC) + timedelta(days=3)
NOT_OURS = "its certificate is not one of these keys, or no more"
CALL = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def heard(gate, context, call=CALL):
    """What a caller with its side of TLS hears until it has heard a whole answer, or is cut off."""
    said, port = b"", int(gate.address.rpartition(":")[2])
    with (
        suppress(OSError),  # as errors of TLS are
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as line,
    ):
        line.sendall(call)
        while not said.endswith(b"}") and (part := line.recv(4096)):
            said += part
    return said


def showing(trust, certificate, key):
    """The side of a caller who shows a certificate."""
    context = ssl.create_default_context(cafile=str(trust))
    context.load_cert_chain(certificate, key)
    return context


def unlocked(place, to):
    """A node's secret key, as whoever has stolen it would have it for a program of his own."""
    key = load_ssh_private_key((place / "node.key").read_bytes(), None)
    to.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return to


def test_where_certificates_are_asked_for_a_node_passes_by_its_own(keys):
    with opened(keys, mutual=True) as gate:
        assert question(Credentials(gate.address, keys / "nodes" / "a"))() == []
        with closing(HTTPSConnection(gate.address, timeout=10, context=side_of_node(keys / "nodes" / "a"))) as line:
            asked = ActivateNodeRequest(public_key=pem_of(key_of(keys)), heartbeat_interval=30.0).SerializeToString()
            line.request("POST", "/v1/fleet/activate-node", body=asked, headers=signed(key_of(keys)))
            assert line.getresponse().status == 200
            assert line.sock.version() == "TLSv1.3"  # in which the name in a certificate is encrypted, too
        assert gate.told == []


def test_where_certificates_are_asked_for_nothing_is_read_of_a_stranger(keys, tmp_path, days_ago):
    strangers, place = tmp_path / "strangers", keys / "nodes" / "a"
    certify(strangers, [], days=9)
    add_node(strangers, "a")
    own = unlocked(place, tmp_path / "own.pem")
    with days_ago(3):
        late = add_observer(keys, "late", days=1)
    itself = tmp_path / "itself.crt"
    secret = load_pem_private_key(own.read_bytes(), None)
    itself.write_bytes(as_pem([certificate_of_holder("a", secret.public_key(), secret, SOON)]))
    trust, other = keys / "ca.crt", unlocked(strangers / "nodes" / "a", tmp_path / "other.pem")
    with opened(keys, mutual=True) as gate:
        for context, why in (
            (ssl.create_default_context(cafile=str(trust)), "it shows no certificate, which is asked for here"),
            (showing(trust, strangers / "nodes" / "a" / "node.crt", other), f"{NOT_OURS} (unable to get "),
            (showing(trust, itself, own), f"{NOT_OURS} (unable to get "),  # of a registered key, by itself
            (showing(trust, keys / "server.crt", keys / "server.key"), f"{NOT_OURS} (unsuitable certificate purpose)"),
            (showing(trust, late / "observer.crt", late / "observer.key"), f"{NOT_OURS} (certificate has expired)"),
        ):
            assert heard(gate, context) == b""
            until(lambda why=why: any(line.startswith(f"refused a caller: {why}") for line in gate.told))
        older = ssl.create_default_context(cafile=str(trust))
        older.maximum_version = ssl.TLSVersion.TLSv1_2
        assert heard(gate, older) == b""
        assert gate.seen == []
        bare = shutil.copytree(place, tmp_path / "bare", ignore=shutil.ignore_patterns("node.crt"))
        with pytest.raises(Unreachable, match=r"it hangs up; if that goes on, .* --mutual-tls, and this node has no"):
            probe(Credentials(gate.address, bare))


@pytest.mark.parametrize("call", [CALL, b"", b"\xff" * 10**6])
def test_who_shows_a_certificate_of_a_key_that_counts_no_more_is_told_and_not_heard(keys, tmp_path, call):
    place, reading = add_node(keys, "b"), add_observer(keys, "board", days=9)
    shutil.copytree(place, tmp_path / "b")
    trust = keys / "ca.crt"
    revoked = showing(trust, tmp_path / "b" / "node.crt", unlocked(tmp_path / "b", tmp_path / "b.pem"))
    with opened(keys, mutual=True) as gate:
        revoke_node(keys, "b")
        assert b"its key, of node b, was revoked on " in heard(gate, revoked, call)
        observer = showing(trust, reading / "observer.crt", reading / "observer.key")
        assert b"its key is not registered" in heard(gate, observer, call)
        assert gate.seen == []
        with pytest.raises(Refused, match="refuses this node: its key, of node b, was revoked on"):
            probe(Credentials(gate.address, tmp_path / "b"))


def test_a_node_that_is_revoked_is_heard_no_more_on_the_connection_that_it_has(keys):
    key = key_of(keys)
    with (
        opened(keys, mutual=True) as gate,
        closing(HTTPSConnection(gate.address, timeout=10, context=side_of_node(keys / "nodes" / "a"))) as line,
    ):
        asked = ActivateNodeRequest(public_key=pem_of(key), heartbeat_interval=30.0).SerializeToString()
        line.request("POST", "/v1/fleet/activate-node", body=asked, headers=signed(key))
        assert line.getresponse().read()
        gate.seen.clear()
        revoke_node(keys, "a")
        line.request("POST", PULL, body=polling(), headers=signed(key))
        assert line.getresponse().status == 403
        assert gate.seen == []


def comes(gate, place):
    """Whether a node passes with the keys in its folder."""
    try:
        probe(Credentials(gate.address, place))
    except (Refused, Unreachable):
        return False
    return True


def test_certificates_of_a_former_authority_count_as_long_as_it_does(keys, tmp_path, looks_often):
    first = Path(shutil.copytree(keys / "nodes" / "a", tmp_path / "first"))
    with opened(keys, mutual=True) as gate:
        for _ in range(2):  # also of the one before the last one
            change_authority(keys, days=365, overlap=30)
            until(lambda: comes(gate, keys / "nodes" / "a"))
            probe(Credentials(gate.address, first))
        (first / "ca.crt").write_bytes((keys / "ca.crt").read_bytes())  # and nothing else of what belongs to it
        (fault,) = question(Credentials(gate.address, first))()
        assert "node.crt is of another authority than ca.crt" in fault
        change_authority(keys, days=365, overlap=0)
        until(lambda: comes(gate, keys / "nodes" / "a"))
        (first / "ca.crt").write_bytes((keys / "ca.crt").read_bytes())
        with pytest.raises(Unreachable, match=r"it hangs up; if that goes on, .* --mutual-tls, and does not take "):
            probe(Credentials(gate.address, first))


def test_a_renewed_authority_is_taken_up_and_both_its_certificates_count(keys, tmp_path, looks_often):
    former = Path(shutil.copytree(keys / "nodes" / "a", tmp_path / "former"))
    with opened(keys, mutual=True) as gate:
        renew_authority(keys)
        until(lambda: gate.told == [f"certificates of callers are checked by the new {keys / 'ca.crt'}"])
        probe(Credentials(gate.address, former))
        probe(Credentials(gate.address, keys / "nodes" / "a"))


def test_a_gate_that_asks_for_certificates_names_nodes_that_have_none(keys, looks_often):
    (keys / "ca.key").rename(keys / "elsewhere")
    add_node(keys, "b")
    with opened(keys, mutual=True) as gate:
        until(lambda: gate.told)
        assert gate.told[0].startswith("warning: node b has no certificate, and is not let in without; ")
    with opened(keys) as gate:
        assert question(Credentials(gate.address, keys / "nodes" / "b"))() == []  # who does not ask needs none
        assert gate.told == []
