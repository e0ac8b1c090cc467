"""A copy of a run's folder, made while the run goes on, is gone on with to the same bytes, or refused in one line."""

import random
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest

from potluck.core.ground.errors import CheckpointError
from potluck.engine.disk.files import Disk, using
from potluck.experiment.federation.assemble import Assembly
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.presets import experiment_for
from potluck.records import BEST, CHECKPOINT, LAST, LOG, Checkpoint
from potluck.testing.worlds import World, toy_federation

ROUNDS = 4
RECORDS = ("config.toml", "rounds.jsonl", "clients.jsonl", f"{CHECKPOINT}/{LAST}")
WITH_BEST = (*RECORDS, f"{CHECKPOINT}/{BEST}")
ASSEMBLY = Assembly(toy_federation(World(clients=2, architectures=1)), "data", "parts")
METHODS = ("local", "fedavg")  # what clients keep, and what the server does


class Moments(Disk):
    """A disk of which the content of a folder is remembered after each step."""

    def __init__(self, folder):
        self._folder, self.seen = folder, []

    def look(self):
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        self.seen.append({path.relative_to(self._folder): path.read_bytes() for path in files})

    def write(self, path, content):
        super().write(path, content)
        self.look()

    def append(self, path, content):
        super().append(path, content)
        self.look()

    def rename(self, source, target):
        super().rename(source, target)
        self.look()

    def remove(self, path):
        super().remove(path)
        self.look()


def played(method, folder):
    words = ["method.training.epochs=1", "method.training.batch_size=64", "run.executor=sequential"]
    experiment = experiment_for(method, [*words, "run.common_test=false", f"run.rounds={ROUNDS}"])
    execute(prepare(experiment, ASSEMBLY, folder), experiment, folder)
    return {name: (folder / name).read_bytes() for name in WITH_BEST if (folder / name).is_file()}


@pytest.fixture(scope="module", params=METHODS)
def course(request, tmp_path_factory):
    """A method's run: its name, what its folder held at each moment, and what it holds at the end."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    folder.mkdir()
    moments = Moments(folder)
    with using(moments):
        whole = played(request.param, folder)
    return request.param, moments.seen, whole


@contextmanager
def copied(place, moments, draw):
    """A copy of which each file is of a moment of its own, as a program makes it that knows nothing of the run."""
    folder, last = place / "copy", draw.randrange(len(moments))
    within = moments[max(0, last - draw.choice((1, 5, 20, 60))) : last + 1]
    for name in {name for moment in within for name in moment}:
        if (content := draw.choice(within).get(name)) is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    folder.mkdir(exist_ok=True)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.every_commit
def test_a_copy_of_a_run_that_goes_on_is_gone_on_with_or_refused(course, tmp_path):
    method, moments, whole = course
    draw, same, refused = random.Random(7), 0, list[str]()
    for drawn in range(480):
        if drawn >= 120 and min(same, len(refused)) > 10:  # how rare one of them is depends on the machine's pace
            break
        with copied(tmp_path, moments, draw) as folder:
            try:
                found = played(method, folder)
            except CheckpointError as error:
                refused.append(str(error))
                continue
            assert {name: found[name] for name in RECORDS} == {name: whole[name] for name in RECORDS}
            if found.get(WITH_BEST[-1]) != whole[WITH_BEST[-1]]:
                assert WITH_BEST[-1] not in found
                assert "best.json is missing; the run continues without it" in (folder / LOG).read_text()
            same += 1
    assert min(same, len(refused)) > 10
    assert not [line for line in refused if "\n" in line]


def test_a_copy_whose_best_round_is_of_another_moment_is_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    played("local", folder)
    place = folder / CHECKPOINT / BEST
    best = Checkpoint.read(place)
    place.write_bytes(replace(best, round=best.round - 1).sealed())
    with pytest.raises(CheckpointError, match=f"names {best.round} as the best one: the folder is a copy of files"):
        played("local", folder)
