"""Nodes of which nothing is asked hear why, once, in their own terminals."""

import queue
import re
from pathlib import Path

import pytest
from flwr.app import Message

from potluck.core.roles import ClientFailure
from potluck.engine.answers.events import ClientEnd
from potluck.experiment.running.run import Run
from potluck.experiment.settings.aside import AsideRule
from potluck.experiment.settings.schema import RoundsClose, RunConfig
from potluck.experiment.watching.observers import RoundStart, RunEnd, RunStart
from potluck.flower.node.audit import in_words
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.service import NodeService
from potluck.flower.server.telling import Telling
from potluck.flower.wire.envelope import unwrap, wrap
from potluck.methods import get_method
from potluck.records import ACCURACY, RoundRecord
from potluck.testing.loopback import Loopback
from potluck.testing.worlds import World, quick, toy_federation
from potluck.twin.devices import Twin, TwinDevice

GUIDE = Path(__file__).parents[3] / "docs/guides/operate.md"
RULE = AsideRule(late=1, of=2, rest=2)
NAMES = {0: "a", 1: "b", 2: "c"}
NOT_DRAWN = "takes no part, says the server: not drawn for round {}, but perhaps for a later one"
OVER = "takes no part, says the server: the run has ended"


def record(number, **facts):
    empty = dict.fromkeys(RoundRecord.__dataclass_fields__)
    return RoundRecord(**{**empty, "round": number, "cohort": [0, 1, 2], "replied": [], "failed": {}, **facts})


def trained(client, failure=None):
    return ClientEnd(1, "training", 1, "local_update", client, 1, 3, None, failure, 0.1)


class Terminals:
    """Nodes with services of their own, and the lines of their terminals as they come."""

    def __init__(self, folder, names="abcd"):
        self.heard = {name: queue.SimpleQueue() for name in names}
        self.grid = Loopback({name: self._node(name, folder / name) for name in names})

    def _node(self, name, home):
        config = NodeConfig(home)
        service = NodeService(config)

        def answer(message):
            reply = service.answer(message.metadata.message_type, unwrap(message.content))
            self.heard[name].put(in_words(config.audit_log.read_text().splitlines()[-1]))
            return Message(wrap(*reply), reply_to=message)

        return answer

    def next(self, name):
        return self.heard[name].get(timeout=30)

    def is_quiet(self):
        """Whether every node was told no more than was read."""
        return all(lines.empty() for lines in self.heard.values())


@pytest.fixture
def terminals(tmp_path):
    return Terminals(tmp_path)


@pytest.fixture
def telling(terminals):
    found = Telling(terminals.grid, NAMES, "run-1", RULE.words)
    found.on_run_start(RunStart("fedavg", 9, 0, 3, 3, ACCURACY))
    yield found
    found._replies.close()


def test_the_guide_shows_what_both_terminals_say(terminals, telling, caplog):
    server, node = re.findall(r"^```text\n(.*?)^```", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)
    telling.on_round_end(record(1, late=[2], set_aside={"2": 3}))
    telling.on_round_start(RoundStart(2, (0,)))
    said = [terminals.next(name) for name in "cbd"]
    telling.on_client_end(trained(0))
    telling.on_run_end(RunEnd("finished", 2))
    assert [*said, terminals.next("a")] == node.splitlines()
    slow = Twin((TwinDevice(clients="2", latency_s=9.0), TwinDevice()))
    closes = RoundsClose(deadline_s=1.0, set_aside=RULE)
    config = RunConfig(rounds=1, executor="sequential", tolerate_failures=True, twin=slow, rounds_close=closes)
    Run(quick(get_method("fedavg")), toy_federation(World(clients=3)), config).run()
    assert [one.getMessage() for one in caplog.records if getattr(one, "on_screen", False)] == server.splitlines()


def test_a_node_is_told_once_until_it_is_drawn_again(terminals, telling):
    del terminals.grid.nodes[1]  # d, who is none of the run's
    for number, cohort in enumerate([(0, 1), (0, 1), (0, 1, 2), (1, 2), (0, 1)], start=1):
        telling.on_round_start(RoundStart(number, cohort))
        if number in (1, 5):
            assert terminals.next("c") == NOT_DRAWN.format(number)
        if number == 4:
            assert terminals.next("a") == NOT_DRAWN.format(number)
        assert terminals.is_quiet()


def test_whoever_rests_is_told_so_by_a_server_that_was_started_again_too(terminals, tmp_path):
    class Start(RunStart):
        def earlier(self):
            return [record(1, set_aside={"1": 4}), record(2)]

    telling = Telling(terminals.grid, NAMES, "run-1", RULE.words, refused=["d"])
    telling.on_run_start(Start("fedavg", 9, 2, 3, 3, ACCURACY))
    telling.on_round_start(RoundStart(3, (0, 2)))
    assert terminals.next("b") == f"takes no part, says the server: set aside up to round 4, since {RULE.words}"
    telling.on_round_start(RoundStart(5, (0, 2)))
    assert terminals.next("b") == NOT_DRAWN.format(5)
    assert terminals.is_quiet(), "d has heard before why it was refused"
    telling._replies.close()


def test_in_rounds_that_draw_clients_one_by_one_only_strangers_are_told(terminals, telling):
    telling.on_round_start(RoundStart(1, ()))
    assert terminals.next("d").endswith("the run began without it; it may take part in the next one")
    assert terminals.is_quiet()


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        ("finished", None, OVER),
        ("failed", ClientFailure("too many"), f"{OVER} early; it may go on later"),
        ("failed", SystemExit(0), None),
        ("interrupted", KeyboardInterrupt(), None),
    ],
)
def test_at_the_end_everybody_is_told_and_only_those_who_answer_are_waited_for(
    status, error, expected, terminals, telling
):
    for client in NAMES:
        telling.on_client_end(trained(client, "late" if client == 2 else None))
    terminals.grid.silent.add("c")  # it is at work on what came too late, and nobody waits for it
    telling.on_run_end(RunEnd(status, 2, error=error))
    asked = {message.metadata.dst_node_id for message in terminals.grid.sent}
    assert asked == ({4, 3, 2} if expected else set())
    if expected:
        assert [terminals.next(name) for name in "ab"] == [expected] * 2
    assert terminals.is_quiet()


def test_a_node_that_is_away_is_not_told(terminals, telling):
    terminals.grid.nodes.clear()
    telling.on_round_start(RoundStart(1, (0,)))
    telling.on_run_end(RunEnd("finished", 1))
    assert terminals.grid.sent == []
