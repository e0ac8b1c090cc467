"""What each node of a server is, by what its keys, its run and its gate say."""

from datetime import UTC, datetime, timedelta

import pytest

from potluck.cli.status.account import Account
from potluck.cli.status.overview import AWAY_AFTER, Company
from potluck.experiment.watching.observers import RunStart
from potluck.flower import EVALUATION, GREETING
from potluck.flower.deploy.keys import add_node, certify, revoke_node
from potluck.flower.deploy.sightings import Sighting, Sightings
from potluck.flower.server.hosting import NodeRefused
from potluck.records import ACCURACY, Progress, RoundRecord

NOW = 2e9


def company(**facts):
    usual = {"at": NOW, "round": 3, "clients": {"a": 0, "b": 1, "c": 2}, "refused": {}, "until": {}}
    return Company(**{**usual, "registered": frozenset("abcd"), "sightings": {}, **facts})


def seen(**facts):
    return Sighting(**{"host": "192.0.2.1", "last": NOW - 1, **facts})


@pytest.mark.parametrize(
    ("facts", "state", "doing"),
    [
        ({}, "never seen", "has not come since this server began"),
        ({"sightings": None}, "not known", "a SuperLink that is not ours serves it"),
        ({"sightings": {"a": seen(work="3", since=NOW - 9)}}, "at work", "works on round 3"),
        ({"sightings": {"a": seen(work="2", since=1.0)}}, "at work", "works on round 2, which went on without it"),
        ({"sightings": {"a": seen(work=EVALUATION, since=1.0)}}, "at work", "evaluates its model"),
        ({"sightings": {"a": seen(work=GREETING, since=1.0)}, "clients": {}}, "at work", "introduces itself"),
        ({"sightings": {"a": seen()}}, "idle", "waits to be asked"),
        ({"sightings": {"a": seen(answered="2")}}, "idle", "waits to be asked"),
        ({"sightings": {"a": seen(answered="hello")}, "clients": {}}, "idle", "waits for the run to begin"),
        ({"sightings": {"a": seen(answered="3")}}, "idle", "has answered in round 3"),
        (
            {"sightings": {"a": seen(answered="3"), **{name: seen(work="3") for name in "bc"}}},
            *("idle", "has answered in round 3; waits for b, c"),
        ),
        (
            {"sightings": {"a": seen(answered="3"), **{name: seen(work="3") for name in "bcdef"}}},
            *("idle", "has answered in round 3; waits for b, c, d and 2 more"),
        ),
        (
            {"sightings": {"a": seen(answered=EVALUATION), "c": seen(work=EVALUATION)}},
            *("idle", "has evaluated its model; waits for c"),
        ),
        ({"sightings": {"a": seen(last=NOW - AWAY_AFTER - 1, work="3")}}, "away", "says nothing any more"),
        ({"sightings": {"a": seen(left=True)}}, "away", "has left"),
        ({"until": {0: 3}}, "set aside", "is not drawn up to round 3, since it was late too often"),
        (
            {"until": {0: 9}, "sightings": {"a": seen(work="2")}},
            *("set aside", "is not drawn up to round 9, since it was late too often; works on round 2,"),
        ),
        ({"until": {0: 2}, "sightings": {"a": seen()}}, "idle", "waits to be asked"),
        ({"registered": frozenset("bcd")}, "takes no part", "its key is revoked, or was never registered"),
        (
            {"clients": {"b": 1}, "refused": {"a": "it has three legs"}, "sightings": {"a": seen()}},
            *("takes no part", "it has three legs"),
        ),
        ({"clients": {"b": 1}, "sightings": {"a": seen()}}, "takes no part", "came when the run had begun"),
        ({"registered": None, "sightings": {"a": seen()}}, "idle", "waits to be asked"),
    ],
)
def test_a_node_is_what_is_known_of_it(facts, state, doing):
    found = company(**facts).standing("a")
    assert found.state == state
    assert found.doing.startswith(doing)


def test_all_are_listed_of_whom_anything_is_known():
    found = company(clients={"a": 0}, refused={"e": "no"}, registered=frozenset("bd"), sightings={"f": seen()})
    assert found.names() == ["a", "b", "d", "e", "f"]


def record(number, **facts):
    empty = dict.fromkeys(RoundRecord.__dataclass_fields__)
    sent = {"bytes_down": 10, "bytes_up": 5, "bytes_evaluation": 1}
    return RoundRecord(**{**empty, "round": number, "cohort": [0, 1], "replied": [0], "failed": {}, **sent, **facts})


class Start(RunStart):
    def earlier(self):
        return [record(1, failed={"1": "its node b is not online"}), record(2, lost="nobody answered")]


class Clock:
    now = NOW

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def begun(account, run, sightings=None):
    account.begin(Start("fedavg", 9, 2, 2, 2, ACCURACY, folder=run), sightings)
    return account


def test_earlier_rounds_and_new_ones_add_up(run, clock):
    account = begun(Account(None, clock), run)
    account.take(record(3, failed={"1": "no answer within 9 s", "0": "it raised"}, late=[1], set_aside={"1": 5}))
    found = account.look()
    assert (found.done, found.lost, found.bytes_down, found.bytes_up, found.bytes_evaluation) == (3, 1, 30, 15, 3)
    assert [(one.round, one.name, one.late) for one in found.failures] == [
        *((3, "client 0", False), (3, "client 1", True), (1, "client 1", False)),
    ]
    assert [one.round for one in found.finished] == [3, 2, 1]
    assert found.last_end == NOW
    assert found.name == "run"


def test_an_overview_is_a_second_old_at_most_and_says_since_when_a_round_goes_on(run, clock):
    account = begun(Account(None, clock), run)
    first = account.look()
    assert account.look() is first
    clock.now += 30
    account.take(Progress("fedavg", "training", 3, 9, 1, 2, 2.2))
    assert account.look().round_since == NOW + 30
    clock.now += 30
    account.take(Progress("fedavg", "evaluation", 3, 9, 0, 2, 2.9))
    assert account.look().round_since == NOW + 30
    assert account.look().progress.phase == "evaluation"


def test_keys_decide_who_is_shown_and_their_ends_are(run, tmp_path, clock):
    clock.now = datetime.now(UTC).timestamp()
    certify(tmp_path / "keys", [], days=5)
    for name in "ab":
        add_node(tmp_path / "keys", name)
    sightings = Sightings()
    sightings.note("a", Sighting("192.0.2.1", clock.now), down=7, up=3)
    account = begun(Account(tmp_path / "keys", clock), run, sightings)
    account.take(NodeRefused("b", "it has\nthree \x1b[2Jlegs"))
    found = account.look()
    assert [(node.name, node.state) for node in found.nodes] == [("a", "idle"), ("b", "takes no part")]
    assert found.nodes[1].doing == "it has three [2Jlegs"
    assert (found.nodes[0].sighting.bytes_down, found.nodes[0].sighting.bytes_up) == (7, 3)
    assert found.ends.keys() == {"server.crt", "ca.crt"}
    assert timedelta(days=4) < found.ends["server.crt"] - datetime.now(UTC) <= timedelta(days=5)
    revoke_node(tmp_path / "keys", "a")
    clock.now += 2
    assert account.look().nodes[0].state == "takes no part"


def test_the_size_of_the_folder_is_looked_up_now_and_then(run, clock):
    (run / "inner").mkdir()
    (run / "inner" / "file").write_bytes(b"x" * 1000)
    account = begun(Account(None, clock), run)
    assert account.look().disk == 1000
    (run / "other").write_bytes(b"x" * 500)
    clock.now += 5
    assert account.look().disk == 1000
    clock.now += 30
    assert account.look().disk == 1500
    assert account.look().free > 0


def test_lines_are_kept_as_they_were_said_and_no_longer_than_lines(clock):
    account = Account(None, clock)
    for number in range(100):
        account.hear(f"line {number}\x1b[2J " + "x" * 1000)
    said = account.look().said
    assert len(said) == 30
    assert said[0][1].startswith("line 99 [2J x")
    assert max(len(line) for _, line in said) <= 500


def test_sightings_add_up_and_have_an_end():
    sightings = Sightings()
    for number in range(2000):
        sightings.note(str(number), Sighting(last=number))
    assert len(sightings.look()) == 1024
    sightings.note("1999", Sighting(last=5.0), up=3, why="a reason")
    sightings.note("1999", Sighting(last=6.0), up=4)
    found = sightings.look()["1999"]
    assert (found.last, found.bytes_up, found.refused, found.why) == (6.0, 7, 1, "a reason")
