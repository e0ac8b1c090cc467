"""What all tests share: one torch thread, a measure of CPU time, a watch on threads and torch's global generator."""

import gc
import subprocess
import threading
import time
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from potluck.methods import list_methods
from potluck.recipes import list_recipes

LIMIT_SECONDS = 2.0  # on an idle core of today
CPU_SECONDS = "cpu seconds"  # what a worker's report calls them

METHODS, RECIPES = list_methods(), list_recipes()
TURNS = 6  # commits at each of which a sixth of what has turns is run
EVENLY = 42  # a start of the checksum with which the long tests are spread evenly over the turns
LATE = 10  # commits whose changes are tested whoever's turn it is,
SWEEPING = 40  # if they change fewer files: new names all over the house are no method's own
FEW = 12  # methods that say the name of a part: with it, they count as changed
NO_PARAMETERS = SimpleNamespace(params={})

torch.set_num_threads(1)

# Derandomised, so that a failure belongs to the change that shows it; no deadline, as machines are shared.
settings.register_profile(
    "potluck", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("potluck")


def pytest_addoption(parser):
    parser.addoption("--all-turns", action="store_true", help="run the tests whose turn is at another commit, too")


def pytest_collection_modifyitems(config, items):
    """Leave out tests whose turn is at another commit, unless what they test has changed of late."""
    rests = resting_now(config)
    resting = [item for item in items if (files := tested_in_turn(item)) and rests(item.nodeid, *files)]
    config.hook.pytest_deselected(items=resting)
    left_out = set(resting)
    items[:] = [item for item in items if item not in left_out]


def tested_in_turn(item):
    """The files, or the folder with a final /, that a test is about if it has turns; none if it runs at every commit.

    Turns have a method's own tests, what is marked `rotates`, and what is slow. The mark names the file, or a parameter
    names a method or a recipe; what else is slow is about the folder of the code that mirrors its own.
    """
    if item.path.parent.name == "methods" and (name := item.path.stem.removeprefix("test_")) in METHODS:
        return f"src/potluck/methods/{name}.py", f"tests/methods/{item.path.name}"
    mark, slow = (item.get_closest_marker(name) for name in ("rotates", "slow"))
    if mark is not None and mark.args:
        return mark.args
    if item.get_closest_marker("every_commit") or (mark is None and slow is None):
        return ()
    return (named_by_a_parameter(item) or mirrored(item),)


def named_by_a_parameter(item):
    """The file of the method or the recipe that a parameter of a test names."""
    values = {value for value in getattr(item, "callspec", NO_PARAMETERS).params.values() if isinstance(value, str)}
    files = [f"src/potluck/methods/{name}.py" for name in METHODS if name in values]
    files += [f"src/potluck/recipes/{name}.toml" for name in RECIPES if name in values]
    return next(iter(files), None)


def mirrored(item):
    """The folder of the code that has the same place as a test's folder; of a test about the whole, its own file."""
    place = item.path.relative_to(item.config.rootpath / "tests")
    return f"src/potluck/{place.parent.as_posix()}/" if place.parent.name else f"tests/{place.name}"


def resting_now(config):
    """Whether a test, or a part of one, by its name and what it tests, has its turn at another commit."""
    if config.getoption("--all-turns"):
        return lambda name, *files: False
    now, changed = turn(config.rootpath), changed_of_late(config.rootpath)
    return lambda name, *files: crc32(name.encode(), EVENLY) % TURNS != now and not are_among(files, changed)


def are_among(files, changed):
    """Whether one of these files, or one in a folder, is among those that have changed."""
    return any(one.startswith(file) if file.endswith("/") else one == file for file in files for one in changed)


def git(root, *words):
    """What git says of a checkout; nothing where there is none, as in a source distribution."""
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    return done.stdout


def turn(root):
    """Whose turn it is at this commit."""
    return int(git(root, "rev-parse", "HEAD").strip() or "0", 16) % TURNS


def changed_of_late(root):
    """The files that the last commits have changed, and what is not committed, without what a sweeping change has.

    With them the methods of a changed part that few have: of one that many have, a sixth is tested at any commit.
    """
    committed = git(root, "log", f"-{LATE}", "--name-only", "--format=%x00").split("\0")
    changes = [change.split() for change in (*committed, git(root, "diff", "--name-only", "HEAD"))]
    changed = {file for change in changes if len(change) < SWEEPING for file in change}
    users = [users_of(root, Path(file).stem) for file in changed if file.startswith("src/potluck/parts/")]
    return changed.union(*(files for files in users if len(files) <= FEW))


def users_of(root, part):
    """The files of the methods that say a part's name."""
    places = {name: f"src/potluck/methods/{name}.py" for name in METHODS}
    return [file for file in places.values() if (root / file).exists() and f"fl.{part}." in (root / file).read_text()]


@pytest.fixture(scope="session", autouse=True)
def everything_is_warm():
    """The first optimiser imports much of torch, the first text tabulates Unicode: no test is charged."""
    given(st.text())(lambda text: None)()
    weight = nn.Parameter(torch.zeros(1))
    weight.sum().backward()
    for optimizer in (torch.optim.Adam([weight], fused=True), torch.optim.SGD([weight], lr=0.1, fused=True)):
        optimizer.step()


@pytest.fixture(scope="session")
def in_turn(pytestconfig):
    """The methods whose turn it is, for a test that takes many of them to the same real processes."""
    rests = resting_now(pytestconfig)
    return [name for name in METHODS if not rests(name, f"src/potluck/methods/{name}.py")]


@pytest.fixture
def days_ago(monkeypatch):
    """Keys and certificates that are made inside a block are as old as that."""

    @contextmanager
    def made(days):
        class Then(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.now(tz) - timedelta(days=days)

        with monkeypatch.context() as then:
            for module in ("certificates", "keys"):
                then.setattr(f"potluck.flower.deploy.{module}.datetime", Then)
            yield

    return made


def pytest_collection_finish():
    """Freeze the collected tests, so that collecting garbage among them is charged to no test's CPU budget."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Beside another thread no workers are forked: a test that left one would change what later tests see."""
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(2.0)
    assert not [thread for thread in left if thread.is_alive()]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Note what a test computed for; CPU time is measured, so that waiting for other processes is charged to nobody."""
    started = time.process_time()
    result = yield
    if item.get_closest_marker("slow") is None:
        item.user_properties.append((CPU_SECONDS, time.process_time() - started))
    return result


def pytest_terminal_summary(terminalreporter):
    """Name the tests that want the mark `slow`. A machine three times slower than another fails nobody."""
    spent = {
        report.nodeid: seconds
        for report in terminalreporter.stats.get("passed", [])
        for name, seconds in report.user_properties
        if name == CPU_SECONDS and report.when == "call" and seconds > LIMIT_SECONDS
    }
    if spent:
        terminalreporter.section(f"above {LIMIT_SECONDS:g} s of CPU time, without the mark `slow`")
    for nodeid, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{seconds:.1f} s {nodeid}")


@pytest.fixture
def global_generator_unchanged():
    """The test must leave torch's global generator as it found it."""
    before = torch.default_generator.get_state()
    yield
    assert torch.equal(torch.default_generator.get_state(), before), "the test drew from the global generator"
