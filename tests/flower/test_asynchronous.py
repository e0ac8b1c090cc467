"""Served runs whose rounds are asynchronous: nodes are asked one by one, and nobody waits for a slow one."""

import json
import threading
from dataclasses import replace

import pytest
from flwr.app import Error, Message

from potluck.core.ground.errors import ConfigError
from potluck.experiment.federation.assemble import assemble, assemble_server
from potluck.experiment.running.asynchrony import check_asynchronous_nodes
from potluck.experiment.running.run import Run
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.watching.observers import Observer
from potluck.flower import EVALUATION, HELLO, JOB
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.service import NodeService
from potluck.flower.server.serve import serve
from potluck.flower.wire.envelope import unwrap, wrap
from potluck.records import CHECKPOINT, CLIENTS, COSTS, LAST, ROUNDS, Checkpoint
from potluck.testing.loopback import Loopback

NODE_GONE = 5
NAMES = "abc"
TWO = {"rule": "fedbuff", "buffer": 2}
ALL = {"rule": "fedbuff", "buffer": 3, "staleness": 0}


def tree(rounds=5, rule=None, method="fedavg", **close):
    federation = {
        "dataset": "digits",
        "train_fraction": 0.05,
        "clients": len(NAMES),
        "models": [{"name": "cnn2", "width": 4}],
    }
    close = {"deadline_s": 60.0, **({"asynchronous": rule} if rule else {}), **close}
    run = {"rounds": rounds, "executor": "sequential", "tolerate_failures": True, "rounds_close": close}
    return {"federation": federation, "method": {"name": method}, "run": run}


class Site(Loopback):
    """Nodes a, b and c.

    Args:
        folder: for their states.

    Attributes:
        slow: nodes that are at work for as long as they are here.
        goes: nodes that go when they get their next job.
        away: those that have gone, by number.
    """

    def __init__(self, folder):
        self.slow, self.goes, self.away = set(), set(), {}
        services = {name: NodeService(NodeConfig(folder / name)) for name in NAMES}
        super().__init__({name: self._node(name, services[name]) for name in NAMES})
        self.numbers = {node.name: number for number, node in self.nodes.items()}

    def _node(self, name, service):
        def answer(message):
            if message.metadata.message_type != HELLO and name in self.goes:
                self.goes.discard(name)
                self.leave(name)
                return Message(Error(NODE_GONE, "Node Unavailable"), reply_to=message)
            return Message(
                wrap(*service.answer(message.metadata.message_type, unwrap(message.content))), reply_to=message
            )

        return answer

    def pull_messages(self, message_ids):
        asked = {number: self._waiting[number].metadata for number in message_ids if number in self._waiting}
        at_work = {self.numbers[name] for name in self.slow}
        done = [n for n, of in asked.items() if of.message_type == HELLO or of.dst_node_id not in at_work]
        return super().pull_messages(done)

    def leave(self, name):
        self.away[self.numbers[name]] = self.nodes.pop(self.numbers[name])

    def all_are_back(self):
        self.nodes |= self.away
        self.away.clear()

    def jobs_of(self, name):
        """The groups of a node's jobs."""
        to_it = [of.metadata for of in self.sent if of.metadata.dst_node_id == self.numbers[name]]
        return [of.group_id for of in to_it if of.message_type == JOB]


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "nodes")


class Course(Observer):
    """What happens at the end of rounds, when an evaluation begins, and when the run waits."""

    def __init__(self, ends=None, evaluates=None, waits=lambda: None):
        self.ends, self.evaluates, self.waits = ends or {}, evaluates or {}, waits

    def on_round_end(self, event):
        self.ends.get(event.round, lambda: None)()

    def on_evaluation_start(self, event):
        self.evaluates.get(event.round, lambda: None)()

    def on_waiting(self, event):
        self.waits()


def served(site, folder, of, say=lambda line: None, **course):
    """The records of a served run."""
    serve(site, of, folder, say=say, observers=[Course(**course)])
    return [json.loads(line) for line in (folder / ROUNDS).read_text().splitlines()]


def evaluated_in(folder, number):
    lines = map(json.loads, (folder / CLIENTS).read_text().splitlines())
    return [line["client"] for line in lines if line["round"] == number]


def found_in(folder):
    records = [(folder / name).read_bytes() for name in (ROUNDS, CLIENTS, COSTS)]
    return [*records, Checkpoint.read(folder / CHECKPOINT / LAST).digest]


@pytest.mark.slow
def test_rounds_close_without_a_slow_node_and_its_reply_counts_when_it_comes(site, tmp_path):
    site.slow.add("c")
    turn = {3: lambda: site.slow.symmetric_difference_update("ac"), 4: site.slow.clear}
    records = served(site, tmp_path / "run", tree(rule=TWO), ends=turn)
    assert [record["replied"] for record in records[:4]] == [[0, 1]] * 3 + [[1, 2]]
    assert [record.get("stale") for record in records[:4]] == [None] * 3 + [{"2": 3}]
    assert len(records) == 5
    assert not any("lost" in record or record["failed"] for record in records)


@pytest.mark.slow
def test_between_rounds_nodes_at_work_are_not_evaluated_and_after_the_last_one_those_that_are_done_in_time(
    site, tmp_path
):
    site.slow.add("c")
    served(site, tmp_path / "run", tree(3, TWO, deadline_s=0.5))
    assert [evaluated_in(tmp_path / "run", number) for number in (1, 2, 3)] == [[0, 1]] * 3
    assert site.jobs_of("c") == ["1", EVALUATION]
    assert site.jobs_of("a").count(EVALUATION) == 3


@pytest.mark.slow
def test_the_last_evaluation_waits_for_nodes_at_work(site, tmp_path):
    site.slow.add("c")
    done = {2: lambda: threading.Timer(0.3, site.slow.clear).start()}
    served(site, tmp_path / "run", tree(2, TWO), evaluates=done)
    assert [evaluated_in(tmp_path / "run", number) for number in (1, 2)] == [[0, 1], [0, 1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedrep", "fedproto", "local"])
def test_with_a_place_in_the_buffer_for_everybody_it_is_the_served_run_that_waits(site, tmp_path, method):
    served(site, tmp_path / "a", tree(3, ALL, method))
    served(Site(tmp_path / "others"), tmp_path / "b", tree(3, None, method))
    assert found_in(tmp_path / "a") == found_in(tmp_path / "b")


@pytest.mark.slow
def test_a_server_that_was_stopped_asks_anew_what_was_under_way_and_loses_no_round(site, tmp_path):
    """The node goes on with what the dead server had asked, and answers it, before it is asked anew."""

    class Stopped(Exception):
        pass

    def stop():
        raise Stopped

    site.slow.add("c")
    of, said = tree(5, TWO, "fedrep"), []
    with pytest.raises(Stopped):
        served(site, tmp_path / "run", of, ends={2: stop})
    assert site.jobs_of("c") == ["1"]
    to_it = {number: of for number, of in site._waiting.items() if of.metadata.dst_node_id == site.numbers["c"]}
    [unheard] = [number for number, of in to_it.items() if of.metadata.message_type == JOB]
    site.slow.clear()
    assert list(site.pull_messages([unheard]))
    records = served(site, tmp_path / "run", of, said.append)
    assert said == ["round 3: client 2 is asked anew, since it had not answered when the run was stopped"]
    assert site.jobs_of("c")[1] == "3"
    assert [record["round"] for record in records] == [1, 2, 3, 4, 5]
    assert not any("lost" in record or record["failed"] for record in records)
    late = [(record["round"], record["stale"]["2"]) for record in records if "2" in record.get("stale", {})]
    assert all(rounds <= number - 3 for number, rounds in late), late


@pytest.mark.slow
def test_a_node_that_goes_in_the_middle_is_replaced_and_asked_again_when_it_is_back(site, tmp_path):
    site.goes.add("c")
    records = served(site, tmp_path / "run", tree(4, TWO), ends={2: site.all_are_back})
    [(number, why)] = [(record["round"], record["failed"]) for record in records if record["failed"]]
    assert number <= 2
    assert why["2"].startswith("its node is gone")
    assert not any("lost" in record for record in records)
    assert len(records) == 4
    assert "3" in site.jobs_of("c")


@pytest.mark.slow
def test_an_outage_of_all_nodes_leaves_the_run_where_it_was(site, tmp_path, monkeypatch):
    monkeypatch.setattr("potluck.engine.rounds.clock._LOOK_EVERY", 0.0)
    served(Site(tmp_path / "others"), tmp_path / "calm", tree(3, ALL))
    said = []
    served(
        *(site, tmp_path / "run", tree(3, ALL), said.append),
        ends={1: lambda: site.goes.update(NAMES)},
        waits=site.all_are_back,
    )
    assert found_in(tmp_path / "run") == found_in(tmp_path / "calm")
    missing = "a (client 0), b (client 1), c (client 2)"
    assert said == [
        "round 2 is undone and tried again: nobody is at work, and of those that could be asked nobody is there",
        f"round 2 waits: 0 of 3 clients are there, and 1 are needed; missing: {missing}",
        "round 2 goes on",
    ]


@pytest.mark.slow
def test_an_evaluation_in_between_from_which_all_nodes_go_has_no_scores_and_undoes_nothing(site, tmp_path, monkeypatch):
    monkeypatch.setattr("potluck.engine.rounds.clock._LOOK_EVERY", 0.0)
    go = {1: lambda: site.goes.update(NAMES)}
    records = served(site, tmp_path / "run", tree(2, ALL), evaluates=go, waits=site.all_are_back)
    assert [record["replied"] for record in records] == [[0, 1, 2]] * 2
    assert [evaluated_in(tmp_path / "run", number) for number in (1, 2)] == [[], [0, 1, 2]]


@pytest.mark.slow
def test_with_fewer_nodes_than_the_buffer_has_places_all_of_them_fill_it(site, tmp_path):
    site.leave("b")
    records = served(site, tmp_path / "run", tree(2, ALL, deadline_s=0.5))
    assert [len(record["replied"]) for record in records] == [2, 2]


def test_a_method_that_cannot_have_it_is_refused_in_one_line_before_any_node_hears_of_it(site, tmp_path):
    with pytest.raises(ConfigError, match=r"FedIN cannot have it: its messages differ from round to round") as found:
        served(site, tmp_path / "run", tree(rule=TWO, method="fedin"))
    assert "\n" not in str(found.value)
    assert site.sent == []


def test_without_examples_on_which_to_try_it_the_server_says_what_it_lacks():
    experiment = resolve(tree(rule=TWO))
    with pytest.raises(ConfigError, match=r"is tried on examples of .*, and digits is not on this machine"):
        check_asynchronous_nodes(experiment, replace(assemble_server(experiment), test=None))


def test_clients_in_one_process_have_it_by_a_twin_alone():
    expected = r"rounds_close\.asynchronous: expected none without run\.twin, by whose clock .*, found 'fedbuff'$"
    experiment = resolve(tree(rule=TWO))
    with pytest.raises(ConfigError, match=expected) as found:
        assemble(experiment)
    assert "\n" not in str(found.value)
    federation = assemble(resolve(tree())).federation
    with pytest.raises(ConfigError, match=expected):
        Run(experiment.method, federation, experiment.run)
