"""Workers that are started anew: the bits of one process, whatever is sent to them and whatever happens to them."""

import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from potluck.core.ground.errors import ConfigError
from potluck.engine.executors.choice import ChosenExecutor
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.results.evaluate import evaluate
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.watching.observers import Observer
from potluck.methods import get_method
from potluck.records import CHECKPOINT, LAST, Checkpoint
from potluck.testing.checks.subjects import all_bytes, engine_for
from potluck.testing.worlds import run_rounds

OWN = '''
from potluck.methods.fedavg import FedAvg


class Mine(FedAvg):
    """The same by another name."""
'''


@pytest.fixture
def started():
    """Makes engines whose workers are started anew, and ends their processes."""
    made = []

    def make(method, inner=None):
        made.append(engine_for(get_method(method), executor=Workers(2, inner, anew=True)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def alive(pid):
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.slow
@pytest.mark.parametrize("inner", [Sequential, Stacked])
@pytest.mark.parametrize("method", ["fedavg", "fedin", "feddf", "fedproto"])
def test_they_give_the_bits_of_one_process(started, method, inner):
    spread, alone = started(method, inner()), engine_for(get_method(method), executor=inner())
    ours, theirs = ((engine, run_rounds(engine, 2)) for engine in (spread, alone))
    assert all_bytes(ours) == all_bytes(theirs)
    assert evaluate(*ours) == evaluate(*theirs)


@pytest.mark.slow
def test_one_that_is_killed_is_replaced_and_changes_no_bit(started):
    spread, alone = started("fedavg"), engine_for(get_method("fedavg"))
    state, ids = run_rounds(spread, 1), sorted(spread.federation.sites)
    pids = [worker.process.pid for worker in spread.executor._workers]
    assert os.getpid() not in pids
    os.kill(pids[0], signal.SIGKILL)
    state, report = spread.round(2, state, ids)
    assert not report.failures
    assert all_bytes((spread, state)) == all_bytes((alone, run_rounds(alone, 2)))
    assert pids[1] in [worker.process.pid for worker in spread.executor._workers]
    pids = [worker.process.pid for worker in spread.executor._workers]
    spread.close()
    assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_they_end_when_the_one_that_started_them_is_killed():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # a process of its own, that is killed without a chance to tidy up
        spread = engine_for(get_method("fedavg"), executor=Workers(2, anew=True))
        run_rounds(spread, 1)
        os.write(write, ",".join(str(worker.process.pid) for worker in spread.executor._workers).encode())
        signal.pause()
        os._exit(1)
    found = [int(pid) for pid in os.read(read, 100).decode().split(",")]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    deadline = time.monotonic() + 10
    while any(map(alive, found)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, found))


def test_what_cannot_be_sent_is_refused_in_one_line():
    engine = engine_for(get_method("fedavg"), executor=Workers(2, anew=True))
    locked = {name: partial(_built, build, threading.Lock()) for name, build in engine.federation.architectures.items()}
    engine.runtime._federation = replace(engine.federation, architectures=locked)
    with pytest.raises(ConfigError, match=r"be sent to another process: TypeError: .*lock.*expected 'sequential'"):
        run_rounds(engine, 1)


def _built(build, lock):
    return build()


@pytest.mark.slow
def test_a_method_from_a_file_goes_with_them(tmp_path):
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    digests = []
    for name, executor in (("anew", Workers(2, anew=True)), ("alone", Sequential())):
        (folder := tmp_path / name).mkdir()
        found = resolve(
            {
                "federation": {"dataset": "digits", "train_fraction": 0.2, "clients": 3, "models": ["cnn2"]},
                "method": {"name": f"{tmp_path}/own.py:Mine"},
                "run": {"rounds": 2},
            }
        )
        choice = ChosenExecutor(executor, name, 1, "tried here")
        execute(prepare(found, assemble(found), folder, choice), found, folder, Observer.of())
        digests.append(Checkpoint.read(folder / CHECKPOINT / LAST).digest)
    assert digests[0] == digests[1]
