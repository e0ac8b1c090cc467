"""A node stays: no other user takes its tasks, it comes back by itself, and says in its own terminal what is wrong."""

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tomli_w
from flwr.supercore.constant import TaskType

from potluck.core.ground.errors import CheckpointError
from potluck.experiment.running.execute import holding
from potluck.flower.deploy.gate import Gate
from potluck.flower.deploy.keys import add_node, certify, renew_node, revoke_node
from potluck.flower.deploy.processes import free_port
from potluck.flower.deploy.superlink import FlowerError
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.join import (
    _ASK_EVERY,
    _FIRST_WAIT,
    _GRACE,
    _LONGEST_WAIT,
    _QUIET,
    Credentials,
    Refused,
    Unreachable,
    Watch,
    _Life,
    _News,
    _notices,
    _Renewal,
    _Waits,
    probe,
    question,
    run_node,
)

POTLUCK = str(Path(sys.executable).parent / "potluck")
NOBODY = 65534


class Signs:
    """Stands for the signs of Flower's program."""

    answered = failed = 0

    def seen(self):
        return self.answered, self.failed


class Server:
    """Stands for a server that is asked."""

    raises, asked = None, 0

    def __call__(self):
        self.asked += 1
        if self.raises:
            raise self.raises


class Watched:
    """A watch with what it watches."""

    def __init__(self):
        self.now, self.signs, self.server = 0.0, Signs(), Server()
        self.watch = Watch(self.signs, self.server, lambda: self.now)

    def after(self, seconds, *, answered=False, failed=False):
        self.now += seconds
        self.signs.answered += answered
        self.signs.failed += failed
        return self.watch.gives_up()


def test_a_program_that_is_answered_is_left_alone():
    found = Watched()
    assert not any(found.after(20, answered=True) for _ in range(100))
    assert found.server.asked == 0


def test_a_program_that_is_answered_no_more_while_the_server_is_there_is_given_up():
    found = Watched()
    assert not found.after(_QUIET)
    assert not found.after(_ASK_EVERY)
    assert not found.after(_GRACE)
    assert found.after(_ASK_EVERY)


def test_a_program_may_find_a_server_again_that_was_gone():
    found = Watched()
    found.server.raises = Unreachable("nobody")
    with pytest.raises(Unreachable):
        found.after(_ASK_EVERY, failed=True)
    for _ in range(20):
        assert found.watch.waiting
        with pytest.raises(Unreachable):
            found.after(_QUIET)
    found.server.raises = None
    assert not found.after(_ASK_EVERY)
    assert not found.after(_GRACE / 2, answered=True)
    assert not found.watch.waiting
    assert not found.after(_GRACE)


def test_a_refusal_is_heard_as_soon_as_a_request_fails():
    found = Watched()
    assert not found.after(_ASK_EVERY, failed=True)  # a run that has ended, say
    found.server.raises = Refused("its key is not registered")
    assert not found.after(1, answered=True)
    with pytest.raises(Refused):
        found.after(_ASK_EVERY, failed=True)


def test_attempts_become_rarer_up_to_a_limit_until_one_succeeds():
    waits = _Waits()
    found = [waits.next() for _ in range(30)]
    assert all(_FIRST_WAIT / 2 <= wait <= _LONGEST_WAIT for wait in found)
    assert min(found[-10:]) >= _LONGEST_WAIT / 2
    assert len(set(found)) == 30  # nodes that lost a server together do not come back together
    waits.start_over()
    assert waits.next() <= _FIRST_WAIT


def test_the_same_trouble_is_told_once():
    told = []
    say = _News(told.append)
    for line, about in (("a", ""), ("a", ""), ("gone (1)", "gone"), ("gone (2)", "gone"), ("a", "")):
        say(line, "connection", about, round=3)
    assert told == ["a", "gone (1)", "a"]
    assert {(line.event, line.round, line.run) for line in told} == {("connection", 3, None)}


def test_a_flower_that_listens_elsewhere_is_not_used(tmp_path):
    home, door = NodeConfig(tmp_path), tmp_path / "runtime.sock"
    say = _News(lambda line: None)
    credentials = Credentials("127.0.0.1:1", None)
    renewal = _Renewal(credentials, say)
    life = _Life(credentials, list, home, door, say, lambda: None, renewal, lambda lines: None)
    (tmp_path / "node.log").write_text("INFO: SuperNode ID: 1\n")
    with pytest.raises(FlowerError, match="others could take this node's tasks"):
        life._read_logs()


def test_a_second_node_in_the_same_folder_does_not_start(tmp_path):
    with holding(tmp_path), pytest.raises(CheckpointError, match="another process is running in this folder"):
        run_node(Credentials("127.0.0.1:1", None), NodeConfig(tmp_path), lambda line: None)


@pytest.fixture
def keys(tmp_path):
    certify(tmp_path / "keys", [], days=365)
    add_node(tmp_path / "keys", "a")
    return tmp_path / "keys"


def test_an_expired_certificate_is_named_at_both_ends(keys, days_ago):
    with days_ago(3):
        certify(keys, [], days=1)
    told, port = [], free_port()
    with Gate(("127.0.0.1", port), "127.0.0.1:1", keys, told.append):
        with pytest.raises(Refused, match="its certificate has expired; make a new one"):
            probe(Credentials(f"127.0.0.1:{port}", keys / "nodes" / "a"))
        line = "refused a caller: our certificate has expired; make a new one: potluck keys KEYS --renew-server"
        until(lambda: told[1:] == [line])  # while the gate is open: the caller knows before the gate does


@contextmanager
def gated(keys, told):
    """The address of a gate with these keys, and nothing behind it."""
    port = free_port()
    with Gate(("127.0.0.1", port), "127.0.0.1:1", keys, told.append):
        yield f"127.0.0.1:{port}"


def test_new_keys_are_taken_when_they_are_whole_and_the_server_takes_them(keys, tmp_path):
    place, said, told = Path(shutil.copytree(keys / "nodes" / "a", tmp_path / "a")), [], []
    certify(tmp_path / "strangers", [], days=365)
    with gated(keys, told) as address:
        renewal = _Renewal(Credentials(address, place), _News(said.append))
        assert not any(renewal.look() for _ in range(3))
        for new, wrong in (
            (add_node(tmp_path / "strangers", "a") / "node.key", "its key is not registered"),
            (keys / "server.key", "holds no secret key of a node"),
        ):
            (place / "node.key").write_bytes(new.read_bytes())
            assert not any(renewal.look() for _ in range(3))
            assert wrong in said[-1]
            assert said[-1].endswith("; going on with those of before")
        renew_node(keys, "a", overlap=3)
        (place / "node.key").write_bytes((keys / "nodes" / "a" / "node.key").read_bytes())
        assert [renewal.look() for _ in range(2)] == [False, True]  # not at once: it may still be written
        assert renewal.is_done
        assert len(said) == 2


def test_new_keys_are_tried_again_when_no_server_answers(keys, tmp_path, monkeypatch):
    place = Path(shutil.copytree(keys / "nodes" / "a", tmp_path / "a"))
    monkeypatch.setattr("potluck.flower.node.join._ASK_EVERY", 0.0)
    with gated(keys, []) as address:
        pass
    renewal = _Renewal(Credentials(address, place), _News(lambda line: None))
    (place / "node.key").touch()
    assert not any(renewal.look() for _ in range(3))
    with Gate(("127.0.0.1", int(address.partition(":")[2])), "127.0.0.1:1", keys, lambda line: None):
        assert renewal.look()


def test_a_node_switches_keys_between_two_jobs(tmp_path, monkeypatch):
    """What Flower's program says shows when there is none; of a log that was begun anew, only what is left."""
    home, heard, looked = NodeConfig(tmp_path), [], []
    words = iter(["Receiving: a", "x", "Sent successfully", "Receiving: b", "Failed to send message", "x"])

    class Renewal:
        def look(self):
            looked.append(len(heard))
            return len(looked) == 3

    class Running:
        def poll(self):
            return None

    def new_in(log):
        if log.name != "node.log":
            return []
        heard.append(next(words))
        return heard[-1:]

    place = tmp_path / "runtime.sock"
    life = _Life(Credentials("127.0.0.1:1", None), list, home, place, _News(lambda line: None), list, Renewal(), list)
    for name, stand_in in (("_move_in", Running), ("_start", Running), ("_is_stuck", lambda watch: False)):
        monkeypatch.setattr(life, name, stand_in)
    monkeypatch.setattr(life, "_new_in", new_in)
    monkeypatch.setattr("potluck.flower.node.join._LOOK_EVERY", 0.0)
    monkeypatch.setattr("potluck.flower.node.join.stop", lambda process: None)
    assert life.until_it_ends() == "the keys are new"
    assert looked == [3, 5, 6]


LOUD = json.dumps({"notices": ["\x1b[2Jno\n2026 INFO all is well", {"a": 1}, 3, "x" * 10**4, *map(str, range(50))]})


@pytest.mark.parametrize(
    "body",
    ["", "[]", "{}", "[" * 100_000, '{"notices": 3}', '{"notices": "abc"}', '{"notices": {"a": 1}}', LOUD, '"\ud800'],
)
def test_what_a_server_has_the_owner_know_is_a_few_clean_lines(body):
    lines = _notices(body.encode(errors="surrogatepass"))
    assert len(lines) <= 8
    assert all(line.isprintable() and len(line) <= 520 and line.endswith("(says the server)") for line in lines)


class Endless(BaseHTTPRequestHandler):
    """A server whose answer does not end."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(b"x" * 2**12)

    def log_message(self, *arguments):
        pass


def test_an_answer_without_end_is_cut_off():
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            assert question(Credentials(f"127.0.0.1:{server.server_port}", None))() == []
        finally:
            server.shutdown()
            thread.join()


def test_who_passes_connections_on_to_nobody_is_no_server_without_encryption(keys):
    with forwarding(free_port()) as address, pytest.raises(Unreachable, match="nobody answers"):
        probe(Credentials(address, keys / "nodes" / "a"))


def until(holds, seconds=240):
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)


@contextmanager
def forwarding(port):
    """The address of one who accepts every connection, and hangs up if nobody is behind him."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=_accept, args=(door, port), daemon=True).start()
        yield f"127.0.0.1:{door.getsockname()[1]}"
        door.shutdown(socket.SHUT_RDWR)


def _accept(door, port):
    with suppress(OSError):
        while True:
            here, _ = door.accept()
            try:
                there = socket.create_connection(("127.0.0.1", port))
            except OSError:
                here.close()
                continue
            for pair in ((here, there), (there, here)):
                threading.Thread(target=_copy, args=pair, daemon=True).start()


def _copy(source, target):
    with suppress(OSError):
        while part := source.recv(2**16):
            target.sendall(part)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


class Federation:
    """A server and its nodes, real programs that meet through a forwarder.

    Its folder can be entered by every user, so that only what Potluck protects is protected.
    """

    def __init__(self, place, address, port):
        self.place, self.address, self.port, self.started = place, address, port, []
        self.server = None
        certify(place / "keys", [], days=365)
        federation = {"dataset": "digits", "clients": 2, "models": [{"name": "cnn2", "width": 2}]}
        tree = {"federation": federation, "method": {"name": "fedavg"}, "run": {"rounds": 1000}}
        (place / "f.toml").write_text(tomli_w.dumps(tree))

    def serve(self):
        words = ["--keys", "keys", "--listen", f"127.0.0.1:{self.port}", "--folder", "runs/first"]
        self.server = self._start("server", "serve", "f.toml", *words)

    def join(self, name, key=None):
        return self._start(
            name, "join", self.address, "--keys", f"keys/nodes/{key or name}", "--state", f"state-{name}"
        )

    def _start(self, name, *words):
        with (self.place / f"{name}.log").open("ab") as log:
            self.started.append(subprocess.Popen([POTLUCK, *words], cwd=self.place, stdout=log, stderr=log))
        return self.started[-1]

    def lines(self, name):
        return (self.place / f"{name}.log").read_text().splitlines()

    def hears(self, name, what, seconds=240, since=0):
        """Wait for a line in a terminal; return how many seconds it took."""
        begun = time.monotonic()
        until(lambda: any(re.search(what, line) for line in self.lines(name)[since:]), seconds)
        return time.monotonic() - begun

    def close(self):
        for process in self.started:
            process.terminate()
        for process in self.started:
            process.wait(60)


@pytest.fixture
def federation():
    place, port = Path(tempfile.mkdtemp()), free_port()
    place.chmod(0o755)
    with forwarding(port) as address:
        found = Federation(place, address, port)
        try:
            yield found
        finally:
            found.close()
            shutil.rmtree(place)


THIEF = """
import json, os, re, sys, time
from pathlib import Path

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient


def client(place, *more):
    of_flower = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    found = RuntimeHttpClient(f"http://{place}", interceptors=[of_flower, *more], timeout=2)
    if "/" in place:
        found = RuntimeHttpClient("http://there", interceptors=[of_flower, *more], timeout=2)
        found._client = httpx.Client(transport=httpx.HTTPTransport(uds=place))
    return found


def tokens():
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield from re.findall("--token\\0([^\\0]+)", place.read_text())
        except OSError:
            pass


user, seconds, kind, *places = json.loads(sys.argv[1])
client("127.0.0.1:1").close()
os.setgroups([])
os.setgid(user)
os.setuid(user)
heard = {"reached": 0, "took": 0, "read": 0}
deadline = time.monotonic() + seconds
while time.monotonic() < deadline:
    for place in places:
        for token in tokens():
            try:
                with client(place, RuntimeTokenHttpInterceptor(token)) as there:
                    heard["read"] += bool(there.PullTaskInput(PullTaskInputRequest()).run.run_id)
            except (httpx.HTTPError, OSError):
                pass
        try:
            with client(place) as there:
                found = there.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
            heard["reached"] += 1
            heard["took"] += bool(found.token)
        except (httpx.HTTPError, OSError):
            pass
    time.sleep(0.05)
print(json.dumps(heard))
"""


def theft(places, *, user, seconds=0.1, kind=TaskType.CLIENT_APP):
    """What one who asks for a node's tasks gets, as a user of this number."""
    words = [sys.executable, "-c", THIEF, json.dumps([user, seconds, kind, *places])]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def descendants(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in descendants(int(child)))]


def places_of(process):
    """Where the programs of a node listen: addresses and sockets."""
    inodes = set()
    for pid in descendants(process.pid):
        with suppress(OSError):
            inodes |= {os.readlink(link)[8:-1] for link in Path(f"/proc/{pid}/fd").iterdir()}
    tcp = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [int(words[1].partition(":")[2], 16) for words in tcp if words[3] == "0A" and words[9] in inodes]
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [f"127.0.0.1:{port}" for port in ports], [
        words[7] for words in sockets if words[6] in inodes and len(words) > 7
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_real_nodes_stay(federation):
    """One test, so that there is one federation."""
    for name in ("a", "b"):
        add_node(federation.place / "keys", name)
    federation.serve()
    federation.hears("server", "nodes join by")
    a, b = federation.join("a"), federation.join("b")
    a_local_user_takes_no_task(federation, a)
    the_runs_folder_is_the_servers_users(federation)
    nodes_come_back_after_the_server(federation)
    a_second_node_with_a_key_hears_so(federation)
    a_revoked_node_hears_so(federation, b)


def a_local_user_takes_no_task(federation, node):
    federation.hears("a", "^connected")
    addresses, sockets = places_of(node)
    assert [Path(path).name for path in sockets if "runtime" in path] == ["runtime.sock"]
    assert addresses == []
    assert stat.S_IMODE((federation.place / "state-a").stat().st_mode) == 0o700
    if os.getuid() == 0:  # only root can act as another user
        assert theft(sockets, user=0, kind=TaskType.SIMULATION)["reached"] > 0  # so the thief knows how
        assert theft([*addresses, *sockets], user=NOBODY, seconds=10) == {"reached": 0, "took": 0, "read": 0}
    federation.hears("a", "introduced")


def the_runs_folder_is_the_servers_users(federation):
    assert stat.S_IMODE((federation.place / "runs" / "first").stat().st_mode) == 0o700


def nodes_come_back_after_the_server(federation):
    federation.server.kill()
    federation.server.wait()
    for name in ("a", "b"):
        federation.hears(name, "nobody answers")
    before = {name: len(federation.lines(name)) for name in ("a", "b")}
    federation.serve()
    for name in ("a", "b"):
        federation.hears(name, "^connected", since=before[name])


def a_second_node_with_a_key_hears_so(federation):
    second = federation.join("second", key="a")
    federation.hears("second", "the server counts a node with this key as present: another machine with a copy of it")
    second.terminate()


def a_revoked_node_hears_so(federation, node):
    revoke_node(federation.place / "keys", "b")
    why = r"refuses this node: its key, of node b, was revoked on 2\d{3}-\d\d-\d\d at \d\d:\d\d UTC"
    assert federation.hears("b", why) < 60  # 3 where a processor is free
    federation.hears("server", "node b is revoked")
    assert node.poll() is None
