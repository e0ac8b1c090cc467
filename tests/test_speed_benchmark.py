"""The speed benchmark: who plays, that Potluck takes its turns, and how results are read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SPEED = Path(__file__).parents[1] / "benchmarks" / "speed"


@pytest.fixture
def speed(monkeypatch):
    """Its modules, which import one another by their bare names."""
    monkeypatch.syspath_prepend(str(SPEED))
    import entries
    import machine
    import tables
    import workloads

    yield entries, machine, tables, workloads
    for name in ("entries", "machine", "referee", "tables", "workloads"):
        sys.modules.pop(name, None)


def test_every_workload_is_played_by_its_base_and_by_others(speed):
    entries, _, _, workloads = speed
    for name in workloads.WORKLOADS:
        playing = entries.entries(name, 2)
        assert entries.base(name, 2) in playing
        assert {"Potluck", "plain PyTorch"} <= {entry.framework for entry in playing}
        assert len({entry.label for entry in playing}) == len(playing)
        assert all((SPEED / "contestants" / f"{entry.module}.py").is_file() for entry in playing)


def test_cohorts_and_data_are_the_same_for_everybody(speed):
    workload = speed[3].WORKLOADS["resnet"].smoke()
    assert workload.members(3) == workload.members(3)
    assert len({tuple(workload.members(number)) for number in range(1, 9)}) > 1
    assert len(workload.members(1)) == workload.cohort
    assert workload.steps == 2 * workload.cohort
    assert speed[3].draw_data(workload)[0][0].shape == (24, 3, 32, 32)


def test_an_earlier_checkout_plays_every_variant_from_its_own_sources(speed, tmp_path):
    entries = speed[0]
    from referee import Contestant

    playing = entries.entries("cnn", 2, before=tmp_path)
    ours, earlier = ([e for e in playing if e.framework == name] for name in ("Potluck", "Potluck before"))
    assert [entry.variant for entry in earlier] == [entry.variant for entry in ours]
    contestant = Contestant(earlier[0], "cnn", True, sys.executable, tmp_path / "log")
    assert contestant.folder == tmp_path / "benchmarks" / "speed"
    assert contestant.environment["PYTHONPATH"] == str(tmp_path / "src")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["potluck", "plain"])
def test_a_contestant_takes_its_turns(speed, module):
    workload = speed[3].WORKLOADS["mlp"].smoke()
    command = [sys.executable, "-m", f"contestants.{module}", "--workload", "mlp", "--smoke"]
    found = subprocess.run(command, cwd=SPEED, input="go\ngo\n", capture_output=True, text=True, check=True)
    ready, *turns = found.stdout.splitlines()
    assert json.loads(ready.removeprefix("ready "))["parameters"] == workload.parameters
    assert [json.loads(turn)["steps"] for turn in turns] == [workload.steps] * 2


def record(framework, seconds, variant="as it is", error=None):
    readings = [{"repeat": repeat, "seconds": s, "cpu_seconds": s, "others_cpu_seconds": 0} for repeat, s in seconds]
    start = {"seconds": 3.0, "versions": {"torch": "2"}}
    told = {"framework": framework, "variant": variant, "apart": None}
    return {**told, "start": start, "readings": readings, "error": error}


def test_a_ratio_is_the_median_of_quotients_within_repeats(speed):
    ours = record("Potluck", [(0, 1.0), (1, 10.0), (2, 1.0)])
    theirs = record("Other", [(0, 2.0), (1, 20.0), (2, 3.0)])
    assert speed[2].ratio(theirs, ours, "seconds") == "2.00"
    assert speed[2].ratio(theirs, None, "seconds") == "–"


def test_the_fastest_variant_is_compared_and_who_fell_out_is_shown(speed):
    played = {
        "workload": {"clients": 4, "cohort": 2, "examples": 3, "batch_size": 2, "nets": ["mlp"]},
        "steps": 4,
        "base": "Potluck, as it is",
        "contestants": [
            record("Potluck", [(0, 1.0)]),
            record("Other", [(0, 4.0)], "slow"),
            record("Other", [(0, 2.0)], "fast"),
            record("Broken", [], error="no such thing"),
        ],
    }
    machine = {"cpu": "a", "cores": 2, "memory_gib": 1, "system": "s", "commit": "c", "load_average_before": [0, 0, 0]}
    results = {"machine": machine, "smoke": False, "repeats": 1, "workloads": {"mlp": played}, "caveats": {}}
    text = "\n".join(speed[2].page(results))
    assert "| Other | 2.00 (2.00) |" in text
    assert "Other, fast \\*" in text
    assert "failed: `no such thing`" in text


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="this system has no /proc")
def test_the_time_of_children_counts(speed):
    import os

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in speed[1].Processes().tree(os.getpid())
        assert speed[1].Processes().cpu_seconds(os.getpid()) > 0
    finally:
        child.communicate(b"\n")
