"""Observers read how a run stands over TLS, nobody else does, and nothing that they see tells of a node's data."""

import socket
import ssl
import time
from contextlib import closing, contextmanager, suppress
from http.client import HTTPSConnection

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_ssh_private_key

from potluck.cli.status import observers
from potluck.cli.status.account import Account
from potluck.cli.status.metrics import metrics_of
from potluck.cli.status.observers import Observers, for_observers
from potluck.cli.status.overview import FailedReply, NodeStanding, Overview
from potluck.cli.status.page import page_of
from potluck.cli.status.serving import StatusPage
from potluck.core.ground.errors import ConfigError
from potluck.experiment.watching.observers import RunStart
from potluck.flower.deploy.keys import add_node, add_observer, certify, renew_observer, revoke_node, revoke_observer
from potluck.flower.deploy.processes import free_port
from potluck.flower.deploy.sightings import Sighting
from potluck.records import ACCURACY, Progress, RoundRecord

NOW = 2e9
PATHS = ("/", "/metrics", "/healthz")
TOLD = "a-word-of-a-node"
HOST = "192.0.2.77"


@pytest.fixture
def keys(tmp_path):
    certify(tmp_path / "keys", [], days=365)
    add_node(tmp_path / "keys", "a")
    add_observer(tmp_path / "keys", "board", days=9)
    return tmp_path / "keys"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(observers, "_LOOK_EVERY", 0.02)


class Reading:
    """A page for observers, and what was said of it."""

    def __init__(self, port, said):
        self.port, self.said = port, said

    def ask(self, context, path="/metrics", method="GET"):
        with closing(HTTPSConnection("127.0.0.1", self.port, timeout=10, context=context)) as connection:
            connection.request(method, path)
            reply = connection.getresponse()
            return reply.status, reply.read()

    def heard(self, context):
        """What a caller hears that sends nothing but a line."""
        said = b""
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as line,
        ):
            line.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
            while part := line.recv(4096):
                said += part
        return said

    def says(self, words):
        """Wait for a line."""
        deadline = time.monotonic() + 20
        while not any(words in line for line in self.said):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)


@contextmanager
def opened(keys):
    said, port, account = [], free_port(), Account(keys)
    account.begin(RunStart("fedavg", 9, 0, 3, 3, ACCURACY), None)
    with StatusPage(("127.0.0.1", port), account, Observers(keys, said.append)):
        yield Reading(port, said)


def side_of(place, word="observer"):
    """An observer's side of TLS, with the files of its folder."""
    context = ssl.create_default_context(cafile=str(place / "ca.crt"))
    context.load_cert_chain(place / f"{word}.crt", place / f"{word}.key")
    return context


def test_an_observer_reads_and_can_do_nothing_else(keys):
    board = side_of(keys / "observers" / "board")
    with opened(keys) as page:
        status, body = page.ask(board)
        assert (status, b"potluck_rounds 9.0\n" in body) == (200, True)
        assert b"fedavg: round 0 of 9" in page.ask(board, "/")[1]
        assert page.ask(board, "/healthz") == (200, b"ok\n")
        for path in PATHS:
            for method in ("POST", "PUT", "DELETE"):
                assert page.ask(board, path, method)[0] == 405
        assert page.said == ["observer board may read"]


def test_nobody_else_reads(keys, tmp_path):
    strangers, place = tmp_path / "strangers", keys / "nodes" / "a"
    certify(strangers, [], days=9)
    other = add_observer(strangers, "board", days=9)
    (other / "ca.crt").write_bytes((keys / "ca.crt").read_bytes())
    secret = load_ssh_private_key((place / "node.key").read_bytes(), None)
    (tmp_path / "node").mkdir()
    for name, content in (
        ("ca.crt", (keys / "ca.crt").read_bytes()),
        ("node.crt", (place / "node.crt").read_bytes()),
        ("node.key", secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())),
    ):
        (tmp_path / "node" / name).write_bytes(content)
    with opened(keys) as page:
        assert page.heard(ssl.create_default_context(cafile=str(keys / "ca.crt"))) == b""
        page.says("refused a caller at the observers' page: it shows no certificate, which is asked for here")
        assert page.heard(side_of(other)) == b""
        page.says("refused a caller at the observers' page: its certificate is not one of these keys, or no more")
        why = "its key is not registered as an observer"
        assert page.ask(side_of(tmp_path / "node", "node")) == (403, f"{why}\n".encode())
        page.says(f"refused 127.0.0.1 at the observers' page: {why}")
        revoke_node(keys, "a")
        assert page.ask(side_of(tmp_path / "node", "node"))[0] == 403
        with suppress(OSError), socket.create_connection(("127.0.0.1", page.port), 10) as plain:
            plain.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"potluck" not in plain.recv(4096)
        assert page.ask(side_of(keys / "observers" / "board"))[0] == 200


def test_an_observer_is_added_renewed_and_revoked_while_the_page_is_open(keys):
    with opened(keys) as page:
        former = side_of(keys / "observers" / "board")
        place = add_observer(keys, "site-b", days=9)
        page.says("observer site-b may read")
        assert page.ask(side_of(place))[0] == 200
        renew_observer(keys, "board", overlap=9, days=9)
        assert page.ask(former)[0] == 200
        assert page.ask(side_of(keys / "observers" / "board"))[0] == 200
        status, why = page.ask(former)
        assert status == 403
        assert why.startswith(
            b"its key, of observer board, has a successor and counts no more; copy observers/board of"
        )
        site = side_of(place)
        revoke_observer(keys, "site-b")
        page.says("observer site-b may read no more")
        status, why = page.ask(site)
        assert status == 403
        assert why.startswith(b"its key, of observer site-b, was revoked on ")
        assert page.ask(side_of(keys / "observers" / "board"))[0] == 200


def test_an_observer_whose_certificate_has_ended_reads_no_more(keys, days_ago):
    with days_ago(3):
        late = add_observer(keys, "late", days=1)
    with opened(keys) as page:
        assert page.heard(side_of(late)) == b""
        page.says("its certificate is not one of these keys, or no more (certificate has expired)")


def test_a_port_that_is_taken_is_named_by_its_option(keys):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        page = StatusPage(("127.0.0.1", port), Account(keys), Observers(keys, print))
        with pytest.raises(ConfigError, match=rf"--observers 127\.0\.0\.1:{port}: cannot listen there"), page:
            pass


def overview():
    """An overview in which all that comes from nodes, and tells of their data, can be found again."""
    record = dict.fromkeys(RoundRecord.__dataclass_fields__)
    sent = {"bytes_down": 7_700_000, "bytes_up": 7_700_000, "bytes_evaluation": 7_700_000, "bytes_down_by_entry": {}}
    told = {"cohort": [0], "replied": [], "failed": {"0": TOLD}, "lost": TOLD, "loss_local": 0.77, **sent}
    metrics = {"personal": {"accuracy": 0.77}}
    sighting = Sighting(HOST, NOW - 3, refused=2, why=TOLD, bytes_down=7_700_000, bytes_up=7_700_000)
    return Overview(
        at=NOW,
        name="first",
        progress=Progress("fedavg", "training", 3, 9, 1, 2, 2.5, 0.77, "accuracy 77.0 %", 7_700_000, 72.0),
        began=NOW - 100,
        round_since=NOW - 65,
        done=2,
        lost=1,
        bytes_down=7_700_000,
        bytes_up=7_700_000,
        bytes_evaluation=7_700_000,
        nodes=(
            NodeStanding("ward-1", 0, "at work", "works on round 3", NOW - 9, sighting, failed=1, why=TOLD),
            NodeStanding("ward-2", None, "takes no part", TOLD, None, sighting),
            NodeStanding("ward-3", 2, "never seen", "has not come since this server began"),
        ),
        failures=(FailedReply(2, "ward-1", TOLD, False),),
        finished=(RoundRecord(**{**record, **told, "round": 2, "metrics": metrics}),),
        said=((NOW - 5, TOLD),),
    )


TELLING = (TOLD, HOST, "0.77", "77.0", "7.7 MB", "7.7e+06")


def test_an_observer_is_shown_nothing_that_tells_of_a_nodes_data():
    whole = (page_of(overview()) + metrics_of(overview())).decode()
    assert [word for word in TELLING if word not in whole] == []  # so it could be found
    part = for_observers(overview())
    shown = (page_of(part) + metrics_of(part)).decode()
    assert [word for word in TELLING if word in shown] == []
    for word in ("fedavg", "ward-1", "ward-2", "ward-3", "works on round 3", "takes no part", "2 requests refused"):
        assert word in shown, word
    assert 'potluck_replies_failed_total{node="ward-1"} 1.0' in shown
    assert "potluck_rounds_lost_total 1.0" in shown


def test_an_overview_for_observers_holds_what_is_shown_and_no_more():
    """Whatever another page would show of it."""
    assert not [word for word in (*TELLING, "7700000") if word in repr(for_observers(overview()))]
