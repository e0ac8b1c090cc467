"""Workers: the same outcomes as in one process, in the same order, whatever happens to a process."""

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from potluck.core.examples import Examples
from potluck.core.federation import Federation, Site
from potluck.core.fit import Fit, LocalTraining
from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.core.roles import ClientFailure
from potluck.core.tree import pack
from potluck.engines.executors import Task
from potluck.engines.executors.sequential import Sequential
from potluck.engines.executors.workers import Workers, can_fork
from potluck.engines.host import ClientHost
from potluck.engines.inprocess import InProcessEngine
from potluck.engines.session import Answer, ContractError
from potluck.experiment.evaluate import evaluate

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


@pytest.fixture
def engine():
    """Makes engines with workers, and ends their processes."""
    made = []

    def make(method, count=2, **options):
        made.append(InProcessEngine(method, federation(), executor=Workers(count), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def pids(state):
    return {reply["pid"] for reply in state.values()}


def without_pids(state):
    return pack({id: {name: reply[name] for name in ("weights", "draw")} for id, reply in state.items()})


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_processes_gives_the_bytes_of_one(engine, count):
    spread, alone = engine(Trains(), count), InProcessEngine(Trains(), federation())
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
    spread, alone = engine(Trains()), InProcessEngine(Trains(), federation())
    for one in (spread, alone):
        one.round(1, {}, range(5))
    assert evaluate(spread, {}) == evaluate(alone, {})
    assert spread.evaluation_traffic == alone.evaluation_traffic


def test_the_longest_task_is_taken_first_and_outcomes_keep_their_order(engine):
    host = ClientHost(Trains(), federation(), seed=0)
    tasks = list(tasks_of(host, costs=[1, 5, 2, 9, 3]))
    made = []

    def noting(place):
        return Task(lambda: made.append(place) or tasks[place].make(), tasks[place].cost)

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

    InProcessEngine(Trains(), federation(), executor=Catches()).round(1, {}, range(5))
    return (Task(task.make, lambda cost=cost: cost) for task, cost in zip(caught, costs, strict=True))


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
    for one in (engine(Misbehaves()), InProcessEngine(Misbehaves(), federation())):
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
    spread = InProcessEngine(Trains(), federation(), executor=Workers(2))
    state, _ = spread.round(1, {}, range(5))
    spread.close()
    for pid in pids(state):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_processes_end_when_the_one_that_forked_them_is_killed():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # a process of its own, that is killed without a chance to tidy up
        spread = InProcessEngine(Trains(), federation(), executor=Workers(2))
        state, _ = spread.round(1, {}, range(5))
        os.write(write, ",".join(map(str, pids(state))).encode())
        signal.pause()
        os._exit(1)
    found = [int(pid) for pid in os.read(read, 100).decode().split(",")]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in found) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in found if os.path.exists(f"/proc/{pid}")]
