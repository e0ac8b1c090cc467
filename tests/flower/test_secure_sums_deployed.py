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
    from potluck.secure.coverage import Coverage
    from potluck.secure.server import SecureServer
    from potluck.secure.steps import ids

    what, agreed = os.environ["WICKED"], []
    begin, asked, request = SecureServer.__init__, SecureServer.asked, SecureServer.request
    adding = sums.AddingOverNodes.__call__
    own = Ed25519PrivateKey.generate().public_key().public_bytes_raw()

    def swapped(server, agreement):
        begin(server, replace(agreement, keys={**agreement.keys, 0: own}))

    def invented(server, agreement):
        of = agreement.coverage
        more = Coverage(of.summands, of.pieces, {**of.kinds, 99: 0})
        begin(server, replace(agreement, keys={**agreement.keys, 99: own}, coverage=more))

    def noted(server, agreement):
        agreed.append(agreement)
        begin(server, agreement)

    def telling(server, client):
        listed = ids({0, 2, 3} if client == 0 else {0, 1, 2, 3})
        return Message(clients=listed).encode() if server.step == 3 else request(server, client)

    def asking_more(step, payload):
        """After the sums, as all clients know them, a step again, with another request."""

        def called(self, addition):
            course, where = adding(self, addition), (addition.round, addition.exchange, step)
            jobs = [sums.SumsStep(client, payload(), *where) for client in addition.coverage.kinds]
            list(self._executor.steps([sums.Asked(lambda job=job: job, 2**20) for job in jobs], 1))
            return course

        return called

    if what == "swaps a key":
        SecureServer.__init__ = swapped
    if what == "invents a node":
        SecureServer.__init__ = invented
        SecureServer.asked = property(lambda server: tuple({*asked.fget(server)} - {99}))
    if what == "names different survivors":
        SecureServer.request, SecureServer._check = telling, lambda *arguments: None
    if what == "asks for both secrets":
        sums.AddingOverNodes.__call__ = asking_more(3, lambda: Message(clients=ids({0, 2, 3})).encode())
    if what == "repeats a round":
        SecureServer.__init__ = noted
        sums.AddingOverNodes.__call__ = asking_more(0, lambda: replace(agreed[0], least=4).encode())
'''
REFUSED = {
    "swaps a key": r"keys\): SecureRefusal: clients whose keys are not among the peers of this client's owner: 0$",
    "invents a node": r"keys\): SecureRefusal: clients whose keys are not among the peers of this client's owner: 99$",
    "names different survivors": r"shares\): SecureRefusal: .*signature is not its own, or of something else$",
    "asks for both secrets": r"signature\): SecureRefusal: it was asked for its signature again, and for others",
    "repeats a round": r"keys\): SecureRefusal: found a step of other sums than those that this node takes part in$",
}


@contextmanager
def wicked(deployment, monkeypatch, what):
    place = deployment.place / "wicked"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(WICKED)
    with monkeypatch.context() as then:
        then.setenv("PYTHONPATH", str(place), prepend=":")
        then.setenv("WICKED", what)
        yield


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
    deployment.serve("run")
    deployment.hears("server", "nodes join by")
    for name in SITES:
        deployment.carry(name)
        deployment.join(name, None, "--peers", "peers.txt")
    ended(deployment)
    the_bytes_are_those_of_a_run_in_one_process(deployment)
    for what, pattern in REFUSED.items():
        since = {name: len(deployment.lines(name)) for name in SITES}
        with wicked(deployment, monkeypatch, what):
            deployment.serve(what.replace(" ", "-"), "run.rounds=1")
        ended(deployment)
        refusing = {
            name for name in SITES if any(re.search(pattern, line) for line in refusals(deployment, name, since))
        }
        assert refusing >= ({"ward-1"} if "survivors" in what else {*SITES[1:]}), (what, deployment.lines("ward-2"))
    a_run_without_sums_is_refused(deployment)
    heard = deployment.heard
    assert [line for line in shown() if numbers_apart(line) not in heard] == []


def ended(deployment, within=240):
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
    since = {name: len(deployment.lines(name)) for name in SITES}
    deployment.serve("clear", "run.rounds=1", "run.secure_sums=false", "run.rounds_close.patience_s=5")
    ended(deployment)
    for name in SITES:
        assert any("without run.secure_sums" in line for line in refusals(deployment, name, since))


def shown():
    """The lines of terminals that the page shows."""
    blocks = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]
