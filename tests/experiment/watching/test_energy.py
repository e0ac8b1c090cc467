"""Energy, by counters in a folder that is as Linux has it."""

import json

import pytest

from potluck.analysis.costs import COSTS
from potluck.analysis.read import joules, read_run
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.watching import energy
from potluck.experiment.watching.energy import EnergyMeter

SPAN = 1_000_000_000  # microjoules


class Machine:
    """A machine of two packages, of the first of which a part has a counter too, and one for the whole board."""

    zones = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:1": "package-1", "intel-rapl:2": "psys"}

    def __init__(self, place):
        self.place = place
        for zone, name in self.zones.items():
            (place / zone).mkdir()
            (place / zone / "name").write_text(f"{name}\n")
            (place / zone / "max_energy_range_uj").write_text(f"{SPAN}\n")
            self.set(zone, 0)

    def set(self, zone, joules):
        (self.place / zone / "energy_uj").write_text(f"{round(joules * 1e6)}\n")


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "powercap").mkdir()
    return Machine(tmp_path / "powercap")


def test_packages_add_up_and_their_parts_and_the_board_do_not(machine):
    meter = EnergyMeter(machine.place)
    assert meter.counts
    assert meter.take() is None  # what was before is nobody's
    for zone in machine.zones:
        machine.set(zone, 5)
    assert meter.take() == pytest.approx(10)
    assert meter.take() == 0


def test_a_counter_that_begins_again_goes_on(machine):
    machine.set("intel-rapl:0", 990)
    meter = EnergyMeter(machine.place)
    meter.take()
    machine.set("intel-rapl:0", 3)
    assert meter.take() == pytest.approx(13)


def test_a_counter_that_goes_round_twice_is_looked_at_after_clients(machine):
    meter = EnergyMeter(machine.place)
    meter.take()
    for joules_now in (900, 100, 950, 50):
        machine.set("intel-rapl:0", joules_now)
        meter.on_client_end(None)
    assert meter.take() == pytest.approx(2050)


@pytest.mark.parametrize("lacking", ["energy_uj", "max_energy_range_uj", "name"])
def test_a_counter_that_may_not_be_read_is_none(machine, lacking):
    for zone in machine.zones:
        (machine.place / zone / lacking).unlink()
    meter = EnergyMeter(machine.place)
    assert not meter.counts
    assert [meter.take(), meter.take()] == [None, None]


def test_counters_that_go_away_end_it(machine):
    meter = EnergyMeter(machine.place)
    meter.take()
    (machine.place / "intel-rapl:1" / "energy_uj").unlink()
    assert [meter.take(), meter.take()] == [None, None]


def play(folder):
    tables = {
        "federation": {"dataset": "digits", "train_fraction": 0.1, "clients": 2, "models": ["mlp4"]},
        "method": {"name": "fedavg"},
        "run": {"rounds": 2, "executor": "sequential"},
    }
    experiment = resolve(tables)
    folder.mkdir()
    result, _ = execute(prepare(experiment, assemble(experiment), folder), experiment, folder)
    return result.checkpoint.digest


@pytest.mark.slow
def test_a_run_notes_what_it_took_and_its_records_stay_what_they_were(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "COUNTERS", tmp_path / "none")
    plain = play(tmp_path / "plain")
    assert joules(read_run(tmp_path / "plain")) == {}
    assert "joules" not in json.loads((tmp_path / "plain" / "timings.jsonl").read_text().splitlines()[0])
    monkeypatch.setattr(energy, "COUNTERS", machine.place)
    seen = iter(range(0, 10**6, 2))
    monkeypatch.setattr(energy.Counter, "read", lambda counter: next(seen) * 10**6)  # two packages, 4 J at every look
    assert play(tmp_path / "told") == plain
    run = read_run(tmp_path / "told")
    spent = next(cost for cost in COSTS if cost.name == "joules").spent(run)
    assert spent == joules(run)
    assert spent[1] > 0
    for name in ("rounds.jsonl", "clients.jsonl", "costs.jsonl"):
        assert (tmp_path / "told" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
