"""Strangers, the network and other users of the machine, against real programs of a server and its nodes."""

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from potluck.flower.deploy.keys import certify

from .deployed import POTLUCK, Deployment, replied, rounds_of

pytestmark = pytest.mark.slow
NOBODY = 65534
READER = """
import json, os, sys
from pathlib import Path

os.setgroups([])
os.setgid({user})
os.setuid({user})
found = []
for path in map(Path, sys.argv[1:]):
    try:
        path.read_bytes() if not path.is_dir() else list(path.iterdir())
        found.append(str(path))
    except OSError:
        pass
print(json.dumps(found))
"""


class Wire:
    """The network between a node and a server: it keeps all that passes, and may change it or lead elsewhere.

    Attributes:
        spoils: None; or which of the pieces to come that are more than a greeting, whether of those to the server, and
            what becomes of it, `changed` or `cut_off`.
    """

    def __init__(self, port):
        self.port, self.passed, self.spoils = port, bytearray(), None
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        self._ends, self._threads, self._deciding = [], [], threading.Lock()
        self._start(self._accept)

    def close(self):
        for end in (self._door, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in (self._door, *self._ends):
            end.close()

    def _start(self, work, *arguments):
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self):
        with suppress(OSError):
            while True:
                here, _ = self._door.accept()
                self._ends.append(here)
                there = socket.create_connection(("127.0.0.1", self.port))
                self._ends.append(there)
                for ends in ((here, there, True), (there, here, False)):
                    self._start(self._pass, *ends)

    def _what_becomes_of(self, part, to_server):
        with self._deciding:
            if len(part) < 200 or self.spoils is None or self.spoils[1] != to_server:
                return None
            left, *how = self.spoils
            self.spoils = (left - 1, *how) if left else None
            return how[-1] if left == 0 else None

    def _pass(self, source, target, to_server):
        with suppress(OSError):
            while part := source.recv(2**16):
                self.passed += part
                spoil = self._what_becomes_of(part, to_server)
                target.sendall(spoil(part) if spoil else part)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def changed(part):
    return part[:100] + bytes([part[100] ^ 1]) + part[101:]


def cut_off(part):
    raise ConnectionError


@pytest.fixture
def joined(deployment):
    """A server whose nodes are at work, the first one of them over a network that keeps all that passes."""
    deployment.keys("--node", "ward-1", "--node", "ward-2")
    deployment.serve("run")
    deployment.hears("server", "nodes join by")
    deployment.wire = Wire(int(deployment.address.rpartition(":")[2]))
    for name, address in (("ward-1", deployment.wire.address), ("ward-2", None)):
        deployment.carry(name)
        deployment.join(name, address)
    for name in ("ward-1", "ward-2"):
        deployment.hears(name, "at work on round 1")
    yield deployment
    deployment.wire.close()


def test_strangers_and_the_network_against_real_programs(joined):
    """One test, so that there is one federation."""
    replied(joined)
    a_stranger_with_a_key_of_its_own_does_not_join(joined)
    a_stranger_gives_no_orders(joined)
    the_network_reads_nothing(joined)
    what_the_network_spoils_is_not_taken_and_said_again(joined)
    the_network_does_not_pass_for_the_server(joined)
    replied(joined)
    assert all(process.poll() is None for process in joined.running.values())
    assert {client for record in rounds_of(joined.place / "run") for client in record["cohort"]} == {0, 1}


def a_stranger_with_a_key_of_its_own_does_not_join(joined):
    own = ec.generate_private_key(ec.SECP384R1())
    (joined.place / "stranger").mkdir(mode=0o700)
    shutil.copy(joined.place / "ward-1" / "ca.crt", joined.place / "stranger" / "ca.crt")  # it is no secret
    key = joined.place / "stranger" / "node.key"
    key.write_bytes(own.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    key.chmod(0o600)
    joined.join("stranger")
    assert joined.running.pop("stranger").wait(120) == 2
    joined.hears("stranger", f"^potluck: {joined.address} refuses this node: its key is not registered")
    joined.hears("server", "refused 127.0.0.1: its key is not registered")


def a_stranger_gives_no_orders(joined):
    """Over the server's own encryption: none of Flower's interfaces answers, whatever is asked."""
    asked = ("control/start-run", "control/list-runs", "fleet/pull-messages", "serverappio/push-messages")
    paths = (*(f"/v1/{name}" for name in asked), "/flwr.proto.Control/StartRun", "/metrics", "/healthz", "/")
    for path in paths:
        for words in (f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0", f"GET {path} HTTP/1.1\r\nhost: x"):
            assert status_of(joined, f"{words}\r\n\r\n") in (401, 403, 404), path


def status_of(joined, request):
    host, _, port = joined.address.rpartition(":")
    context = ssl.create_default_context(cafile=joined.place / "ward-1" / "ca.crt")
    with context.wrap_socket(socket.create_connection((host, int(port)), 20), server_hostname=host) as there:
        there.sendall(request.encode())
        return int(there.recv(4096).split()[1])


def the_network_reads_nothing(joined):
    passed = bytes(joined.wire.passed)
    assert len(passed) > 10_000  # models went back and forth
    telling = ("fedavg", "digits", "cnn2", "weights", "ward-1", "potluck", "local_update", "stages", "/v1/fleet")
    assert [word for word in telling if word.encode() in passed] == []


def what_the_network_spoils_is_not_taken_and_said_again(joined):
    """Whichever request or answer it is, it costs no reply and no round waits for it."""
    before = len(rounds_of(joined.place / "run"))
    for number, to_server, spoil in product(range(6), (True, False), (changed, cut_off)):
        joined.wire.spoils = (number, to_server, spoil)
        deadline = time.monotonic() + 120
        while joined.wire.spoils:
            assert time.monotonic() < deadline, "nothing passed that was long enough to be spoilt"
            time.sleep(0.05)
        replied(joined, within=60)
    assert [record["failed"] for record in rounds_of(joined.place / "run")[before:] if record["failed"]] == []


def the_network_does_not_pass_for_the_server(joined):
    """A node that is led to somebody with a certificate of his own for the same address tells him nothing."""
    certify(joined.place / "impostor", [], days=1)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(joined.place / "impostor" / "server.crt", joined.place / "impostor" / "server.key")
    heard, door = [], socket.create_server(("127.0.0.1", 0))

    def answer():
        with suppress(OSError):
            while True:
                end, _ = door.accept()
                with end, suppress(OSError), context.wrap_socket(end, server_side=True) as there:
                    heard.append(there.recv(4096))

    answering = threading.Thread(target=answer, daemon=True)
    answering.start()
    (joined.place / "misled").mkdir(mode=0o700)
    for file in ("ca.crt", "node.key"):
        shutil.copy(joined.place / "ward-2" / file, joined.place / "misled" / file)
    joined.join("misled", f"127.0.0.1:{door.getsockname()[1]}")
    assert joined.running.pop("misled").wait(120) == 2
    joined.hears("misled", "certificate is not one of ours")
    door.shutdown(socket.SHUT_RDWR)
    answering.join(10)
    door.close()
    assert not any(heard)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_of_a_real_servers_and_nodes_machine_reads_no_secret_and_neither_starts_if_it_could():
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)  # so that only what Potluck protects is protected
    deployment = Deployment(place)
    try:
        deployment.keys("--node", "ward-1")
        deployment.carry("ward-1")
        deployment.serve("run", "federation.clients=1")
        deployment.hears("server", "nodes join by")
        deployment.join("ward-1")
        deployment.hears("ward-1", "at work on round 1")
        everything = [str(path) for path in place.rglob("*")]
        words = [sys.executable, "-c", READER.format(user=NOBODY), *everything]
        read = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        assert str(place / "server.log") in read  # so the reader knows how
        inside = [path for path in read if re.search(r"/(state-ward-1|run|ward-1)/|\.key$|\.sock$", path)]
        assert inside == []
        keys_that_others_may_read_start_nothing(deployment)
    finally:
        deployment.close()
        shutil.rmtree(place)


def keys_that_others_may_read_start_nothing(deployment):
    for name, secret, words in (
        ("server", "keys/server.key", ["serve", "f.toml", "--keys", "keys", "--folder", "other"]),
        ("ward-1", "ward-1/node.key", ["join", deployment.address, "--keys", "ward-1", "--state", "other-state"]),
    ):
        (deployment.place / secret).chmod(0o644)
        done = subprocess.run([POTLUCK, *words], cwd=deployment.place, capture_output=True, text=True, timeout=120)
        assert (done.returncode, "others may read this secret key (mode 644)" in done.stderr) == (2, True), (name, done)
        (deployment.place / secret).chmod(0o600)
