"""Several runs at a time, each a process of its own."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from potluck.core.ground.errors import PotluckWarning
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.folder.folder import new_folder, run_digest
from potluck.experiment.running.execute import execute, holding, prepare
from potluck.experiment.running.several import found, rounds_done, run_several
from potluck.experiment.settings.resolve import resolve

SMALL = {"train_fraction": 0.1, "clients": 3, "models": [{"name": "cnn2", "width": 4}]}


def experiment_of(method="fedavg", rounds=2, seed=0, **settings):
    tree = {"federation": SMALL, "method": {"name": method, **settings}, "run": {"rounds": rounds, "seed": seed}}
    return resolve(tree)


def run_here(experiment, parent):
    folder = new_folder(parent, experiment)
    execute(prepare(experiment, assemble(experiment), folder), experiment, folder)
    return folder


def ends_of(news):
    return {one.index: one.ended for one in news if one.ended is not None}


def test_found__knows_a_run_by_configuration_seed_and_length(tmp_path):
    experiment = experiment_of()
    folder = run_here(experiment, tmp_path)
    others = [experiment_of(seed=1), experiment_of(rounds=3), experiment_of(training={"lr": 0.5})]
    (tmp_path / "notes.txt").write_text("no run")
    (tmp_path / "empty").mkdir()
    assert found(tmp_path, [experiment, *others]) == [folder, None, None, None]
    elsewhere = replace(experiment, run=replace(experiment.run, executor="sequential", workers=1))
    assert found(tmp_path, [elsewhere]) == [folder]
    assert found(tmp_path / "nowhere", [experiment]) == [None]


@pytest.mark.slow
def test_found__takes_the_run_that_came_furthest(tmp_path):
    experiment = experiment_of()
    done = run_here(experiment, tmp_path)
    begun = new_folder(tmp_path, experiment)
    prepare(experiment, assemble(experiment), begun).close()
    assert (rounds_done(done), rounds_done(begun)) == (2, 0)
    assert found(tmp_path, [experiment]) == [done]


def test_found__another_code_is_another_run(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("from potluck.methods.local import Local\n\n\nclass Own(Local):\n    pass\n")
    experiment = experiment_of(str(file))
    folder = run_here(experiment, tmp_path / "runs")
    assert found(tmp_path / "runs", [experiment]) == [folder]
    file.write_text(file.read_text() + "\n\n# changed\n")
    assert found(tmp_path / "runs", [experiment]) == [None]


def test_run_several__finished_runs_are_not_run_again(tmp_path):
    experiment = experiment_of()
    folder = run_here(experiment, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (news,) = run_several([experiment], tmp_path, 2)
    assert (news.ended.folder, news.ended.problem, news.round) == (folder, None, 2)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.slow
def test_run_several__gives_what_single_runs_give_and_one_that_fails_ends_alone(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text(
        "from potluck.methods.fedavg import FedAvg\n\n\nclass Broken(FedAvg):\n"
        "    def round(self, state, cohort, server):\n        raise RuntimeError('too bad')\n"
    )
    killed = tmp_path / "killed.py"
    killed.write_text(
        "import os\nfrom potluck.methods.fedavg import FedAvg\n\n\nclass Killed(FedAvg):\n"
        "    def round(self, state, cohort, server):\n        os.kill(os.getpid(), 9)\n"
    )
    needy = experiment_of("fedmd")  # there are no public data
    experiments = [experiment_of(str(broken)), experiment_of(seed=1), experiment_of(str(killed)), needy]
    ends = ends_of(run_several(experiments, tmp_path / "runs", 2))
    assert "too bad" in ends[0].problem
    assert ends[1].problem is None
    assert "signal SIGKILL" in ends[2].problem
    assert "it needs public data" in ends[3].problem
    assert ends[3].folder is None
    assert run_digest(ends[1].folder) == run_digest(run_here(experiment_of(seed=1), tmp_path / "alone"))


@pytest.mark.slow
def test_run_several__goes_on_where_it_was_stopped(tmp_path):
    experiment = experiment_of(rounds=6)
    news = run_several([experiment], tmp_path / "runs", 1)
    seen = next(one for one in news if one.round >= 2)
    assert seen.ended is None
    news.close()  # as when the sweep is interrupted
    folder = next((tmp_path / "runs").glob("*/manifest.json")).parent
    assert 2 <= rounds_done(folder) < 6
    ends = ends_of(run_several([experiment], tmp_path / "runs", 1))
    assert (ends[0].folder, ends[0].problem) == (folder, None)
    assert run_digest(folder) == run_digest(run_here(experiment, tmp_path / "alone"))


@pytest.mark.slow
def test_run_several__leaves_no_process_behind(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    news = run_several([experiment_of(rounds=200), experiment_of(rounds=200, seed=1)], tmp_path / "runs", 2)
    started = [next(one for one in news if one.index == index and one.round) for index in (0, 1)]
    assert len(started) == 2
    processes = runs_of(os.getpid())
    assert len(processes) == 2
    news.close()
    assert not [process for process in processes if Path(f"/proc/{process}").exists()]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_run_several__its_processes_end_when_it_is_killed(tmp_path):
    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    command = [sys.executable, "-c", f"{here}; import test_several; test_several.endless({str(tmp_path)!r})"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as sweep:
        assert sweep.stdout is not None
        assert sweep.stdout.readline()  # both have finished a round
        processes = runs_of(sweep.pid)
        assert len(processes) == 2
        sweep.kill()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline, "a run goes on without its sweep"
        time.sleep(0.1)


def endless(parent):
    begun = set()
    for news in run_several([experiment_of(rounds=10_000), experiment_of(rounds=10_000, seed=1)], Path(parent), 2):
        begun |= {news.index} if news.round else set()
        if len(begun) == 2:
            sys.stdout.write("begun\n")
            sys.stdout.flush()


@pytest.mark.slow
def test_run_several__two_at_once_share_the_work(tmp_path):
    experiments, parent = [experiment_of(rounds=4, seed=seed) for seed in range(3)], tmp_path / "runs"
    first = run_several(experiments, parent, 1)
    assert next(first).index == 0  # its process works on the first run from here on
    heard = list(run_several(experiments, parent, 1))
    assert [news.index for news in heard if news.waits] == [0]
    ends = ends_of([*first])
    assert {index: (end.folder, end.problem) for index, end in ends_of(heard).items()} == {
        index: (end.folder, None) for index, end in ends.items()
    }
    assert len(list(parent.glob("*/manifest.json"))) == 3
    assert run_digest(ends[0].folder) == run_digest(run_here(experiments[0], tmp_path / "alone"))


@pytest.mark.slow
def test_run_several__takes_over_what_a_killed_sweep_has_left(tmp_path):
    experiment, parent = experiment_of(rounds=30), tmp_path / "runs"
    first = run_several([experiment], parent, 1)
    assert next(first).index == 0
    second = run_several([experiment], parent, 1)
    assert next(second).waits
    (process,) = runs_of(os.getpid())
    os.kill(process, signal.SIGKILL)
    ends = ends_of(second)
    assert ends[0].problem is None
    (folder,) = parent.glob("*/manifest.json")
    assert folder.parent == ends[0].folder
    assert rounds_done(folder.parent) == 30
    first.close()


@pytest.mark.slow
def test_run_several__waits_for_a_run_that_somebody_started_alone(tmp_path):
    experiment, parent = experiment_of(rounds=3), tmp_path / "runs"
    folder = new_folder(parent, experiment)
    with holding(folder):
        run = prepare(experiment, assemble(experiment), folder)
        news = run_several([experiment], parent, 1)
        assert next(news).waits
        execute(run, experiment, folder)
    ends = ends_of(news)
    assert (ends[0].folder, ends[0].problem) == (folder, None)
    assert len(list(parent.glob("*/manifest.json"))) == 1


@pytest.mark.slow
def test_found__a_damaged_run_is_named_and_run_again(tmp_path):
    experiment = experiment_of()
    older, newer = run_here(experiment, tmp_path), run_here(experiment, tmp_path)
    assert found(tmp_path, [experiment]) == [newer]
    (newer / "rounds.jsonl").write_text("")
    with pytest.warns(PotluckWarning, match=r"run again: .*rounds\.jsonl, which is missing or empty, is damaged"):
        assert found(tmp_path, [experiment]) == [older]
    place = older / "rounds.jsonl"
    place.write_text(place.read_text().replace('"round": 1', '"round": 3', 1))
    with pytest.warns(PotluckWarning, match="run again"):
        assert found(tmp_path, [experiment]) == [None]
    assert found(tmp_path, [experiment_of(seed=5)]) == [None]  # without a word on runs that nobody wants


@pytest.mark.slow
def test_run_several__a_run_sees_the_environment_of_its_start(tmp_path, monkeypatch):
    own = tmp_path / "own.py"
    own.write_text(
        "import os\nfrom potluck.methods.fedavg import FedAvg\n\n\nclass Own(FedAvg):\n"
        "    def round(self, state, cohort, server):\n        raise RuntimeError(os.environ['WORD'])\n"
    )
    for word in ("first", "second"):
        monkeypatch.setenv("WORD", word)
        ends = ends_of(run_several([experiment_of(str(own))], tmp_path / word, 1))
        assert word in ends[0].problem


def runs_of(process):
    """The processes below this one that are runs, not Python's own, which last as long as it does."""
    own = children_of(process)
    return [below for child in own for below in children_of(child)]


def children_of(process):
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
