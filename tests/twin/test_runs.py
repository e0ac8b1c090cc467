"""Runs with a twin, foreseen and timed again."""

import json
from itertools import islice

import pytest

from potluck.analysis.courses import course_of
from potluck.analysis.read import costs, read_run
from potluck.cli.twin import Question, print_twins, timed_again
from potluck.core.ground.errors import ConfigError, PotluckError
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.foresee import foresee
from potluck.experiment.settings.resolve import resolve
from potluck.twin.devices import Fleet, TwinDevice
from potluck.twin.simulate import simulate

from ..carried_out import carried_out, digest_of

DEVICES = [
    {"clients": "0", "gflops": 0.0001, "up_mbit": 1.0},
    {"clients": "1", "gflops": 1.0, "available": "0-0.001"},
    {"clients": "*", "gflops": 1.0, "down_mbit": 10.0, "watts": 2.0},
]


def tree(rounds=3, method="fedavg", twin=True, **run):
    federation = {
        "dataset": "digits",
        "train_fraction": 0.1,
        "clients": 4,
        "models": [{"name": "cnn2", "width": 4}, {"name": "cnn3", "width": 4}],
    }
    run = {"rounds": rounds, "executor": "sequential", "tolerate_failures": True, **run}
    run |= {"twin": {"devices": DEVICES}} if twin else {}
    run.setdefault("rounds_close", {"deadline_s": 4.0, "quorum": 2})
    return {"federation": federation, "method": {"name": method}, "run": run}


def content(folder, name):
    return (folder / name).read_bytes()


@pytest.mark.slow
def test_who_is_late_or_gone_does_not_count(tmp_path):
    carried_out(tmp_path / "a", tree())
    rounds = course_of(read_run(tmp_path / "a"))
    fates = [{turn.client: turn.fate for _, turn in timed.turns} for timed in rounds]
    assert fates[0] == {0: "late", 1: "counted", 2: "counted", 3: "counted"}
    assert fates[1] == {0: "absent", 1: "absent", 2: "counted", 3: "counted"}
    assert rounds[0].end == 4.0
    record = json.loads(content(tmp_path / "a", "rounds.jsonl").splitlines()[1])
    assert record["replied"] == [2, 3]
    assert record["failed"]["1"] == "its device is not there"
    asked = [line for line in costs(read_run(tmp_path / "a")) if line.round == 2 and line.client is not None]
    assert [line.bytes_down > 0 for line in asked] == [False, False, True, True]


@pytest.mark.slow
def test_a_device_that_is_always_in_time_changes_nothing(tmp_path):
    plain = digest_of(tmp_path / "plain", tree(twin=False))
    timed = tree(rounds_close={})
    timed["run"]["twin"] = {"devices": [{"gflops": 1.0}]}
    assert digest_of(tmp_path / "timed", timed) == plain
    for name in ("rounds.jsonl", "costs.jsonl", "clients.jsonl"):
        assert content(tmp_path / "plain", name) == content(tmp_path / "timed", name)


@pytest.mark.slow
def test_it_resumes_to_the_same_bytes(tmp_path):
    whole = digest_of(tmp_path / "whole", tree(5))
    carried_out(tmp_path / "parts", tree(2))
    assert digest_of(tmp_path / "parts", tree(5)) == whole
    for name in ("rounds.jsonl", "costs.jsonl", "clients.jsonl", "twin.jsonl"):
        assert content(tmp_path / "whole", name) == content(tmp_path / "parts", name)


@pytest.mark.slow
def test_a_twin_waits_for_a_quorum_to_come_and_time_passes(tmp_path):
    tables = tree(1, rounds_close={"quorum": 4})
    tables["run"]["twin"] = {"devices": [{"clients": "0", "available": "5-6"}, {}], "starts_at": 1.0}
    carried_out(tmp_path / "a", tables)
    (timed,) = course_of(read_run(tmp_path / "a"))
    assert [turn.start for _, turn in timed.turns] == [4 * 3600.0] * 4


def test_nobody_ever_being_there_is_one_line(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client,from_s,to_s\n1,0,10\n2,0,10\n3,0,10\n")
    tables = tree(1)
    tables["run"]["twin"] = {"devices": [{"available": str(path)}]}
    with pytest.raises(ConfigError, match=r"trace\.csv: found no span of client 0"):
        carried_out(tmp_path / "a", tables)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fedin", "heterofl"])
def test_a_finished_run_takes_on_devices_what_it_takes_with_a_twin(tmp_path, method):
    """Timed again from its counts, and by a clock beside it."""
    slow = {"clients": "0", "gflops": 0.02, "gflops_later": 0.3, "up_mbit": 1.0}
    devices = [slow, {"gflops": 1.0, "down_mbit": 10.0}]
    plain, beside = tree(method=method, twin=False, rounds_close={}), tree(method=method, rounds_close={})
    if method == "heterofl":
        plain["federation"]["models"] = beside["federation"]["models"] = [{"name": "preresnet18", "width": 4}]
    beside["run"]["twin"] = {"devices": devices}
    carried_out(tmp_path / "plain", plain)
    carried_out(tmp_path / "beside", beside)
    again = timed_again(read_run(tmp_path / "plain"), [TwinDevice(**table) for table in devices])
    assert again == course_of(read_run(tmp_path / "beside"))
    said = content(tmp_path / "plain", "costs.jsonl").decode().splitlines()
    said[0] = json.dumps({**json.loads(said[0]), "flops": None, "memory": None})  # as of a node that does not say
    (tmp_path / "plain" / "costs.jsonl").write_text("\n".join(said) + "\n")
    with pytest.raises(ConfigError, match=r"client 0 does not say what it computed in round 1; a node of an earlier"):
        timed_again(read_run(tmp_path / "plain"), [TwinDevice(**table) for table in devices])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedproto", "heterofl"])
def test_what_is_foreseen_is_what_a_run_counts(tmp_path, method):
    """Clients have unlike numbers of examples, so that their batches' remainders differ: a few per cent."""
    tables = tree(4, method=method, rounds_close={})
    device = {"gflops": 0.1, "gflops_later": 0.4}
    tables["run"]["twin"] = {"devices": [device]}
    if method == "heterofl":
        tables["federation"]["models"] = [{"name": "preresnet18", "width": 4}]
    experiment = resolve(tables)
    assembly = assemble(experiment)
    fleet = Fleet([TwinDevice(**device)], range(4))
    known = foresee(experiment, assembly.federation)
    rounds = simulate(experiment.run.course(fleet), known.loads(experiment, lambda number: ()), lambda clients: clients)
    foreseen = list(islice(rounds, 4))
    carried_out(tmp_path / "a", tables)
    real = course_of(read_run(tmp_path / "a"))
    assert foreseen[-1].end == pytest.approx(real[-1].end, rel=0.1)


def test_a_run_without_a_twin_needs_devices_that_stay(tmp_path, capsys):
    carried_out(tmp_path / "a", tree(1, twin=False))
    with pytest.raises(PotluckError, match="it ran without a twin; name its devices"):
        print_twins([str(tmp_path / "a")], Question())
    devices = tmp_path / "devices.csv"
    devices.write_text("gflops,available\n1,22-6\n")
    with pytest.raises(PotluckError, match="on devices that come and go it must run again"):
        print_twins([str(tmp_path / "a")], Question(devices))
    devices.write_text("gflops\n0.001\n")
    print_twins([str(tmp_path / "a")], Question(devices, target=0.0))
    assert "100%" in capsys.readouterr().out


def test_asking_for_more_needs_failures_to_be_tolerated():
    with pytest.raises(ConfigError, match=r"over_select: expected 0 without run\.tolerate_failures, found 0\.5"):
        resolve(tree(tolerate_failures=False, rounds_close={"over_select": 0.5}))


@pytest.mark.slow
def test_a_client_whose_work_does_not_fit_into_its_memory_fails_and_is_as_before(tmp_path):
    tables = tree(1, rounds_close={})
    tables["run"]["twin"] = {"devices": [{"clients": "0", "memory_mib": 0.1}, {}]}
    carried_out(tmp_path / "a", tables)
    (record,) = read_run(tmp_path / "a").rounds
    assert record.replied == [1, 2, 3]
    assert record.failed["0"].startswith("its work takes 0.")
    assert record.failed["0"].endswith("MiB of tensors, for which its device has no room")
