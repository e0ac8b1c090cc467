"""Secure sums between real programs: the bytes of a run in one process, and servers that do not keep to the protocol.

The wicked servers are Potluck's own, changed in a few lines while they start, as whoever owns a server can change it.
"""

import json
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import tomli_w

from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.tables import read_toml
from potluck.records import CHECKPOINT, CONFIG, LAST, Checkpoint

from .deployed import POTLUCK, numbers_apart, rounds_of

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs/concepts/secure-sums.md"
SITES = ["ward-1", "ward-2", "ward-3", "ward-4"]
TREE = {
    "federation": {"dataset": "digits", "clients": 4, "train_fraction": 0.1, "models": [{"name": "mlp2", "width": 8}]},
    "method": {"name": "fedavg"},
    "run": {"rounds": 2, "common_test": False, "secure_sums": True, "lost_rounds": 1},
}
WICKED = '''
import os
from dataclasses import replace

if os.environ.get("WICKED"):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from potluck.core.message import Message
    from potluck.flower.server import sums
    from potluck.flower.wire.schemas import sums_number
    from potluck.secure.coverage import Coverage
    from potluck.secure.server import SecureServer
    from potluck.secure.steps import ids

    own, agreed = Ed25519PrivateKey.generate().public_key().public_bytes_raw(), {}
    begin, asked, request, check = (vars(SecureServer)[name] for name in ("__init__", "asked", "request", "_check"))
    add = sums.AddingOverNodes.__call__

    def round_of(agreement):
        return agreement.round // sums_number(1, 0)

    def begun(server, agreement):
        """It swaps a key, and invents a node."""
        of, number = agreement.coverage, round_of(agreement)
        if number == 1:
            agreement = replace(agreement, keys={**agreement.keys, 0: own})
        if number == 2:
            more = Coverage(of.summands, of.pieces, {**of.kinds, 99: 0})
            agreement = replace(agreement, keys={**agreement.keys, 99: own}, coverage=more)
        agreed[number] = agreement
        begin(server, agreement)

    def telling(server, client):
        """It names different survivors to different nodes."""
        if round_of(server.agreement) == 3 and server.step == 3:
            return Message(clients=ids({0, 2, 3} if client == 0 else {0, 1, 2, 3})).encode()
        return request(server, client)

    def checking(server, *arguments):
        if round_of(server.agreement) != 3:
            check(server, *arguments)

    def adding(self, addition):
        """After the sums, it asks for both secrets of a node, by other survivors, and repeats the round."""
        course = add(self, addition)
        if addition.round == 4:
            ask(self, addition, 3, Message(clients=ids({0, 2, 3})).encode())
        if addition.round == 5:
            ask(self, addition, 0, replace(agreed[5], least=4).encode())
        return course

    def ask(self, addition, step, payload):
        where = addition.round, addition.exchange, step
        jobs = [sums.SumsStep(client, payload, *where) for client in addition.coverage.kinds]
        list(self._executor.steps([sums.NodeTask(job, 2**20) for job in jobs], 1))

    SecureServer.__init__, SecureServer.request, SecureServer._check = begun, telling, checking
    SecureServer.asked = property(lambda server: tuple(one for one in asked.fget(server) if one != 99))
    sums.AddingOverNodes.__call__ = adding
'''
REFUSED = [
    r"keys\): SecureRefusal: clients whose keys are not among the peers of this client's owner: 0$",
    r"keys\): SecureRefusal: clients whose keys are not among the peers of this client's owner: 99$",
    r"shares\): SecureRefusal: .*signature is not its own, or of something else$",
    r"signature\): SecureRefusal: it was asked for its signature again, and for others",
    r"keys\): SecureRefusal: found a step of other sums than those that this node takes part in$",
]
"""What a node says of each round of the wicked server's."""


def peers_of(deployment):
    """Each site's owner makes a key at home, and all have the same list."""
    lines = []
    for name in SITES:
        words = [POTLUCK, "peer", name, "--state", f"state-{name}"]
        done = subprocess.run(words, cwd=deployment.place, capture_output=True, text=True, check=True)
        lines.append(done.stdout)
        deployment.printed += done.stdout
    (deployment.place / "peers.txt").write_text("".join(lines))


def test_real_nodes_sum_securely_and_refuse_a_server_that_does_not_keep_to_it(deployment, monkeypatch):
    """One test, so that there is one federation."""
    (deployment.place / "f.toml").write_text(tomli_w.dumps(TREE))
    deployment.keys(*(word for name in SITES for word in ("--node", name)))
    peers_of(deployment)
    for name in SITES:
        deployment.carry(name)
    with joined(deployment, SITES):
        deployment.serve("run")
        assert ended(deployment) == 0
    the_bytes_are_those_of_a_run_in_one_process(deployment)
    a_wicked_server_is_refused(deployment, monkeypatch)
    a_run_without_sums_is_refused(deployment)
    heard = deployment.heard
    assert [line for line in shown() if numbers_apart(line) not in heard] == []


@contextmanager
def joined(deployment, names):
    """Nodes are there inside the block; those of another server would look for it for a while before they come back."""
    for name in names:
        deployment.join(name, None, "--peers", "peers.txt")
    yield
    for name in names:
        deployment.end(name)


def a_wicked_server_is_refused(deployment, monkeypatch):
    place = deployment.place / "wicked"
    place.mkdir()
    (place / "sitecustomize.py").write_text(WICKED)
    since = {name: len(deployment.lines(name)) for name in SITES}
    with joined(deployment, SITES):
        with monkeypatch.context() as then:
            then.setenv("PYTHONPATH", str(place), prepend=":")
            then.setenv("WICKED", "1")
            deployment.serve("wicked-run", "run.rounds=5", "run.lost_rounds=9")
        assert ended(deployment) == 0
    assert [record.get("lost") is None for record in rounds_of(deployment.place / "wicked-run")] == [False] * 3 + [
        True
    ] * 2
    for name in SITES[1:]:  # the first one's own key was swapped, which it says in other words
        said = refusals(deployment, name, since)
        assert [re.search(pattern, line) is not None for pattern, line in zip(REFUSED, said, strict=True)] == [True] * 5
    assert "the agreement has another key for client 0 than its own" in refusals(deployment, SITES[0], since)[0]


def ended(deployment, within=400):
    return deployment.running.pop("server").wait(within)


def refusals(deployment, name, since):
    return [line for line in deployment.lines(name)[since[name] :] if line.startswith("refused to a server")]


def the_bytes_are_those_of_a_run_in_one_process(deployment):
    run, here = deployment.place / "run", deployment.place / "here"
    records = rounds_of(run)
    assert [(record.get("lost"), record["replied"]) for record in records] == [(None, [0, 1, 2, 3])] * 2
    assert all(record["secure"]["summed"] > 0 for record in records)
    experiment = resolve(read_toml(run / CONFIG))
    here.mkdir()
    execute(prepare(experiment, assemble(experiment), here), experiment, here)
    one, other = (Checkpoint.read(folder / CHECKPOINT / LAST).digest for folder in (run, here))
    assert one == other
    left = [json.loads(line) for line in (deployment.place / "state-ward-1" / "audit.jsonl").read_text().splitlines()]
    (reply, *_) = [entry for entry in left if entry["asked"] == "local_update"]
    assert set(reply["left"]) == {"header", "weights", "examples"}
    assert reply["left"]["weights"] == 0
    assert "secure sums: words" in {entry["asked"] for entry in left}


def a_run_without_sums_is_refused(deployment):
    since = {name: len(deployment.lines(name)) for name in SITES[:1]}
    with joined(deployment, SITES[:1]):
        deployment.serve("clear", "run.rounds=1", "run.secure_sums=false", "run.rounds_close.deadline_s=5")
        assert ended(deployment) != 0
    assert any("without run.secure_sums" in line for line in refusals(deployment, SITES[0], since))


def shown():
    """The lines of terminals that the page shows."""
    blocks = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]
