"""Runs give the same bits whatever the machine: its cores, its workers, threads around, a worker that is killed."""

import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import pytest
from torch import nn

from potluck.core.ground.rng import Key
from potluck.core.method import on_client
from potluck.engine.executors.choice import choose_executor
from potluck.engine.executors.stacked import train_stacked
from potluck.engine.executors.workers import can_fork
from potluck.engine.rounds.engine import Engine
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.methods.fedavg import FedAvg
from potluck.records import CLIENTS, ROUNDS
from potluck.testing.worlds import World, quick, toy_federation

pytestmark = pytest.mark.skipif(not can_fork(), reason="this system cannot fork")


def convolves():
    """A net that no rule takes for a small one; on ten features."""
    layers = nn.Conv1d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(20, 4)
    return nn.Sequential(nn.Unflatten(1, (1, 10)), *layers)


def federation(stacked):
    """Six clients with one kind of net, which "auto" stacks or does not."""
    found = toy_federation(World(clients=6, architectures=1))
    return found if stacked else replace(found, architectures={"toy1": convolves})


def digest(folder, stacked, method=None, **config):
    """Of the run's records and its last checkpoint; and what it ran on."""
    run = Run(method or quick(FedAvg), federation(stacked), RunConfig(rounds=2, **config), folder)
    result = run.run()
    records = [(folder / name).read_bytes() for name in (ROUNDS, CLIENTS)]
    return [*records, result.checkpoint.digest], (run.choice.name, run.choice.processes)


@contextmanager
def one_core():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def a_thread_around():
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        yield
    finally:
        done.set()
        other.join()


BOTH = pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "unstacked"])


@pytest.mark.slow
@BOTH
def test_auto_gives_the_same_digest_on_every_machine(tmp_path, stacked):
    digests, found = {}, {}

    def play(name, **config):
        digests[name], found[name] = digest(tmp_path / name, stacked, **config)

    for workers in (1, 2, 3):
        play(f"{workers} workers", workers=workers)
    with a_thread_around():
        play("a thread")
    if hasattr(os, "sched_setaffinity"):
        with one_core():
            play("one core")
    assert [found[f"{count} workers"][1] for count in (1, 2, 3)] == [1, 2, 3]
    assert found["a thread"] == ("stacked" if stacked else "sequential", 1)
    assert len(digests) >= 4
    assert all(one == digests["1 workers"] for one in digests.values()), found


@pytest.mark.parametrize("threads", [1, 2])
def test_who_is_trained_together_is_the_same_with_more_torch_threads(monkeypatch, threads):
    """The bits of large products depend on `run.threads`; who is stacked with whom does not."""
    groups = []

    def counting(fits, keys, computing):
        groups.append([len(fit.data) for fit in fits])
        return train_stacked(fits, keys, computing)

    monkeypatch.setattr("potluck.engine.executors.stacked.train_stacked", counting)
    found = federation(stacked=True)
    with a_thread_around():  # so that we see it, in this process
        executor = choose_executor("auto", None, threads, [found.build("toy1", Key(()))]).executor
        engine = Engine(quick(FedAvg), found, executor=executor)
        engine.round(1, engine.start(), range(6))
    assert groups == [[40, 48, 56], [64, 72, 80]]


@dataclass(frozen=True)
class IsKilledOnce(FedAvg):
    """Client 4's process is killed once, if it is not the first one, as long as there is a file that says so."""

    file: str = ""
    here: int = 0

    @on_client
    def local_update(self, client, message):
        reply = yield from super().local_update(client, message)
        if client.id == 4 and os.getpid() != self.here and os.path.exists(self.file):
            os.unlink(self.file)
            os.kill(os.getpid(), 9)
        return reply


@pytest.mark.slow
@BOTH
def test_a_killed_worker_changes_no_bit_of_a_run(tmp_path, stacked):
    (tmp_path / "file").touch()
    method = partial(replace, quick(IsKilledOnce), here=os.getpid())
    disturbed, _ = digest(tmp_path / "disturbed", stacked, method(file=str(tmp_path / "file")), workers=2)
    assert not (tmp_path / "file").exists()
    undisturbed, _ = digest(tmp_path / "undisturbed", stacked, method(), workers=3)
    assert disturbed == undisturbed
