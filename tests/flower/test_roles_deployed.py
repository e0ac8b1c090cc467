"""An observer, nodes with and without certificates, and a stranger, against a real server that asks for them."""

import shutil
import socket
import ssl
import time
from contextlib import closing, suppress
from http.client import HTTPSConnection

import pytest
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from prometheus_client.parser import text_string_to_metric_families

from potluck.flower.deploy.keys import add_observer
from potluck.flower.deploy.processes import free_port

from .deployed import numbers_apart, replied
from .test_keys_deployed import ROLES, VERSIONS, shown

pytestmark = pytest.mark.slow
WITH_CERTIFICATE = ("ca.crt", "node.crt", "node.key")


@pytest.fixture
def asking(deployment, days_ago):
    """A server that asks for certificates, a node that has one, and a page for observers."""
    deployment.keys("--node", "ward-1", "--node", "ward-2", "--observer", "board")
    with days_ago(3):
        add_observer(deployment.place / "keys", "late", days=1)
    deployment.page = f"127.0.0.1:{free_port()}"
    deployment.serve("run", "--observers", deployment.page, "--mutual-tls")
    deployment.hears("server", "nodes join by")
    deployment.carry("ward-1", *WITH_CERTIFICATE)
    deployment.join("ward-1")
    deployment.hears("ward-1", "^connected")
    return deployment


def test_who_may_do_what_against_real_programs(asking):
    """One test, so that there is one federation."""
    nothing_is_heard_of_a_stranger(asking)
    a_node_without_a_certificate_waits_for_one(asking)
    replied(asking)
    an_observer_reads_how_the_run_stands(asking)
    an_observer_does_not_take_part(asking)
    a_node_reads_no_page(asking)
    who_has_ended_reads_no_more(asking)
    an_observer_gets_another_key_and_is_revoked(asking)
    the_authority_is_another_and_a_node_comes_back_with_what_it_has(asking)
    a_revoked_node_is_told_and_has_no_other_answer(asking)
    assert asking.running["server"].poll() is None
    asking.keys()
    heard = asking.heard
    assert [line for line in shown(ROLES, VERSIONS) if numbers_apart(line) not in heard] == []


def side(place, word=None):
    """The side of TLS of who knows an authority, and shows the certificate in its folder if it has one."""
    context = ssl.create_default_context(cafile=str(place / "ca.crt"))
    if word is not None:
        context.load_cert_chain(place / f"{word}.crt", place / f"{word}.key")
    return context


def heard_at(address, context):
    """All that a caller hears."""
    host, _, port = address.rpartition(":")
    said = b""
    with (
        suppress(OSError),
        socket.create_connection((host, int(port)), 20) as plain,
        context.wrap_socket(plain, server_hostname=host) as line,
    ):
        line.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        while part := line.recv(4096):
            said += part
    return said


def read(deployment, context, path="/metrics", method="GET"):
    with closing(HTTPSConnection(deployment.page, timeout=30, context=context)) as connection:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def unlocked(place, to):
    """A folder with a node's certificate and its key in a form that any program reads."""
    to.mkdir(mode=0o700)
    key = load_ssh_private_key((place / "node.key").read_bytes(), None)
    (to / "node.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for file in ("ca.crt", "node.crt"):
        shutil.copy(place / file, to / file)
    return to


def nothing_is_heard_of_a_stranger(deployment):
    stranger = side(deployment.place / "ward-1")  # whose ca.crt is no secret
    assert heard_at(deployment.address, stranger) == b""
    deployment.hears("server", "^refused a caller: it shows no certificate, which is asked for here")
    assert heard_at(deployment.page, stranger) == b""
    deployment.hears("server", "^refused a caller at the observers' page: it shows no certificate")


def a_node_without_a_certificate_waits_for_one(deployment):
    deployment.carry("ward-2", "ca.crt", "node.key")
    deployment.join("ward-2")
    deployment.hears("ward-2", "it hangs up; .* --mutual-tls, and this node has no certificate to show")
    deployment.carry("ward-2", "node.crt")
    deployment.hears("ward-2", "^connected")


def an_observer_reads_how_the_run_stands(deployment):
    board = side(deployment.place / "keys/observers/board", "observer")
    status, numbers = read(deployment, board)
    assert status == 200
    states = {
        sample.labels["node"]: sample.labels["state"]
        for family in text_string_to_metric_families(numbers)
        if family.name == "potluck_node_state"
        for sample in family.samples
        if sample.value
    }
    assert states.keys() == {"ward-1", "ward-2"}
    assert set(states.values()) <= {"at work", "idle"}
    status, page = read(deployment, board, "/")
    assert status == 200
    assert "ward-2" in page
    assert "from 127.0.0.1" not in page
    assert str(deployment.place) not in page
    assert read(deployment, board, method="POST")[0] == 405


def an_observer_does_not_take_part(deployment):
    """With all that it has, as a node would."""
    place, taken = deployment.place / "keys/observers/board", deployment.place / "taken"
    taken.mkdir(mode=0o700)
    key = load_pem_private_key((place / "observer.key").read_bytes(), None)
    secret = taken / "node.key"
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    secret.chmod(0o600)
    shutil.copy(place / "ca.crt", taken / "ca.crt")
    shutil.copy(place / "observer.crt", taken / "node.crt")
    deployment.join("taken")
    assert deployment.running.pop("taken").wait(120) == 2
    deployment.hears("taken", f"^potluck: {deployment.address} refuses this node: its key is not registered")
    assert b"its key is not registered" in heard_at(deployment.address, side(place, "observer"))


def a_node_reads_no_page(deployment):
    node = side(unlocked(deployment.place / "ward-1", deployment.place / "own"), "node")
    assert read(deployment, node) == (403, "its key is not registered as an observer\n")


def who_has_ended_reads_no_more(deployment):
    late = side(deployment.place / "keys/observers/late", "observer")
    assert heard_at(deployment.page, late) == b""
    deployment.hears("server", r"its certificate is not one of these keys, or no more \(certificate has expired\)")


def an_observer_gets_another_key_and_is_revoked(deployment):
    place = deployment.place / "keys/observers/board"
    former = side(place, "observer")
    deployment.keys("--renew", "board")
    assert read(deployment, former)[0] == 200
    board = side(place, "observer")
    assert read(deployment, board)[0] == 200
    status, why = read(deployment, former)
    assert status == 403
    assert why.startswith("its key, of observer board, has a successor and counts no more")
    deployment.keys("--revoke", "board")
    deployment.hears("server", "^observer board may read no more")
    status, why = read(deployment, board)
    assert status == 403
    assert why.startswith("its key, of observer board, was revoked on ")


def the_authority_is_another_and_a_node_comes_back_with_what_it_has(deployment):
    since = len(deployment.lines("server"))
    deployment.keys("--change-authority")
    deployment.hears("server", "nodes are shown the new", since)
    assert deployment.end("ward-1") in (0, 130)
    before = len(deployment.lines("ward-1"))
    deployment.join("ward-1")  # it has a certificate of the former authority, and knows no other
    before = deployment.hears("ward-1", "^connected", before)
    replied(deployment)
    deployment.carry("ward-1", "ca.crt", "node.crt")
    before = deployment.hears("ward-1", "the keys are new; joining with them", before)
    deployment.hears("ward-1", "^connected", before)


def a_revoked_node_is_told_and_has_no_other_answer(deployment):
    stolen = side(unlocked(deployment.place / "ward-2", deployment.place / "stolen"), "node")
    before = len(deployment.lines("ward-2"))
    deployment.keys("--revoke", "ward-2")
    deployment.hears("server", "^node ward-2 is revoked")
    deployment.hears("ward-2", "refuses this node: its key, of node ward-2, was revoked on .*; trying again", before)
    deployment.hears("server", r"^refused 127\.0\.0\.1: its key, of node ward-2, was revoked on")
    deadline = time.monotonic() + 20
    while b"was revoked on" not in (answer := heard_at(deployment.address, stolen)):
        assert time.monotonic() < deadline, answer
        time.sleep(0.2)
    assert answer.startswith(b"HTTP/1.1 403 ")
