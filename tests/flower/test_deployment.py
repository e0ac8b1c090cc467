"""Five methods on real nodes: programs of Flower's, TLS, keys, the gate, each node with data of its own."""

import json
import ssl
import subprocess
import sys
import time
from base64 import b64encode
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from http.client import HTTPSConnection
from pathlib import Path

import httpx
import numpy as np
import pytest
import tomli_w
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node as FlowerNode
from flwr.proto.recorddict_pb2 import RecordDict
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from sklearn.datasets import load_digits

from potluck.analysis.read import read_run
from potluck.cli.twin import timed_again
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.flower.deploy.gate import Gate
from potluck.flower.deploy.keys import add_node, certify
from potluck.flower.deploy.processes import free_port
from potluck.flower.deploy.superlink import SuperLink
from potluck.flower.server.hosting import run_app, write_app
from potluck.records import CHECKPOINT, CLIENTS, COSTS, LAST, ROUNDS, Checkpoint, RoundRecord
from potluck.twin.devices import TwinDevice

pytestmark = pytest.mark.slow
NODES = ("a", "b", "c")
METHODS = {
    "fedin": {},
    "fedmd": {"federation": {"public": "holdout"}},
    "heterofl": {"federation": {"models": ["cnn3"], "capacities": [1.0, 0.5, 0.25]}},
    "fedorion": {"method": {"noise_batches": 2}},
    "fedepth": {"federation": {"capacities": [1.0, 0.7, 0.7]}},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Every node's own part of the digits, as a file."""
    place, digits = tmp_path_factory.mktemp("data"), load_digits()
    inputs = (digits.images[:, None] * 15.9).astype("uint8")
    for number, name in enumerate(NODES):
        train, test = slice(number, 600, 3), slice(600 + number, 900, 3)
        arrays = {"x_train": inputs[train], "y_train": digits.target[train]}
        np.savez(place / f"{name}.npz", **arrays, x_test=inputs[test], y_test=digits.target[test])
    return place


@pytest.fixture(scope="module")
def deployment(data, tmp_path_factory):
    """A SuperLink behind its gate, and three nodes that have joined."""
    place, told = tmp_path_factory.mktemp("deployment"), []
    keys, address = place / "keys", f"127.0.0.1:{free_port()}"
    certify(keys, [], days=1)
    for name in NODES:
        add_node(keys, name)
    nodes = []
    with SuperLink(place / "link", keys) as link, Gate(_split(address), link.address, keys, told.append, link.trust):
        link.register()
        try:
            for name in NODES:
                words = ["join", address, "--keys", keys / "nodes" / name, "--data", data / f"{name}.npz"]
                nodes.append(potluck(*words, "--state", place / name, log=place / f"{name}.log"))
            yield link, place, address
        finally:
            for node in nodes:
                node.terminate()
            for node in nodes:
                node.wait(30)


def potluck(*words, log):
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(Path(sys.executable).parent / "potluck"), *map(str, words)], stdout=output, stderr=subprocess.STDOUT
        )


def _split(address):
    host, _, port = address.partition(":")
    return host, int(port)


def experiment_of(name, **federation):
    more = METHODS[name]
    return resolve(
        {
            "federation": {
                "dataset": "digits",
                "clients": len(NODES),
                "models": ["cnn2", "cnn3", "cnn4"],
                **more.get("federation", {}),
                **federation,
            },
            "method": {"name": name, **more.get("method", {})},
            "run": {"rounds": 1, "executor": "sequential", "common_test": False},
        }
    )


def found_in(folder):
    records = [(folder / name).read_bytes() for name in (ROUNDS, CLIENTS, COSTS)]
    return [*records, Checkpoint.read(folder / CHECKPOINT / LAST).digest]


@pytest.mark.every_commit
def test_real_nodes_give_the_bytes_of_one_process(deployment, data, tmp_path):
    """One test for all methods, so that one worker of the tests has the deployment, and there is one."""
    link, place, _ = deployment
    for name in METHODS:
        here, there = tmp_path / f"{name}-here", tmp_path / name
        here.mkdir()
        there.mkdir()
        experiment = experiment_of(name, data=[str(data / f"{node}.npz") for node in NODES])
        execute(prepare(experiment, assemble(experiment), here), experiment, here)
        app, said = write_app(place / f"app-{name}", experiment_of(name), there), []
        records = [news for news in run_app(link, app, there, said.append) if isinstance(news, RoundRecord)]
        assert len(records) == 1, said
        assert found_in(there) == found_in(here), name
        timed = [timed_again(read_run(folder), [TwinDevice(gflops=2.0, up_mbit=5.0)]) for folder in (there, here)]
        assert timed[0] == timed[1], name
        assert timed[0][0].end > 0


THEIR_SERVER = """
import json
import time
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

server_app = ServerApp()


@server_app.main()
def main(grid, context):
    nodes = []
    while len(nodes) < 3:
        nodes = list(grid.get_node_ids())
        time.sleep(0.5)
    asked = list(grid.push_messages([Message(RecordDict(), node, "query.hello", ttl=90) for node in nodes]))
    heard = []
    while asked:
        for reply in grid.pull_messages(asked):
            asked.remove(reply.metadata.reply_to_message_id)
            heard.append(str(reply.error) if reply.has_error() else "an answer")
        time.sleep(0.5)
    Path(context.run_config["out"]).with_suffix(".part").write_text(json.dumps(heard))
    Path(context.run_config["out"]).with_suffix(".part").rename(context.run_config["out"])
"""
THEIR_NODE = """
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

Path("RAN").touch()
client_app = ClientApp()


@client_app.query("hello")
def hello(message, context):
    return Message(RecordDict(), reply_to=message)
"""


def theirs(app, server, node, **config):
    """An app of somebody else's."""
    app.mkdir()
    (app / "their_server.py").write_text(server)
    (app / "their_node.py").write_text(node)
    components = {"serverapp": "their_server:server_app", "clientapp": "their_node:client_app"}
    project = {"name": "theirs", "version": "0.1.0", "description": "x", "license": "Apache-2.0", "dependencies": []}
    flower = {"app": {"publisher": "theirs", "components": components, "config": {"out": str(app / "out"), **config}}}
    (app / "pyproject.toml").write_text(tomli_w.dumps({"project": project, "tool": {"flwr": flower}}))
    return app


def heard_by(link, app, server, node, **config):
    """What a server of somebody else's, submitted to the SuperLink, wrote down of the nodes' answers."""
    run = link.submit(theirs(app, server, node, **config))
    deadline = time.monotonic() + 600
    while not (app / "out").is_file():
        status, why = link.status(run)
        assert time.monotonic() < deadline and status != "finished:failed", f"{status}: {why}"  # noqa: PT018
        time.sleep(1.0)
    return json.loads((app / "out").read_text())


def test_real_nodes_run_no_app_but_potlucks(deployment, tmp_path):
    """Whoever can submit a run to the SuperLink runs code on its machine, and none on the nodes'."""
    ran = tmp_path / "ran"
    heard = heard_by(deployment[0], tmp_path / "theirs", THEIR_SERVER, THEIR_NODE.replace("RAN", str(ran)))
    assert len(heard) == len(NODES)
    assert all("not a message of Potluck's" in reply for reply in heard), heard
    assert not ran.exists()


ASKING_SERVER = """
import json
import time
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import ServerApp

from potluck.flower.wire.envelope import unwrap, wrap

server_app = ServerApp()


@server_app.main()
def main(grid, context):
    nodes = []
    while len(nodes) < 3:
        nodes = list(grid.get_node_ids())
        time.sleep(0.5)
    headers = json.loads(Path(context.run_config["headers"]).read_text())
    asked = dict.fromkeys(
        grid.push_messages(
            [
                Message(wrap(header), nodes[number % 3], kind, ttl=600)
                for number, (kind, header) in enumerate(headers)
            ]
        )
    )
    heard, waiting = [], set(asked)
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            waiting.discard(reply.metadata.reply_to_message_id)
            heard.append(unwrap(reply.content)[0] if reply.has_content() else {"error": str(reply.error)})
        time.sleep(0.5)
    out = Path(context.run_config["out"])
    out.with_suffix(".part").write_text(json.dumps(heard))
    out.with_suffix(".part").rename(out)
"""
PLANTED = """
from pathlib import Path

Path(__file__).with_name("ran").touch()


def thing(*args, **options):
    Path(__file__).with_name("called").touch()
"""


def test_real_nodes_open_no_file_and_run_no_command_that_a_server_names(deployment, tmp_path, touched, in_turn):
    """A server that anybody could write, by `serve`'s own messages: one key of each method's experiment is a path."""
    link, *_ = deployment
    place = tmp_path / "planted"
    place.mkdir()
    (place / "code.py").write_text(PLANTED)
    (place / "weights.safetensors").write_bytes(b"")
    code, command = f"{place}/code.py:thing", {"name": f"{subprocess.__file__}:getoutput", "cmd": f"touch {place}/ran"}
    vit = {"name": "vit", "pretrained_path": f"{place}/weights.safetensors"}
    asked = []
    for number, method in enumerate(in_turn):
        known = resolve({"federation": {"models": ["cnn2"], "clients": 3}, "method": {"name": method}}).tree()
        named = [{"server_model": command}, {"models": [vit]}, {"server_model": vit}, {"models": [code]}]
        named += [{"partition": {"name": code}}, {"metrics": [code]}, {"public": str(place)}, {"task": {"name": code}}]
        tree = {**known, "federation": {**known["federation"], **named[number % len(named)]}}
        if number % len(named) == 0:
            del tree["federation"]["models"]
        header = {
            "experiment": tree,
            "run": f"theirs-{number}",
            "client": number % 3,
            "code": None,
            "classes": {"count": 10, "names": None},
        }
        job = {**header, "handler": "local_update", "key": [0, 0, 0, 0, 0], "round": 1, "record": None}
        asked.append(("train.job", job) if number % 2 else ("query.hello", header))
    (tmp_path / "headers.json").write_text(json.dumps(asked))
    with touched(place) as found:
        heard = heard_by(link, tmp_path / "app", ASKING_SERVER, THEIR_NODE, headers=str(tmp_path / "headers.json"))
    assert len(heard) == len(in_turn)
    assert all("refusal" in answer or "failure" in answer for answer in heard), heard
    assert found == []


WAITING_SERVER = """
import time

from flwr.serverapp import ServerApp

server_app = ServerApp()


@server_app.main()
def main(grid, context):
    time.sleep(600)
"""
FORGED = "\n\x1b[2JINFO :      [Fleet.ActivateNode] a forged line"


class Node:
    """A node with Flower's client and words of its own choice."""

    def __init__(self, address, place):
        self.key = load_ssh_private_key((place / "node.key").read_bytes(), None)
        self.address = address
        self.trust = ssl.create_default_context(cafile=str(place / "ca.crt"))
        proof = NodeAuthHttpInterceptor(self.key, self.key.public_key())
        self.ask = FleetHttpClient.from_server_address(address, False, (place / "ca.crt").read_bytes(), [proof])
        pem = self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        number = self.ask.ActivateNode(ActivateNodeRequest(public_key=pem, heartbeat_interval=30.0)).node_id
        self.itself = FlowerNode(node_id=number)

    def order(self, run, to):
        """A message to another node, as the server's own are."""
        said = Metadata(run_id=run, message_id="0" * 64, src_node_id=1, dst_node_id=to, message_type="query.hello")
        said.ttl, said.created_at = 600.0, time.time()
        return PushMessagesRequest(
            node=self.itself,
            messages_list=[Message(metadata=said, content=RecordDict())],
            message_object_trees=[ObjectTree(object_id="0" * 64)],
            clientapp_runtime_list=[1.0],
        )

    def trickle(self):
        """A connection on which a signed request has begun."""
        at = datetime.now(UTC).isoformat()
        pem = self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        signature = self.key.sign(at.encode(), ec.ECDSA(hashes.SHA256()))
        connection = HTTPSConnection(self.address, timeout=10, context=self.trust)
        connection.putrequest("POST", "/v1/fleet/pull-messages")
        connection.putheader("flwr-public-key", b64encode(pem))
        connection.putheader("flwr-timestamp", at)
        connection.putheader("flwr-signature", b64encode(signature))
        connection.putheader("content-length", "20")
        connection.endheaders(b"x")
        return connection


def test_a_node_forges_no_line_gives_no_orders_and_holds_up_nobody(deployment, tmp_path):
    """Each of these three went through Flower's own messages."""
    link, place, address = deployment
    keys, nodes = place / "keys", ("evil", "honest")
    for name in nodes:
        add_node(keys, name)
    link.register()
    evil, honest = (Node(address, keys / "nodes" / name) for name in nodes)
    run = link.submit(theirs(tmp_path / "theirs", WAITING_SERVER, THEIR_NODE))
    try:
        deadline = time.monotonic() + 60
        while link.status(run)[0] != "running":
            assert time.monotonic() < deadline
            time.sleep(0.5)
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            evil.ask.PushMessages(evil.order(int(run), honest.itself.node_id))
        assert not honest.ask.PullMessages(PullMessagesRequest(node=honest.itself)).messages_list
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            evil.ask.GetFab(GetFabRequest(node=evil.itself, run_id=int(run), hash_str=FORGED))
        assert "forged" not in link.log.read_text()
        with ExitStack() as held:
            for _ in range(120):
                held.enter_context(closing(evil.trickle()))
            start = time.monotonic()
            beat = SendNodeHeartbeatRequest(node=honest.itself, heartbeat_interval=30.0)
            assert honest.ask.SendNodeHeartbeat(beat).success
            assert time.monotonic() - start < 3.0
    finally:
        link.stop_run(run)
        for node in (evil, honest):
            node.ask.DeactivateNode(DeactivateNodeRequest(node_id=node.itself.node_id))
            node.ask.close()
