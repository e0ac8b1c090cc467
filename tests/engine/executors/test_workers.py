"""Workers: the same outcomes as in one process, in the same order, whatever happens to a process."""

import logging
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from potluck.core.federation import Federation, Site
from potluck.core.ground.tree import pack
from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.roles import ClientFailure
from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.client.session import Answer, ContractError
from potluck.engine.executors import Pending
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers, can_fork
from potluck.engine.rounds.engine import Engine
from potluck.experiment.results.evaluate import evaluate

pytestmark = pytest.mark.skipif(not can_fork(), reason="this system cannot fork")


def small():
    return nn.Linear(3, 2)


def large():
    return nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 2))


def federation(clients=5):
    draws = torch.Generator().manual_seed(0)
    sites = {}
    for id in range(clients):
        size = 4 + id
        part = Examples(torch.randn(size, 3, generator=draws), torch.arange(size) % 2)
        sites[id] = Site(id, ("small", "large")[id % 2], part, part, part)
    test = Examples(torch.randn(20, 3, generator=draws), torch.arange(20) % 2)
    return Federation(sites, {"small": small, "large": large}, "small", num_classes=2, test=test)


@dataclass(frozen=True)
class Trains(Method):
    """Every client trains and says which process it was in."""

    def init(self, server):
        return {}

    def round(self, state, cohort, server):
        return dict(cohort.ask(self.work, Message(scale=2.0)))

    @on_client
    def work(self, client, message):
        client.state["rounds"] = client.state.get("rounds", 0) + 1
        yield Fit(client.model, client.objective, client.train, LocalTraining("sgd", lr=0.1, batch_size=4))
        return Message(weights=dict(client.model.state_dict()), draw=torch.rand(2), pid=os.getpid())


class Misbehaves(Trains):
    """Client 1 does what the message says."""

    def round(self, state, cohort, server):
        return dict(cohort.ask(self.work, Message(how=state["how"])))

    @on_client
    def work(self, client, message):
        if client.id == 1 and message["how"] == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if client.id == 1 and message["how"] == "raises":
            raise MemoryError("none left")
        if client.id == 1 and message["how"] == "breaks the contract":
            return 3
        return Message(id=client.id)


@dataclass(frozen=True)
class IsKilled(Trains):
    """A client's process is killed in the middle of its work, or of being evaluated, as often as a file has bytes.

    Attributes:
        file: that says how often still; each death takes a byte away. In the process that began it, it counts for none.
        victim: the client.
        while_judged: whether it happens there.
    """

    file: str
    victim: int = 1
    while_judged: bool = False
    here: int = os.getpid()

    @on_client
    def work(self, client, message):
        yield Fit(client.model, client.objective, client.train, LocalTraining("sgd", lr=0.1, batch_size=4))
        if not self.while_judged:
            self.dies(client)
        again = LocalTraining("sgd", lr=0.1, batch_size=4)
        yield Fit(client.model, client.objective, client.train, again, name="again")
        return Message(weights=dict(client.model.state_dict()), draw=torch.rand(2), pid=os.getpid())

    def inference_message(self, state, client, server):
        return Message(weights=torch.ones(3))

    def inference_model(self, client, message):
        if self.while_judged:
            self.dies(client)
        return client.model

    def dies(self, client):
        lives = Path(self.file)
        if client.id == self.victim and os.getpid() != self.here and (left := lives.stat().st_size):
            os.truncate(lives, left - 1)
            os.kill(os.getpid(), signal.SIGKILL)


class FailsAtOnce(IsKilled):
    """As `IsKilled`, but the victim raises, before its first fit."""

    @on_client
    def work(self, client, message):
        if client.id == self.victim:
            raise MemoryError("none left")
        return (yield from super().work(client, message))


@pytest.fixture
def engine():
    """Makes engines with workers, and ends their processes."""
    made = []

    def make(method, count=2, inner=None, **options):
        made.append(Engine(method, federation(), executor=Workers(count, inner), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def deaths(tmp_path):
    """A file that says how often a client's process is to be killed."""

    def allow(count):
        (tmp_path / "deaths").write_bytes(bytes(count))
        return str(tmp_path / "deaths")

    return allow


@pytest.fixture
def no_hanging():
    """A test that would wait for ever fails."""

    def give_up(*_):
        raise TimeoutError("nothing happened for 60 s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pids(state):
    return {reply["pid"] for reply in state.values()}


def without_pids(state):
    return pack({id: {name: reply[name] for name in ("weights", "draw")} for id, reply in state.items()})


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_processes_gives_the_bytes_of_one(engine, count):
    spread, alone = engine(Trains(), count), Engine(Trains(), federation())
    for number in (1, 2):
        ours, report = spread.round(number, {}, range(5))
        theirs, expected = alone.round(number, {}, range(5))
        assert without_pids(ours) == without_pids(theirs)
        assert report.losses == expected.losses
        assert report.traffic == expected.traffic
    assert [spread.store.read(id) for id in range(5)] == [alone.store.read(id) for id in range(5)]
    assert len(pids(ours)) <= count
    assert os.getpid() not in pids(ours)


def test_processes_stay_from_round_to_round(engine):
    spread = engine(Trains())
    first, _ = spread.round(1, {}, range(5))
    second, _ = spread.round(2, {}, range(5))
    assert pids(first) == pids(second)


def test_evaluation_gives_the_same_scores(engine):
    spread, alone = engine(Trains()), Engine(Trains(), federation())
    for one in (spread, alone):
        one.round(1, {}, range(5))
    assert evaluate(spread, {}) == evaluate(alone, {})
    assert spread.evaluation_traffic == alone.evaluation_traffic


def test_the_longest_task_is_taken_first_and_outcomes_keep_their_order(engine):
    host = ClientRuntime(Trains(), federation(), seed=0)
    tasks = list(tasks_of(host, costs=[1, 5, 2, 9, 3]))
    made = []

    def noting(place):
        return Pending(lambda: made.append(place) or tasks[place].make(), tasks[place].cost)

    workers = Workers(1)
    try:
        outcomes = list(workers.run(host, [noting(place) for place in range(5)]))
    finally:
        workers.close()
    assert made == [3, 1, 4, 2, 0]
    assert [outcome.client for outcome in outcomes] == [0, 1, 2, 3, 4]
    assert all(isinstance(outcome, Answer) for outcome in outcomes)


def tasks_of(host, costs):
    """A call a client of what each would be asked in a round."""
    caught = []

    class Catches(Sequential):
        def run(self, host, tasks):
            caught.extend(tasks)
            return super().run(host, tasks)

    Engine(Trains(), federation(), executor=Catches()).round(1, {}, range(5))
    return (Pending(task.make, lambda cost=cost: cost) for task, cost in zip(caught, costs, strict=True))


def test_a_process_that_dies_costs_one_reply_and_is_replaced(engine):
    spread = engine(Misbehaves(), tolerate_failures=True)
    state, report = spread.round(1, {"how": "dies"}, range(5))
    assert list(state) == [0, 2, 3, 4]
    assert "killed by SIGKILL; is there enough memory?" in report.failures[1].reason
    assert str(report.failures[1]).startswith("client 1 failed in Misbehaves.work")
    state, _ = spread.round(2, {"how": "works"}, range(5))
    assert list(state) == [0, 1, 2, 3, 4]


def test_a_failure_is_told_as_in_one_process(engine):
    messages = []
    for one in (engine(Misbehaves()), Engine(Misbehaves(), federation())):
        with pytest.raises(ClientFailure) as told:
            one.round(1, {"how": "raises"}, range(5))
        messages.append(str(told.value))
        assert list(one.round(2, {"how": "works"}, range(5))[0]) == [0, 1, 2, 3, 4]
    assert messages[0] == messages[1]


def test_a_broken_contract_is_an_error_here_with_the_workers_traceback(engine):
    with pytest.raises(ContractError, match="returned int on client 1") as told:
        engine(Misbehaves(), tolerate_failures=True).round(1, {"how": "breaks the contract"}, range(5))
    assert "In a worker process" in told.value.__notes__[0]


def test_processes_end_with_the_executor():
    spread = Engine(Trains(), federation(), executor=Workers(2))
    state, _ = spread.round(1, {}, range(5))
    spread.close()
    for pid in pids(state):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [None, 0, 1])
def test_processes_end_when_the_one_that_forked_them_is_killed(stopped):
    """Each by itself: one that was stopped keeps no other alive."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # a process of its own, that is killed without a chance to tidy up
        spread = Engine(Trains(), federation(), executor=Workers(2))
        spread.round(1, {}, range(5))
        os.write(write, ",".join(str(worker.process.pid) for worker in spread.executor._workers).encode())
        signal.pause()
        os._exit(1)
    found = [int(pid) for pid in os.read(read, 100).decode().split(",")]
    if stopped is not None:
        os.kill(left := found.pop(stopped), signal.SIGSTOP)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in found) and time.monotonic() < deadline:
        time.sleep(0.05)
    alive = [pid for pid in found if os.path.exists(f"/proc/{pid}")]
    if stopped is not None:
        os.kill(left, signal.SIGKILL)
    assert not alive


# Processes that are killed, and clients that end every process


INNER = pytest.mark.parametrize("inner", [Sequential, Stacked])


@pytest.mark.slow
@INNER
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_process_killed_in_a_round_changes_no_bit(engine, deaths, inner, count):
    spread = engine(IsKilled(deaths(1)), count, inner())
    alone = Engine(IsKilled(deaths(1)), federation(), executor=inner())
    ours, report = spread.round(1, {}, range(5))
    theirs, expected = alone.round(1, {}, range(5))
    assert not Path(deaths(0)).read_bytes()
    assert without_pids(ours) == without_pids(theirs)
    assert (report.failures, report.losses, report.traffic) == ({}, expected.losses, expected.traffic)


@INNER
def test_a_process_killed_while_it_judges_changes_no_score_and_books_nothing_twice(engine, deaths, inner):
    spread = engine(IsKilled(deaths(1), while_judged=True), 2, inner())
    alone = Engine(IsKilled(deaths(1), while_judged=True), federation(), executor=inner())
    assert evaluate(spread, {}) == evaluate(alone, {})
    assert os.path.getsize(spread.method.file) == 0
    assert spread.evaluation_traffic == alone.evaluation_traffic
    assert alone.evaluation_traffic.bytes_down == 5 * 12


@pytest.mark.slow
@INNER
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_client_that_ends_every_process_leaves_the_others_the_bits_of_a_run_where_it_fails_at_once(
    engine, deaths, inner, count
):
    spread = engine(IsKilled(deaths(100), victim=2), count, inner(), tolerate_failures=True)
    fails = FailsAtOnce(deaths(100), victim=2)
    alone = Engine(fails, federation(), executor=inner(), tolerate_failures=True)
    ours, report = spread.round(1, {}, range(5))
    theirs, expected = alone.round(1, {}, range(5))
    assert list(ours) == [0, 1, 3, 4]
    assert without_pids(ours) == without_pids(theirs)
    assert (report.losses, report.traffic) == (expected.losses, expected.traffic)
    assert report.failures[2].reason == "its worker process was killed by SIGKILL; is there enough memory?"


def test_a_client_that_ends_every_process_while_it_is_judged_costs_its_own_row(engine, deaths):
    spread = engine(IsKilled(deaths(100), while_judged=True), tolerate_failures=True)
    results = spread.evaluate({}, dict.fromkeys(range(5), ("own",)))
    assert [result.client for result in results] == [0, 2, 3, 4]
    strict = engine(IsKilled(deaths(100), while_judged=True))
    with pytest.raises(ClientFailure, match="client 1 failed in evaluation: its worker process was killed by SIGKILL"):
        strict.evaluate({}, dict.fromkeys(range(5), ("own",)))


def test_a_lost_process_is_logged_with_what_it_had(engine, deaths, caplog):
    with caplog.at_level(logging.WARNING):
        engine(IsKilled(deaths(1)), 2, Stacked()).round(1, {}, range(5))
    (told,) = [record.message for record in caplog.records]
    assert re.sub(r"\d+", "N", told, count=1) == (
        "worker process N, at work for clients 1, 3, was lost: its worker process was killed by SIGKILL; is there"
        " enough memory?; its work is done again"
    )


# Processes that are stopped


class IsStopped(Trains):
    """The second client's process stops in the middle of its work."""

    @on_client
    def work(self, client, message):
        if client.id == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return (yield from super().work(client, message))


class Reads(logging.Handler):
    """Does something with the process that a line names."""

    def __init__(self, how):
        super().__init__(logging.WARNING)
        self.how, self.told = how, []

    def emit(self, record):
        self.told.append(record.getMessage())
        if "was stopped" in self.told[-1]:
            os.kill(int(re.search(r"worker process (\d+)", self.told[-1])[1]), self.how)


@pytest.fixture
def reading(monkeypatch):
    """Has somebody read the log and act."""
    monkeypatch.setattr("potluck.engine.executors.workers._LOOK_EVERY", 0.02)
    handlers = []

    def act(how):
        handlers.append(Reads(how))
        logging.getLogger("potluck").addHandler(handlers[-1])
        return handlers[-1].told

    yield act
    for handler in handlers:
        logging.getLogger("potluck").removeHandler(handler)


def test_a_stopped_process_is_named_and_the_round_goes_on_with_it(engine, reading, no_hanging):
    told = reading(signal.SIGCONT)
    ours, report = engine(IsStopped()).round(1, {}, range(5))
    theirs, _ = Engine(Trains(), federation()).round(1, {}, range(5))
    assert without_pids(ours) == without_pids(theirs)
    (line,) = told
    assert re.match(r"worker process (\d+), at work for client 1, was stopped, and .*`kill -KILL \1` gives", line)
    assert not report.failures


def test_a_process_stopped_before_it_takes_its_work_is_named_too(engine, reading, no_hanging):
    """Also where the work is more than waits on its way."""
    told = reading(signal.SIGCONT)
    spread = engine(SendsMuch(), 1)
    state, _ = spread.round(1, {}, [0])
    os.kill(state[0]["pid"], signal.SIGSTOP)
    spread.round(2, {}, [0])
    assert len(told) == 1


class SendsMuch(Trains):
    """Five megabytes a client."""

    def round(self, state, cohort, server):
        return dict(cohort.ask(self.work, Message(much=torch.zeros(10, 128_000))))


def test_processes_end_with_the_executor_also_when_they_were_stopped(engine, no_hanging):
    spread = engine(Trains())
    state, _ = spread.round(1, {}, range(5))
    for pid in pids(state):
        os.kill(pid, signal.SIGSTOP)
    spread.close()
    for pid in pids(state):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
