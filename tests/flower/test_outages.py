"""What becomes of a served run whose nodes are away for a while: it waits, and no round is counted without them."""

import json

import pytest
from flwr.app import Error, Message

from potluck.core.ground.errors import ConfigError
from potluck.core.roles import ClientFailure
from potluck.experiment.watching.observers import Observer
from potluck.experiment.watching.progress import Standing
from potluck.flower import HELLO, JOB
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.service import NodeService
from potluck.flower.server.nodes import NodesMissing
from potluck.flower.server.serve import serve
from potluck.flower.wire.envelope import unwrap, wrap
from potluck.records import CHECKPOINT, CLIENTS, LAST, MANIFEST, ROUNDS, Checkpoint
from potluck.testing.loopback import Loopback

NODE_GONE = 5


def tree(rounds=3, clients=3, **close):
    federation = {
        "dataset": "digits",
        "train_fraction": 0.05,
        "clients": clients,
        "models": [{"name": "cnn2", "width": 4}],
    }
    run = {"rounds": rounds, "executor": "sequential", "tolerate_failures": True, "rounds_close": close}
    return {"federation": federation, "method": {"name": "fedavg"}, "run": run}


def all_at(*jobs):
    """All nodes go in the middle of these jobs."""
    return {name: set(jobs) for name in "abc"}


class Site(Loopback):
    """Nodes a, b and c, some of which go away when they get their n-th job, and come back when somebody has waited.

    Args:
        folder: for their states.
        goes: by node, the jobs in whose middle it goes.
        waits: how often the server looks before all are back.
    """

    def __init__(self, folder, goes=None, waits=3):
        self.goes, self.waits, self.looks = goes or {}, waits, 0
        self.jobs = dict.fromkeys("abc", 0)
        services = {name: NodeService(NodeConfig(folder / name)) for name in "abc"}
        super().__init__({name: self._node(name, services[name]) for name in "abc"})
        self.away = {}

    def _node(self, name, service):
        def answer(message):
            if message.metadata.message_type == JOB:
                self.jobs[name] += 1
                if self.jobs[name] in self.goes.get(name, ()):
                    self.leave(name)
                    return Message(Error(NODE_GONE, "Node Unavailable"), reply_to=message)
            return Message(
                wrap(*service.answer(message.metadata.message_type, unwrap(message.content))), reply_to=message
            )

        return answer

    def leave(self, *names):
        number = {node.name: number for number, node in self.nodes.items()}
        self.away |= {number[name]: self.nodes.pop(number[name]) for name in names if name in number}

    def look(self):
        self.looks += 1
        if self.looks % self.waits == 0:
            self.nodes |= self.away
            self.away.clear()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("potluck.engine.rounds.clock._LOOK_EVERY", 0.0)
    monkeypatch.setattr("potluck.flower.server.nodes._LOOK_EVERY", 0.01)


@pytest.fixture
def played(tmp_path):
    """Serves an experiment; returns what it said, how it stood whenever it waited, and the run's folder."""

    def play(site, of):
        said, seen = [], []
        folder = tmp_path / "run"
        serve(site, of, folder, say=said.append, observers=[Watching(site, seen)])
        return said, seen, folder

    return play


class Watching(Standing):
    def __init__(self, site, seen):
        super().__init__()
        self._site, self._seen = site, seen

    def on_waiting(self, event):
        super().on_waiting(event)
        self._seen.append((event, self.progress.words))
        self._site.look()


def found_in(folder):
    return [(folder / name).read_bytes() for name in (ROUNDS, CLIENTS)], Checkpoint.read(folder / CHECKPOINT / LAST)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """What a run without any outage leaves."""
    place = tmp_path_factory.mktemp("calm")
    serve(Site(place / "nodes"), tree(), place / "run", say=lambda line: None)
    return found_in(place / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("goes", "quorum"),
    [
        (all_at(3), 1),  # in the middle of round 2; a node gets two jobs a round, a call and its model to evaluate
        (all_at(4), 1),  # while models are evaluated
        (all_at(6), 1),  # at the very end
        ({"a": {3}, "b": {3}}, 2),
    ],
)
def test_an_outage_of_any_length_leaves_the_run_where_it_was(goes, quorum, played, tmp_path, calm):
    said, seen, folder = played(Site(tmp_path / "nodes", goes, waits=50), tree(quorum=quorum))
    assert found_in(folder) == calm
    assert json.loads((folder / MANIFEST).read_text())["status"] == "finished"
    here, number = 3 - len(goes), 3 if 6 in goes["a"] else 2
    assert len(seen) == 50
    assert {words for _, words in seen} == {f"waiting: {here} of 3 clients are there"}
    missing = ", ".join(f"{name} (client {client})" for client, name in enumerate("abc") if name in goes)
    assert said[0].startswith(f"round {number} is undone and tried again: {here} of 3 clients were there to the end")
    assert said[1:] == [
        f"round {number} waits: {here} of 3 clients are there, and {quorum} are needed; missing: {missing}",
        f"round {number} goes on",
    ]


def test_a_round_that_nobody_can_join_is_not_begun(tmp_path):
    site, begun, said = Site(tmp_path / "nodes"), [], []

    class All(Observer):
        def on_round_start(self, event):
            begun.append((event.round, len(site.nodes)))

        def on_round_end(self, event):
            if event.round == 1:
                site.leave(*"abc")

        def on_waiting(self, event):
            site.look()

    serve(site, tree(rounds=2), tmp_path / "run", say=said.append, observers=[All()])
    assert begun == [(1, 3), (2, 3)]
    assert said == [
        "round 2 waits: 0 of 3 clients are there, and 1 are needed; missing: a (client 0), b (client 1), c (client 2)",
        "round 2 goes on",
    ]


def test_reminders_are_rare(played, tmp_path, monkeypatch):
    monkeypatch.setattr("potluck.experiment.running.run._REMIND_EVERY", 0.0)
    said, seen, _ = played(Site(tmp_path / "nodes", all_at(1), waits=5), tree(rounds=1))
    assert len([line for line in said if "waits: " in line]) == len(seen) == 5


@pytest.mark.slow
def test_patience_ends_the_wait_with_an_error_and_the_run_is_resumed(played, tmp_path, calm):
    site = Site(tmp_path / "nodes", all_at(3), waits=10**9)
    with pytest.raises(ClientFailure, match=r"round 2 waited for 1e-09 s: 0 of 3 clients are there, .*patience_s"):
        played(site, tree(patience_s=1e-9))
    folder = tmp_path / "run"
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["status"] == "failed"
    assert "patience_s sets how long" in manifest["reason"]
    assert len((folder / ROUNDS).read_text().splitlines()) == 1
    site.nodes |= site.away
    played(site, tree())
    assert found_in(folder) == calm


def test_nodes_that_leave_in_the_middle_every_time_end_the_run(played, tmp_path):
    """Such as those that the job itself kills."""
    site = Site(tmp_path / "nodes", all_at(*range(3, 99)), waits=1)
    of = tree(rounds=2)
    of["run"]["lost_rounds"] = 4
    with pytest.raises(ClientFailure, match="round 2 was undone 4 times in a row, the last time because: 0 of 3"):
        played(site, of)
    assert site.jobs == dict.fromkeys("abc", 2 + 4)
    assert len((tmp_path / "run" / ROUNDS).read_text().splitlines()) == 1


def test_a_quorum_that_answers_goes_on_without_the_others(played, tmp_path):
    site = Site(tmp_path / "nodes", {"c": {3}}, waits=10**9)
    said, seen, folder = played(site, tree(quorum=2))
    records = [json.loads(line) for line in (folder / ROUNDS).read_text().splitlines()]
    assert [record["replied"] for record in records] == [[0, 1, 2], [0, 1], [0, 1]]
    assert (said, seen) == ([], [])


def test_errors_of_nodes_that_are_there_lose_rounds_as_before(played, tmp_path):
    """Absence is waited for; refusals are counted, and too many end the run."""
    site = Site(tmp_path / "nodes")
    of = tree(rounds=9, quorum=3)
    of["run"]["lost_rounds"] = 2
    broken, site._answers[1] = site._answers[1], lambda message: Message(Error(2, "no"), reply_to=message)
    site._answers[1] = lambda message: broken(message) if message.metadata.message_type == HELLO else raising()
    with pytest.raises(ClientFailure, match="2 rounds in a row were lost, the last one, 2, because: 2 of 3 clients"):
        played(site, of)


def raising():
    raise MemoryError("no room")


@pytest.mark.slow
def test_one_absent_node_does_not_stop_the_start(played, tmp_path):
    site = Site(tmp_path / "nodes")
    site.leave("b")
    said, _, folder = played(site, tree(rounds=1, quorum=2, deadline_s=1.0))
    assert said == [
        "2 of 3 nodes are here: a, c; the run goes on without the others after 1 s",
        "2 of 3 nodes take part; continuing without the others",
    ]
    assert json.loads((folder / ROUNDS).read_text())["replied"] == [0, 1]


def test_all_are_needed_where_no_failure_is_tolerated(played, tmp_path):
    site = Site(tmp_path / "nodes")
    site.leave("b")
    of = tree(rounds=1, patience_s=0.01)
    of["run"]["tolerate_failures"] = False
    with pytest.raises(NodesMissing, match="2 of 3 nodes are here: a, c; 3 were needed within"):
        played(site, of)


def test_a_quorum_beyond_the_cohort_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="quorum: expected at most the 3 of a cohort, found 4"):
        serve(Loopback({}), tree(quorum=4), tmp_path)


def test_keeping_rounds_is_refused_where_clients_keep_their_states(tmp_path):
    with pytest.raises(ConfigError, match="keep_every: found 1; expected none with clients on other machines"):
        serve(Loopback({}), {**tree(), "run": {"rounds": 1, "keep_every": 1}}, tmp_path)


def test_a_twin_is_refused_where_clients_take_their_own_time(tmp_path):
    with pytest.raises(ConfigError, match="twin: expected none with clients on other machines"):
        serve(Loopback({}), {**tree(), "run": {"rounds": 1, "twin": {}}}, tmp_path)


@pytest.mark.slow
def test_of_more_nodes_than_are_needed_the_first_count(played, tmp_path):
    """One of three never answers, and the exchange closes without waiting for its deadline."""

    class Slow(Site):
        def pull_messages(self, message_ids):
            [silent] = [number for number, node in self.nodes.items() if node.name == "b"]
            asked = {number: self._waiting[number].metadata for number in message_ids if number in self._waiting}
            heard = [n for n, of in asked.items() if of.message_type == HELLO or of.dst_node_id != silent]
            return super().pull_messages(heard)

    of = tree(rounds=1, quorum=2, deadline_s=600.0, over_select=0.5)
    of["run"]["cohort_fraction"] = 0.67
    _, _, folder = played(Slow(tmp_path / "nodes"), of)
    record = json.loads((folder / ROUNDS).read_text())
    assert len(record["cohort"]) == 3
    assert len(record["replied"]) == 2
    [why] = record["failed"].values()
    assert why.startswith("no answer within 0 s")
