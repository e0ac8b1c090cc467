"""What the server makes of nodes that fail, lie, are late, go or come back."""

import json
import threading
import time
from dataclasses import replace

import pytest
from flwr.app import Error, Message
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.superlink.grid import http_grid

from potluck.core.ground.errors import WireError
from potluck.core.ground.rng import fold_in
from potluck.core.message import Message as PotluckMessage
from potluck.core.roles import Failure
from potluck.engine.client.runtime import EvalRequest, EvalResult
from potluck.engine.client.session import Answer, Call
from potluck.engine.executors import Pending
from potluck.experiment.settings.schema import RoundsClose
from potluck.flower.server.grid import GridExecutor
from potluck.flower.server.nodes import Nodes, NodesMissing, wait_for_nodes
from potluck.flower.wire.envelope import VERSION, unwrap, wrap
from potluck.flower.wire.schemas import from_job, from_outcome, to_job, to_outcome
from potluck.testing.loopback import Loopback

EMPTY = PotluckMessage().encode()


def call(client=0, record=None):
    return Call("work", client, EMPTY, record, fold_in(0, "client", 3, 1, client))


class Host:
    def full_name(self, handler):
        return f"Method.{handler}"


def answering(outcome):
    """A node that answers so, whatever it is asked."""
    return lambda message: Message(wrap(*from_outcome(outcome)), reply_to=message)


def echo(message):
    job = to_job(unwrap(message.content))
    answer = Answer(job.client, job.payload, b"f" * 32, (0.1, 1 / 3))
    return Message(wrap(*from_outcome(answer)), reply_to=message)


def play(nodes, jobs, timeout=5.0, before=lambda grid: None, quorum=1, **limits):
    grid = Loopback(nodes)
    before(grid)
    names = Nodes(grid, dict(enumerate(sorted(nodes))))
    executor = GridExecutor(names, {"run": "r"}, RoundsClose(quorum, timeout), poll=0.01, **limits)
    try:
        return list(executor.run(Host(), [Pending(lambda job=job: job) for job in jobs])), grid
    finally:
        executor.close()


def test_outcomes_come_in_the_order_of_the_jobs():
    nodes = {"a": echo, "b": echo, "c": echo}
    found, _ = play(nodes, [call(2), call(0), call(1)])
    assert [outcome.client for outcome in found] == [2, 0, 1]
    assert found[0] == Answer(2, EMPTY, b"f" * 32, (0.1, 1 / 3))


def test_a_reply_is_as_large_as_the_operator_says_where_the_method_says_nothing():
    size = len(EMPTY)
    for largest in (size, size - 1):
        ((outcome,), _) = play({"a": echo}, [call(0)], largest=largest)
        assert isinstance(outcome, Failure) == (largest < size)
    assert outcome.reason == f"its answer has {size} bytes; expected at most {size - 1}"


def test_jobs_in_a_row_with_one_payload_are_pushed_together_and_share_it():
    pushed = []

    def watch(grid):
        def push(messages):
            pushed.append([message.content.array_records["payload"] for message in messages])
            return taken(messages)

        taken, grid.push_messages = grid.push_messages, push

    shared, other = PotluckMessage(of="all").encode(), PotluckMessage(of="one").encode()
    jobs = [replace(call(client), payload=other if client == 2 else shared) for client in range(4)]
    found, _ = play(dict.fromkeys("abcd", echo), jobs, before=watch)
    assert [outcome.payload for outcome in found] == [shared, shared, other, shared]
    assert [len(records) for records in pushed] == [2, 1, 1]
    first, second = pushed[0]
    assert first is second


def test_a_message_that_the_superlink_does_not_take_costs_its_reply():
    def refuse(grid):
        grid.push_messages = lambda messages: []

    (failure,), _ = play({"a": echo}, [call()], before=refuse)
    assert failure.reason == "the SuperLink did not take the message"


def test_a_message_is_one_array_and_carries_the_name_of_what_the_node_keeps():
    _, grid = play({"a": echo}, [call(0, record=b"0" * 32)])
    (sent,) = grid.sent
    assert [len(record) for record in sent.content.array_records.values()] == [1]
    header, payload = unwrap(sent.content)
    assert to_job((header, payload)) == call(0, record=b"0" * 32)
    assert header["run"] == "r"


def test_verdicts_and_failures_cross_as_they_are():
    result = EvalResult(0, "model", b"sums")
    assert play({"a": answering(result)}, [EvalRequest(0, EMPTY, None, ("own",))])[0] == [result]
    failure = Failure(0, "Method.work", "ValueError: no", "trace")
    assert play({"a": answering(failure)}, [call()])[0] == [failure]


@pytest.mark.parametrize("reason", ["ContractError: built a Fit but never yielded it", "KeyboardInterrupt", ""])
def test_a_failure_costs_its_client_whatever_it_calls_itself(reason):
    found, _ = play({"a": answering(Failure(0, "Method.work", reason, "")), "b": echo}, [call(0), call(1)])
    assert [type(outcome) for outcome in found] == [Failure, Answer]


def raising(message):
    raise MemoryError("full")


def nonsense(message):
    return Message(wrap({"hello": 1}), reply_to=message)


def empty(message):
    reply = Message(wrap({}), reply_to=message)
    reply.__dict__["_content"] = None
    return reply


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (raising, "its app raised: MemoryError: full"),
        (nonsense, "not an outcome of Potluck's"),
        (empty, "its reply is empty"),
        (answering(EvalResult(0, "model", EMPTY)), "an evaluation in answer to a call"),
        (answering(Answer(7, EMPTY, None, ())), "its node answers for client 7"),
    ],
)
def test_what_goes_wrong_costs_one_reply(node, reason):
    (failure, answer), _ = play({"a": node, "b": echo}, [call(0), call(1)])
    assert isinstance(failure, Failure)
    assert reason in failure.reason
    assert failure.handler == "Method.work"
    assert isinstance(answer, Answer)


def test_silence_ends_at_the_deadline():
    (failure, answer), _ = play(
        {"a": echo, "b": echo}, [call(0), call(1)], timeout=0.2, before=lambda grid: grid.silent.add("a")
    )
    assert failure.reason == "no answer within 0 s"
    assert failure.late
    assert isinstance(answer, Answer)


def test_a_node_that_is_away_is_not_waited_for():
    def leave(grid):
        del grid.nodes[next(number for number, node in grid.nodes.items() if node.name == "a")]

    (failure,), grid = play({"a": echo, "b": echo}, [call(0)], before=leave)
    assert failure.reason == "its node a is not online"
    assert failure.kind == "absence"
    assert not grid.sent


def test_a_node_that_was_started_anew_has_forgotten_its_job(monkeypatch):
    monkeypatch.setattr("potluck.flower.server.grid._WATCH_EVERY", 0.05)

    def restart(grid):
        grid.silent.add("a")
        pull = grid.pull_messages

        def pulled(numbers):
            for node in grid.nodes.values():
                node.last_activated_at = "2026-01-02T00:00:00+00:00"
            return pull(numbers)

        grid.pull_messages = pulled

    (failure,), _ = play({"a": echo}, [call(0)], timeout=30, before=restart)
    assert "was restarted" in failure.reason
    assert failure.kind == "absence"


def breaks_off(grid, monkeypatch):
    """Node a announces its reply, and leaves before any part of it has come."""
    monkeypatch.setattr("potluck.flower.server.grid._WATCH_EVERY", 0.05)
    monkeypatch.setattr("potluck.flower.server.grid._STALLED", 0.2)
    pull, ended = grid.pull_messages, threading.Event()

    def unavailable(name):
        if ended.wait(0.01):
            return b""
        raise ObjectUnavailableError(name)

    def pulled(numbers):
        (number,) = numbers
        if grid._name(grid._waiting[number]) != "a" and not ended.is_set():
            return pull(numbers)
        for node in [node for node, one in grid.nodes.items() if one.name == "a"]:
            del grid.nodes[node]
        return http_grid.pull_objects(["part"], unavailable) and []

    grid.pull_messages = pulled
    return ended


def test_a_node_that_leaves_while_it_replies_is_not_waited_for(monkeypatch):
    """Flower would wait three minutes for the parts of its reply."""
    ended = []
    began = time.monotonic()
    (failure, answer), _ = play(
        {"a": echo, "b": echo},
        [call(0), call(1)],
        timeout=60,
        before=lambda grid: ended.append(breaks_off(grid, monkeypatch)),
    )
    ended[0].set()
    assert time.monotonic() - began < 10.0
    assert failure.reason == "its node left before all of its reply had come"
    assert (failure.kind, failure.unheard, failure.late) == ("absence", True, False)
    assert isinstance(answer, Answer)


def test_an_exchange_without_a_quorum_stays_open_beyond_its_deadline(caplog):
    """Two of three must answer, and two are slower than the deadline."""

    def slow(grid):
        grid.silent |= {"b", "c"}
        threading.Timer(0.5, grid.silent.discard, ["c"]).start()

    found, _ = play(dict.fromkeys("abc", echo), [call(n) for n in range(3)], 0.1, slow, quorum=2)
    assert [type(outcome) for outcome in found] == [Answer, Failure, Answer]
    assert found[1].reason.startswith("no answer within")
    assert "1 of 3 nodes have answered within 0 s, and 2 are needed; waiting for b, c" in caplog.text


def test_nodes_that_are_there_and_never_answer_are_given_up(monkeypatch):
    monkeypatch.setattr("potluck.flower.server.nodes._SLOWEST", 2)
    monkeypatch.setattr("potluck.flower.server.nodes._VANISHED_WITHIN", 0.1)
    (failure,), _ = play({"a": echo}, [call(0)], 0.1, lambda grid: grid.silent.add("a"))
    assert (failure.reason, failure.kind) == ("no answer within 0 s", "error")


def test_a_node_that_is_late_gets_no_job_before_it_is_done():
    """Nor does it cost the next exchange its deadline."""
    grid = Loopback({"a": echo, "b": echo})
    grid.silent.add("b")
    executor = GridExecutor(Nodes(grid, {0: "a", 1: "b"}), {"run": "r"}, RoundsClose(deadline_s=0.2), poll=0.01)

    def ask():
        return list(executor.run(Host(), [Pending(lambda client=client: call(client)) for client in (0, 1)]))

    assert [type(outcome) for outcome in ask()] == [Answer, Failure]
    began = time.monotonic()
    assert ask()[1] == Failure(
        1, "Method.work", "its node b is still at work on a job that was given up", kind="absence", late=True
    )
    assert time.monotonic() - began < 0.2
    assert executor.absent([0, 1]) == {1: "b"}
    assert len(grid.sent) == 3
    grid.silent.clear()
    while executor.absent([0, 1]):
        assert time.monotonic() - began < 10
    assert [type(outcome) for outcome in ask()] == [Answer, Answer]
    executor.close()


def test_a_late_node_that_was_started_anew_is_done():
    grid = Loopback({"a": echo, "b": echo})
    grid.silent.add("b")
    executor = GridExecutor(Nodes(grid, {0: "a", 1: "b"}), {"run": "r"}, RoundsClose(deadline_s=0.1), poll=0.01)
    list(executor.run(Host(), [Pending(lambda client=client: call(client)) for client in (0, 1)]))
    assert executor.absent([0, 1]) == {1: "b"}
    grid.nodes[1].last_activated_at = "2026-01-02T00:00:00+00:00"
    assert executor.absent([0, 1]) == {}
    executor.close()


@pytest.mark.parametrize(("code", "kind"), [(5, "absence"), (8, "absence"), (1, "error"), (2, "error"), (3, "error")])
def test_a_node_that_is_gone_is_told_from_one_whose_work_fails(code, kind):
    gone = lambda message: Message(Error(code, "so it is"), reply_to=message)  # noqa: E731
    (failure,), _ = play({"a": gone}, [call(0)])
    assert failure.kind == kind


def test_a_node_cannot_call_itself_absent():
    """The run would wait for it for ever, though it is there."""
    (failure,), _ = play({"a": answering(Failure(0, "Method.work", "gone", kind="absence"))}, [call(0)])
    assert failure.kind == "error"


def test_too_few_nodes_are_named():
    told, close = [], RoundsClose(patience_s=1e-9)
    with pytest.raises(
        NodesMissing, match=r"1 of 2 nodes are here: a; 2 were needed within 1e-09 s, which run.rounds_"
    ):
        wait_for_nodes(Loopback({"a": echo}), 2, 2, close, told.append)
    assert wait_for_nodes(Loopback({"b": echo, "a": echo, "c": echo}), 2, 2, close, told.append) == ["a", "b"]
    assert told == []


def test_a_run_begins_without_nodes_that_are_not_needed_once_the_deadline_has_passed(monkeypatch):
    monkeypatch.setattr("potluck.flower.server.nodes._LOOK_EVERY", 0.01)
    told, grid = [], Loopback({"b": echo, "a": echo})
    assert wait_for_nodes(grid, ["a", "b", "c"], 2, RoundsClose(deadline_s=0.05), told.append) == ["a", "b"]
    assert told == ["2 of 3 nodes are here: a, b; missing: c; the run goes on without the others after 0.05 s"]


def test_a_run_does_not_begin_with_fewer_nodes_than_are_needed(monkeypatch):
    grid, told = Loopback({"a": echo, "b": echo}), []
    late = grid.nodes.pop(1)
    monkeypatch.setattr("potluck.flower.server.nodes.time.sleep", lambda seconds: grid.nodes.update({1: late}))
    assert wait_for_nodes(grid, 3, 2, RoundsClose(deadline_s=1e-9), told.append) == ["a", "b"]
    assert told == ["1 of 3 nodes are here: a; the run goes on with 2 at the least"]


@pytest.mark.parametrize("job", [replace(call(), round=7), EvalRequest(0, EMPTY, None, ("own",), 7)])
def test_the_round_of_a_job_travels_in_its_own_words(job):
    header, payload = from_job(job, {})
    assert to_job((header, payload)) == job
    for wrong in (-1, 1.5, "7", None, 10**12):
        with pytest.raises(WireError, match="round"):
            to_job(({**header, "round": wrong}, payload))


@pytest.mark.parametrize("header", ['{"client": 0}', "[]", "no json", json.dumps({"client": "x", "handler": 1})])
def test_a_damaged_message_is_refused(header):
    from flwr.app import ConfigRecord, RecordDict

    with pytest.raises(WireError):
        to_job(unwrap(RecordDict({"potluck": ConfigRecord({"version": VERSION, "words": header})})))
    with pytest.raises(WireError):
        unwrap(RecordDict({"potluck": ConfigRecord({"version": 1, "words": "{}"})}))
    with pytest.raises(WireError):
        unwrap(RecordDict({}))


@pytest.mark.parametrize(
    "notes",
    [
        {"x": float("nan")},
        {"x": float("inf")},
        {"x": "7"},
        {"x": True},
        {"x": None},
        {"a/b": 1.0},
        {"": 1.0},
        {"x" * 65: 1.0},
        {"a\n": 1.0},
        {f"n{number}": 1.0 for number in range(33)},
        [1.0],
    ],
)
def test_notes_of_an_answer_travel_and_a_node_that_writes_others_loses_its_reply(notes):
    good = Answer(0, EMPTY, None, (), notes={"x": 0.1, "a.b-c_d": -3.0})
    assert to_outcome(from_outcome(good)) == good
    header, payload = from_outcome(good)
    envelope = {**header, "answer": {**header["answer"], "notes": notes}}, payload
    with pytest.raises(WireError, match="notes"):
        to_outcome(envelope)

    nodes = {"a": lambda message: Message(wrap(*envelope), reply_to=message), "b": echo}
    found, _ = play(nodes, [call(0), call(1)])
    assert isinstance(found[0], Failure)
    assert found[1].client == 1


class TestOneByOne:
    """Jobs that are sent one by one."""

    @pytest.fixture
    def grid(self):
        return Loopback({"a": echo, "b": echo})

    @pytest.fixture
    def executor(self, grid):
        made = GridExecutor(Nodes(grid, {0: "a", 1: "b"}), {"run": "r"}, RoundsClose(deadline_s=60.0), poll=0.01)
        yield made
        made.close()

    @staticmethod
    def begin(executor, *clients):
        for client in clients:
            executor.begin(Host(), Pending(lambda client=client: call(client)))

    def test_whoever_answers_first_is_heard_first_and_each_once(self, grid, executor):
        grid.silent.add("a")
        self.begin(executor, 0, 1)
        assert executor.ended(10).client == 1
        assert executor.ended(0.05) is None
        self.begin(executor, 1)  # which is free, while a goes on
        assert executor.ended(10).client == 1
        grid.silent.clear()
        assert executor.ended(10) == Answer(0, EMPTY, b"f" * 32, (0.1, 1 / 3))
        assert len(grid.sent) == 3

    def test_a_node_that_is_not_there_fails_at_once(self, grid, executor):
        del grid.nodes[2]  # a
        self.begin(executor, 0)
        failure = executor.ended(10)
        assert (failure.client, failure.kind, failure.reason) == (0, "absence", "its node a is not online")
        assert grid.sent == []

    def test_a_node_that_was_started_anew_has_forgotten_its_job(self, grid, executor, monkeypatch):
        monkeypatch.setattr("potluck.flower.server.grid._WATCH_EVERY", 0.0)
        grid.silent.add("a")
        self.begin(executor, 0)
        assert executor.ended(0.01) is None
        grid.nodes[2].last_activated_at = "2026-01-02T00:00:00+00:00"
        failure = executor.ended(0.01)
        assert (failure.kind, failure.unheard) == ("absence", True)
        assert "was restarted" in failure.reason
        grid.silent.clear()
        assert executor.ended(0.1) is None  # what it answers now is to nobody

    def test_a_node_that_leaves_while_it_replies_is_not_waited_for(self, grid, executor, monkeypatch):
        ended = breaks_off(grid, monkeypatch)
        self.begin(executor, 0)
        found = next(filter(None, (executor.ended(0.1) for _ in range(50))))
        ended.set()
        assert (found.kind, found.reason) == ("absence", "its node left before all of its reply had come")

    def test_a_node_that_says_nothing_is_given_up_in_the_end(self, grid, executor, monkeypatch):
        monkeypatch.setattr("potluck.flower.server.grid._WATCH_EVERY", 0.0)
        monkeypatch.setattr("potluck.flower.server.grid.longest", lambda close: 0.05)
        grid.silent.add("a")
        self.begin(executor, 0)
        found = [executor.ended(0.1) for _ in range(2)]
        failure = next(filter(None, found))
        assert (failure.kind, failure.reason) == ("error", "no answer within 0 s")
        assert failure.unheard

    def test_a_reply_of_somebody_else_or_too_long_costs_its_node_alone(self, grid, executor):
        grid._answers[2] = answering(Answer(7, EMPTY, None, ()))
        self.begin(executor, 0, 1)
        found = {outcome.client: outcome for outcome in (executor.ended(10), executor.ended(10))}
        assert found[0].reason == "its node answers for client 7"
        assert isinstance(found[1], Answer)
