"""Private releases are counted by the node that makes them, whatever becomes of its reply, and of the server."""

import json
import math
from dataclasses import replace

import pytest
from flwr.app import Message

from potluck.core.ground.errors import CheckpointError, WireError
from potluck.core.method import Releases
from potluck.engine.answers.ledger import Ledger
from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.client.session import Answer
from potluck.engine.rounds.engine import Engine
from potluck.experiment.settings.schema import RoundsClose
from potluck.flower.node.service import Node
from potluck.flower.node.store import NodeStore
from potluck.flower.server.elsewhere import KeptElsewhere
from potluck.flower.server.grid import GridExecutor
from potluck.flower.server.nodes import Nodes
from potluck.flower.wire.envelope import unwrap, wrap
from potluck.flower.wire.schemas import from_outcome, to_job, to_outcome
from potluck.methods import get_method
from potluck.parts.privacy import FeaturePrivacy
from potluck.testing.loopback import Loopback
from potluck.testing.worlds import World, quick, toy_federation

PRIVATE = replace(quick(get_method("fedin")), privacy=FeaturePrivacy(1.0, 1.0, 1e-5))
WORLD = World(clients=2)


class House:
    """Two nodes, and a server that may be started again and again.

    Attributes:
        fate: by client, what becomes of its next replies: it "arrives", is "late", or the client is "away".
        lie: by client, words of its next answers that are not true.
    """

    def __init__(self, place, method=PRIVATE):
        self.fate = {0: "arrives", 1: "arrives"}
        self.lie = {0: {}, 1: {}}
        self.failures = {}
        self._place, self._method = place, method
        self._grid = Loopback({f"node{id}": self._answer(id) for id in (0, 1)})
        self.serve()

    def serve(self):
        """A server that goes on from before the first round, with what it has on disk."""
        nodes = Nodes(self._grid, {0: "node0", 1: "node1"})
        executor = GridExecutor(nodes, {"run": "r"}, RoundsClose(deadline_s=1.0), poll=0.01)
        federation = toy_federation(WORLD)
        self._engine = Engine(
            self._method,
            federation,
            store=KeptElsewhere(),
            executor=executor,
            tolerate_failures=True,
            ledger=Ledger(self._place / "releases.json"),
        )
        self._state, self._number = self._engine.start(), 0

    def round(self, *ids):
        """One round; what the server then knows."""
        self._number += 1
        try:
            self._state, report = self._engine.round(self._number, self._state, ids or (0, 1))
            self.failures = report.failures
        except Exception as error:
            assert "no client answered" in str(error)  # noqa: PT017
        return self._engine.ledger.releases

    def _answer(self, id):
        def answer(message):
            if self.fate[id] == "away":
                raise ConnectionError("unplugged")
            host = ClientRuntime(self._method, toy_federation(WORLD), seed=0)  # a node may be started anew for each job
            node = Node(id, toy_federation(WORLD), host, NodeStore(self._place / f"node{id}"))
            outcome = node.execute(to_job(unwrap(message.content)))
            if self.fate[id] == "late":
                raise TimeoutError("too late")
            return Message(wrap(*from_outcome(replace(outcome, **self.lie[id]))), reply_to=message)

        return answer


@pytest.fixture
def house(tmp_path):
    for id in (0, 1):
        (tmp_path / f"node{id}").mkdir()
    return House(tmp_path)


def test_every_answer_is_counted(house, tmp_path):
    house.round()
    assert house.round(0) == {0: Releases(2), 1: Releases(1)}
    assert [json.loads((tmp_path / f"node{id}" / "releases.json").read_text()) for id in (0, 1)] == [2, 1]


def test_a_reply_that_came_too_late_may_have_been_a_release_until_the_node_says_that_it_was(house):
    house.round()
    house.fate[1] = "late"
    house.round()
    assert house.round() == {0: Releases(3), 1: Releases(1, unheard=2)}
    house.fate[1] = "arrives"
    assert house.round() == {0: Releases(4), 1: Releases(4)}


def test_a_node_that_did_nothing_is_cleared_by_its_own_count(house):
    house.round()
    house.fate[1] = "away"
    assert house.round()[1] == Releases(1, unheard=1)
    house.fate[1] = "arrives"
    assert house.round()[1] == Releases(2)


def test_a_server_that_goes_back_to_a_checkpoint_takes_no_release_back(house):
    house.round()
    house.round()
    house.serve()
    assert house.round() == {0: Releases(3), 1: Releases(3)}


def test_a_server_that_was_killed_among_its_nodes_still_counts_those_it_never_hears_of_again(house, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(self, poll):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("potluck.flower.server.grid._Exchange.wait", killed)
        with pytest.raises(Killed):
            house.round()
    house.serve()
    assert house.round(0) == {0: Releases(1), 1: Releases(0, unheard=1)}


def test_a_node_that_has_lost_its_count_is_not_believed_to_have_released_less(house, tmp_path):
    house.round()
    house.round()
    (tmp_path / "node1" / "releases.json").unlink()
    assert house.round() == {0: Releases(3), 1: Releases(3)}


@pytest.mark.parametrize("lie", [{"released": 10**9}, {"released": 3}, {"releases": 10**9}, {"releases": 2}])
def test_a_false_count_costs_its_reply_and_not_the_statement(house, lie):
    house.round()
    house.lie[1] = lie
    known = house.round()
    assert known == {0: Releases(2), 1: Releases(1, unheard=1)}  # it may have released what nobody took
    (claimed,) = lie.values()
    assert list(house.failures) == [1]
    assert house.failures[1].kind == "misfit"
    assert f"it claims {claimed} private releases in " in house.failures[1].reason
    said = PRIVATE.privacy_statement(known)
    assert f"epsilon {shown(PRIVATE.privacy.spent(2))} " in said
    assert "of any of the 2 clients" in said
    house.lie[1] = {}
    assert house.round() == {0: Releases(3), 1: Releases(3)}
    assert not house.failures


def test_a_server_that_was_started_anew_still_knows_how_often_it_asked(house):
    house.fate[1] = "late"
    for _ in range(3):
        house.round()
    house.serve()
    house.fate[1], house.lie[1] = "arrives", {"released": 5}
    assert house.round()[1] == Releases(0, unheard=4)
    house.lie[1] = {}
    assert house.round()[1] == Releases(5)


def shown(epsilon):
    """As a statement shows it: three digits, rounded up."""
    return f"{math.ceil(epsilon * 100) / 100:g}"


def test_a_node_keeps_no_count_of_what_is_not_private(tmp_path):
    for id in (0, 1):
        (tmp_path / f"node{id}").mkdir()
    assert House(tmp_path, replace(PRIVATE, privacy=None)).round() == {}
    assert not list(tmp_path.rglob("releases.json"))


def test_a_damaged_count_costs_the_reply_and_is_said(house, tmp_path):
    house.round()
    (tmp_path / "node1" / "releases.json").write_text("many")
    with pytest.raises(CheckpointError, match=r"releases\.json is damaged"):
        NodeStore(tmp_path / "node1").count(1)
    assert house.round() == {0: Releases(2), 1: Releases(1, unheard=1)}


@pytest.mark.parametrize("wrong", [-1, 2**31, 1.0, True, "3", [1], float("nan")])
@pytest.mark.parametrize("word", ["releases", "released"])
def test_a_count_that_is_none_is_refused(word, wrong):
    header, payload = from_outcome(Answer(0, b"", None, (), 1, 2))
    assert to_outcome((header, payload)) == Answer(0, b"", None, (), 1, 2)
    header["answer"][word] = wrong
    with pytest.raises(WireError, match="not an outcome of Potluck's: answer"):
        to_outcome((header, payload))
