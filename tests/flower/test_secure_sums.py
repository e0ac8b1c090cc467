"""Secure sums over nodes' messages: the bytes of a run in one process, whoever leaves, and whatever is restarted."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Error, Message

from potluck import fl
from potluck.core.ground.errors import ConfigError
from potluck.core.roles import ClientFailure
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.running.run import Run
from potluck.experiment.settings.resolve import resolve
from potluck.flower import JOB
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.peers import SUMS_KEY, identity_in, peer_line, public_text, read_peers
from potluck.flower.node.service import NodeService
from potluck.flower.server.nodes import NodesMissing
from potluck.flower.server.serve import serve
from potluck.flower.server.sums import SUMS
from potluck.flower.wire.envelope import unwrap, wrap
from potluck.flower.wire.schemas import sums_number, to_job
from potluck.records import CHECKPOINT, LAST, ROUNDS, Checkpoint
from potluck.secure import ANSWERS
from potluck.secure.agreement import Agreement
from potluck.secure.server import SecureServer
from potluck.testing.loopback import Loopback

SMALL = {"name": "mlp2", "width": 8}


def experiment_of(name="fedavg", clients=4, rounds=2, models=(SMALL,), run=None, federation=None, **method):
    return {
        "federation": {
            "dataset": "digits",
            "partition": "iid",
            "train_fraction": 0.1,
            "clients": clients,
            "models": list(models),
            **(federation or {}),
        },
        "method": {"name": name, **method},
        "run": {"rounds": rounds, "executor": "sequential", "common_test": False, "secure_sums": True, **(run or {})},
    }


def in_process(tree, folder):
    folder.mkdir()
    experiment = resolve(tree)
    execute(prepare(experiment, assemble(experiment), folder), experiment, folder)
    return folder


def digest_of(folder):
    return Checkpoint.read(folder / CHECKPOINT / LAST).digest


def rounds_of(folder):
    return [json.loads(line) for line in (folder / ROUNDS).read_text().splitlines()]


class Nodes:
    """Nodes in this process. `leaves` says of a client and a step whether its node is gone from then on."""

    def __init__(self, place, count, **config):
        self.place, self.services = place, {}
        self.homes = {f"node{n}": NodeConfig(place / f"node{n}", **config) for n in range(count)}
        self.leaves = lambda client, job: False
        self.heard = []  # what nodes are asked and what leaves them: job, header, payload
        self.grid = Loopback({name: self._answerer(name) for name in self.homes})

    def restart(self, name):
        self.services.pop(name, None)

    def ask(self, name, kind, envelope):
        if name not in self.services:
            self.services[name] = NodeService(self.homes[name])
        return self.services[name].answer(kind, envelope)

    def _answerer(self, name):
        def answer(message):
            kind, envelope = message.metadata.message_type, unwrap(message.content)
            job = to_job(envelope) if kind == JOB else None
            if job is not None and self.leaves(job.client, job):
                return Message(Error(5, "its node is gone"), reply_to=message)
            found = self.ask(name, kind, envelope)
            self.heard.append((name, envelope, found))
            return Message(wrap(*found), reply_to=message)

        return answer

    def serve(self, tree, folder):
        serve(self.grid, tree, folder, say=lambda line: None)
        return folder

    def asked(self, entry):
        """What was asked whose header has this entry, with what was answered."""
        return [(name, asked, answer) for name, asked, answer in self.heard if entry in asked[0]]


HALVES = {"levels": [1.0, 0.5]}
METHODS = [
    ("fedavg", {}),
    ("scaffold", {}),
    ("fedin", {}),
    ("heterofl", HALVES),
    ("fedrolex", HALVES),
    ("fjord", HALVES),
    ("depthfl", HALVES),
    ("fedproto", {}),
    ("fd", {"averaged": "all"}),
    ("lgfedavg", {}),
]


def tree_of(name, method, **more):
    """A federation in which each part of a network is three clients'."""
    models = [{"name": "cnn2", "width": 2}, {"name": "cnn3", "width": 2}] if name == "fedin" else [SMALL]
    clients = 6 if name == "fedin" else 4
    federation = {"capacities": [1.0, 1.0, 1.0, 0.5]} if method == HALVES else {}
    return experiment_of(name, clients, models=models, federation=federation, **method, **more)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), METHODS)
def test_ten_methods_have_the_bytes_that_they_have_in_one_process(name, method, tmp_path):
    tree = tree_of(name, method)
    nodes = Nodes(tmp_path, tree["federation"]["clients"])
    over, here = nodes.serve(tree, tmp_path / "over"), in_process(tree, tmp_path / "here")
    assert digest_of(over) == digest_of(here)
    for one, other in zip(rounds_of(over), rounds_of(here), strict=True):
        assert one["secure"]["summed"] == other["secure"]["summed"] > 0
        assert (one["replied"], one["metrics"]) == (other["replied"], other["metrics"])


SEVEN = {"tolerate_failures": True}


def leaving(at):
    """Clients are gone from a step on, by client; from all of the round if it is -1."""

    def leaves(client, job):
        step = getattr(job, "step", -1)
        return job.round == 2 and client in at and step >= at[client]

    return leaves


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), METHODS)
def test_three_tenths_of_the_nodes_leave_and_the_rest_is_summed(name, method, tmp_path):
    """Two of seven or eight: one before it sends its numbers, and one that has sent them."""
    models = [{"name": "cnn2", "width": 2}, {"name": "cnn3", "width": 2}] if name == "fedin" else [SMALL]
    clients = 8 if name == "fedin" else 7
    federation = {"capacities": [1.0] * 5 + [0.5] * 2} if method == HALVES else {}
    tree = experiment_of(name, clients, models=models, federation=federation, run=SEVEN, **method)
    nodes = Nodes(tmp_path, clients)
    nodes.leaves = leaving({1: 2, 4: 4})
    over = nodes.serve(tree, tmp_path / "over")
    second = rounds_of(over)[1]
    assert second.get("lost") is None
    assert list(second["failed"]) == ["1"]
    assert "its node is gone" in second["failed"]["1"]
    without = Nodes(tmp_path / "plain", clients)
    without.leaves = lambda client, job: job.round == 2 and client == 1
    plain = without.serve(tree | {"run": {**tree["run"], "secure_sums": True}}, tmp_path / "without")
    assert digest_of(over) == digest_of(plain)  # whether it left in the sums or before them


@pytest.mark.slow
def test_of_a_reply_nothing_that_is_summed_leaves_a_node_but_masked(tmp_path):
    tree, nodes = experiment_of(rounds=1), Nodes(tmp_path, 4)
    nodes.serve(tree, tmp_path / "run")
    calls, steps = nodes.asked("handler"), nodes.asked("step")
    assert len(calls) == 4
    for _, _, (said, payload) in calls:
        reply = fl.Message.decode(payload)
        assert set(reply) == {"weights", "examples"}
        assert all(tensor.numel() == 0 for tensor in reply["weights"].values())
        assert len(said["answer"]["withheld"]) == len(reply["weights"])
    assert [asked[0]["step"] for _, asked, _ in steps] == sorted([*range(len(ANSWERS))] * 4)
    learnt = units_learnt(tree)
    words = [payload for _, asked, (_, payload) in steps if asked[0]["step"] == 2]
    for payload in words:
        found = np.frombuffer(payload[-8 * (len(payload) // 8) :], np.uint64)
        assert learnt.isdisjoint(found.tolist())
        assert abs(np.unpackbits(found.view(np.uint8)).mean() - 0.5) < 0.02


def units_learnt(tree):
    """What clients would send in the clear, in units."""
    heard = []

    class Listening(type(resolve(tree).method)):
        def round(self, state, cohort, server):
            replies = cohort.ask(self.local_update, self.sharing.send(state.weights, cohort, server))
            heard.extend(reply["weights"] for reply in replies.values())
            return state

    experiment = resolve({**tree, "run": {**tree["run"], "secure_sums": False}})
    Run(Listening(training=experiment.method.training), assemble(experiment).federation, experiment.run).run()
    return {
        int(unit) % 2**64
        for weights in heard
        for tensor in weights.values()
        for unit in (tensor.double() * 2**24).round().flatten()
    }


class Stopped(KeyboardInterrupt):
    """The server's process ends."""


@pytest.mark.slow
@pytest.mark.parametrize("step", range(len(ANSWERS)))
def test_a_server_that_is_stopped_at_a_step_goes_on_to_the_same_bytes(step, tmp_path, monkeypatch):
    tree = experiment_of(rounds=2)
    whole = Nodes(tmp_path / "a", 4).serve(tree, tmp_path / "whole")
    nodes, close = Nodes(tmp_path / "b", 4), SecureServer.close

    def stopping(server):
        if server.agreement.round == sums_number(2, 1) and server.step == step:
            raise Stopped
        close(server)

    with monkeypatch.context() as then:
        then.setattr(SecureServer, "close", stopping)
        with pytest.raises(Stopped):
            nodes.serve(tree, tmp_path / "run")
    before = len(nodes.asked("handler"))
    assert digest_of(nodes.serve(tree, tmp_path / "run")) == digest_of(whole)
    told = [{asked["client"]: answer for _, (asked, _), answer in part} for part in calls_around(nodes, before)]
    assert len(told[0]) == 4
    assert told[0] == told[1]  # the same answers, whose numbers are the ones that are half summed already
    left = [path.name for path in (tmp_path / "run" / SUMS).iterdir()]
    assert left == ["2-1"]


def calls_around(nodes, count):
    """The calls of the round in which a server was stopped after so many of all, and the same calls again."""
    calls = nodes.asked("handler")
    return calls[count - 4 : count], calls[count:]


@pytest.mark.slow
def test_a_node_that_was_restarted_takes_part_in_no_sums_of_the_round_again(tmp_path, monkeypatch):
    tree, nodes, close = experiment_of(clients=5, run=SEVEN), Nodes(tmp_path, 5), SecureServer.close

    def restarting(server):
        if server.agreement.round == sums_number(1, 1) and server.step == 0:
            nodes.restart(nodes.grid.nodes[1].name)
        close(server)

    monkeypatch.setattr(SecureServer, "close", restarting)
    run = nodes.serve(tree, tmp_path / "run")
    first, second = rounds_of(run)
    assert len(first["failed"]) == 1
    assert "or was restarted since" in next(iter(first["failed"].values()))
    assert (first.get("lost"), second.get("failed", {})) == (None, {})


@pytest.fixture
def over(tmp_path):
    """Nodes after a run of one round."""
    nodes = Nodes(tmp_path, 4)
    nodes.serve(experiment_of(rounds=1), tmp_path / "run")
    return nodes


def refusal(nodes, name, header, payload):
    said, _ = nodes.ask(name, JOB, (header, payload))
    return said["failure"]["reason"]


def test_a_round_that_has_been_is_not_repeated(over):
    """Not with other clients, nor from the start, nor by a node that has been restarted."""
    (name, (call, message), _), *_ = over.asked("handler")
    begin = next(asked for one, asked, _ in over.asked("step") if one == name and asked[0]["step"] == 0)
    said, _ = over.ask(name, JOB, (call, message))
    assert "answer" in said  # the same as before, without what is summed
    agreement = Agreement.decode(begin[1])
    fewer = replace(agreement, least=4).encode()
    assert "other sums than those" in refusal(over, name, begin[0], fewer)
    over.restart(name)
    over.ask(name, JOB, (call, message))
    number = sums_number(1, 1)
    assert f"found round {number}; expected one after {number}" in refusal(over, name, *begin)


@pytest.mark.slow
def test_a_server_that_is_set_back_sums_nothing_until_it_comes_to_a_round_that_has_not_been(tmp_path):
    nodes, run = Nodes(tmp_path, 4), tmp_path / "run"
    nodes.serve(experiment_of(rounds=1, run=SEVEN), run)
    shutil.copytree(run, tmp_path / "copy")
    nodes.serve(experiment_of(rounds=3, run=SEVEN), run)
    shutil.rmtree(run)
    (tmp_path / "copy").rename(run)
    records = rounds_of(nodes.serve(experiment_of(rounds=4, run=SEVEN), run))
    assert [record.get("lost") is None for record in records] == [True, False, False, True]
    assert "since no round is repeated" in records[1]["lost"]


def test_a_step_of_another_run_or_about_other_numbers_is_refused(over):
    """The server proposes sums of the next round, after another call, in which something is not as it should be."""
    (name, (call, message), _), *_ = over.asked("handler")
    begin, proposed = next(asked for one, asked, _ in over.asked("step") if one == name and asked[0]["step"] == 0)
    key = [*call["key"][:2], 2, *call["key"][3:]]
    over.ask(name, JOB, ({**call, "round": 2, "key": key}, message))
    header, agreement = {**begin, "round": 2}, Agreement.decode(proposed)
    numbered = replace(agreement, round=sums_number(2, 1))
    assert "of another run, or of another round" in refusal(over, name, header, replace(numbered, run="x").encode())
    pieces = [{tensor: ((), *piece[1:]) if piece else piece for tensor, piece in agreement.coverage.pieces[0].items()}]
    other = replace(numbered, coverage=replace(agreement.coverage, pieces=pieces)).encode()
    assert "other numbers of this client than it has kept back" in refusal(over, name, header, other)
    assert "nothing to add in exchange 1 of round 3" in refusal(over, name, {**begin, "round": 3}, proposed)
    said, _ = over.ask(name, JOB, (header, numbered.encode()))
    assert "answer" in said


@pytest.mark.slow
def test_a_node_whose_owner_lists_peers_sums_with_these_and_takes_part_in_nothing_else(tmp_path):
    lines = [peer_line(f"site-{n}", tmp_path / f"node{n}") for n in range(4)]
    everybody, some = tmp_path / "all.txt", tmp_path / "some.txt"
    everybody.write_text("# of the four sites\n" + "\n".join(lines) + "\n")
    some.write_text("\n".join(lines[:3]))
    nodes = Nodes(tmp_path, 4, peers=everybody)
    assert rounds_of(nodes.serve(experiment_of(rounds=1), tmp_path / "run"))[0].get("lost") is None
    with pytest.raises(NodesMissing, match=r"lists peers, with whom alone it adds up .* without run\.secure_sums"):
        nodes.serve(experiment_of(rounds=1, run={"secure_sums": False}), tmp_path / "clear")
    wary = Nodes(tmp_path, 4, peers=some)
    tree = experiment_of(rounds=1, run={**SEVEN, "lost_rounds": 1})
    (record,) = rounds_of(lost(wary, tree, tmp_path / "wary"))
    assert re.search(r"\d of 4 clients sent keys, .* not among the peers of this client's owner: \d", record["lost"])


def lost(nodes, tree, folder):
    """A run all of whose rounds are lost."""
    with pytest.raises(ClientFailure, match="1 rounds in a row were lost"):
        nodes.serve(tree, folder)
    return folder


def test_a_node_refuses_a_method_that_needs_single_replies_though_its_server_does_not(over):
    (name, (call, message), _), *_ = over.asked("handler")
    tables = {**call["experiment"], "method": {"name": "fedtgp"}}
    said, _ = over.ask(name, JOB, ({**call, "experiment": tables}, message))
    assert "FedTGP needs single replies" in said["failure"]["reason"]


@pytest.mark.slow
def test_a_policy_may_ask_for_more_clients_in_a_sum(tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text("least_summed = 4\n")
    nodes = Nodes(tmp_path, 4, policy=policy)
    (record,) = rounds_of(lost(nodes, experiment_of(rounds=1, run={**SEVEN, "lost_rounds": 1}), tmp_path / "run"))
    assert "found sums over 3 clients; expected at least 4, as its owner says" in record["lost"]
    tree = experiment_of(rounds=1, run={"secure_sums": {"least": 4}})
    assert rounds_of(Nodes(tmp_path / "other", 4, policy=policy).serve(tree, tmp_path / "all"))[0].get("lost") is None


def test_a_node_without_a_key_or_with_anothers_takes_no_part(tmp_path):
    nodes = Nodes(tmp_path, 4)
    for n in (1, 2):
        (tmp_path / f"node{n}").mkdir()
        (tmp_path / f"node{n}" / SUMS_KEY).write_bytes(bytes(range(32)))
        (tmp_path / f"node{n}" / SUMS_KEY).chmod(0o600)
    with pytest.raises(NodesMissing, match="its key for secure sums is another node's"):
        nodes.serve(experiment_of(rounds=1), tmp_path / "run")


@pytest.mark.slow
def test_a_reply_in_the_clear_is_summed_from_its_masked_numbers_alone(tmp_path):
    """A node that keeps nothing back tells its own numbers, and changes no sum by it."""
    tree, nodes = experiment_of(rounds=1), Nodes(tmp_path, 4)
    plain = Nodes(tmp_path / "plain", 4).serve(tree, tmp_path / "whole")
    ask = nodes.ask

    def telling(name, kind, envelope):
        said, payload = ask(name, kind, envelope)
        if name == "node0" and "handler" in envelope[0]:
            shapes = {tuple(one["path"]): one["shape"] for one in said["answer"].pop("withheld")}
            reply = fl.Message.decode(payload)
            told = {n: torch.full(shapes["weights", n], 7.0) for n in reply["weights"]}
            payload = fl.Message(**{**reply, "weights": told}).encode()
        return said, payload

    nodes.ask = telling
    assert digest_of(nodes.serve(tree, tmp_path / "run")) == digest_of(plain)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "found no line"),
        ("a 12", "line 1: expected NAME KEY"),
        (f"# of all\na {'0' * 64}\nb {'0' * 64}", "line 3: the key of line 2 again"),
    ],
)
def test_a_list_of_peers_that_is_none_is_refused_in_a_line(lines, said, tmp_path):
    (tmp_path / "peers.txt").write_text(lines)
    with pytest.raises(ConfigError, match=said):
        NodeConfig(tmp_path, peers=tmp_path / "peers.txt").check()
    with pytest.raises(ConfigError, match="expected a file of `potluck peer`'s lines"):
        read_peers(tmp_path / "gone.txt")


def test_a_nodes_key_is_made_once_and_is_its_own(tmp_path):
    line = peer_line("site-a", tmp_path)
    assert line == peer_line("site-a", tmp_path) == f"site-a {public_text(identity_in(tmp_path))}"
    path = tmp_path / SUMS_KEY
    assert path.stat().st_mode & 0o777 == 0o600
    assert (
        bytes.fromhex(line.split()[1])
        == Ed25519PrivateKey.from_private_bytes(path.read_bytes()).public_key().public_bytes_raw()
    )
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others may read this secret; .* chmod 600"):
        identity_in(tmp_path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="found 5 bytes"):
        identity_in(tmp_path)
    with pytest.raises(ConfigError, match="without spaces"):
        peer_line("site a", tmp_path)
