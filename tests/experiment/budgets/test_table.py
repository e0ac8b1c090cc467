import re
from pathlib import Path

import pytest

from potluck.core.ground.errors import ConfigError
from potluck.experiment.budgets.table import read_budgets
from potluck.experiment.settings.budget import Budget
from potluck.experiment.settings.devices import get_device, list_devices
from potluck.experiment.settings.resolve import resolve


@pytest.fixture
def table(tmp_path):
    """Reads lines as a table of budgets for so many clients."""

    def read(*lines, clients):
        path = tmp_path / "budgets.csv"
        path.write_text("\n".join(lines))
        return read_budgets(path, clients)

    return read


def test_rows_are_read_in_the_units_of_a_budget(table):
    found = table(
        "memory,seconds,bandwidth,disk,speed",
        "512 MiB,60,20/5 Mbit/s,1 GiB,30 GFLOP/s",
        "1GB,2 min,1 Gbit/s,,",
        ",,,,",
        ",,,,250 MFLOP/s",
        clients=3,
    )
    assert found[0] == Budget((0,), "", 512.0, 60.0, 30.0, 20.0, 5.0, 1024.0)
    assert found[1] == Budget((1,), "", 10**9 / 2**20, 120.0, None, 1000.0, 1000.0)
    assert found[2] == Budget((2,), gflops=0.25)


def test_a_device_gives_what_its_row_leaves_empty(table):
    pi = get_device("pi-4")
    [found] = table("device,memory,seconds", "pi-4,100 MiB,60", clients=1)
    assert (found.device, found.memory_mib, found.seconds) == ("pi-4", 100.0, 60.0)
    assert (found.gflops, found.down_mbit, found.up_mbit, found.disk_mib) == (
        pi.gflops,
        pi.down_mbit,
        pi.up_mbit,
        pi.disk_mib,
    )


def test_rows_are_for_several_clients_or_number_theirs(table):
    found = table("clients,memory", "2,1 MiB", "3,2 MiB", clients=5)
    assert [budget.clients for budget in found] == [(0, 1), (2, 3, 4)]
    found = table("client,memory", "1,1 MiB", "0,2 MiB", clients=2)
    assert [budget.clients for budget in found] == [(1,), (0,)]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (("memory", "512"), "line 2: memory: found '512'; expected a number and a unit, such as 512 MiB"),
        (("memory", "0 MiB"), "line 2: memory: found '0 MiB'"),
        (("seconds", "soon"), "line 2: seconds: found 'soon'"),
        (("seconds", "-1"), "line 2: seconds: found '-1'; expected a number above 0"),
        (("bandwidth", "20/5"), "line 2: bandwidth: found"),
        (("device", "pi4"), "line 2: unknown device 'pi4'; nearest: pi-4"),
        (("memroy", "1 MiB"), "column 'memroy': nearest: memory"),
        (("memory,memory", "1 MiB,1 MiB"), "column 'memory' is there twice"),
        (("client,clients", "0,1"), "found columns `client` and `clients`"),
        (("client", "1"), "found client 1; expected clients from 0 to 0"),
        (("client", "one"), "line 2: client: found 'one'; expected a whole number"),
        (("client", "0", "0"), "client 0 has two budgets"),
        (("memory", "1 MiB,1 s"), "line 2: 2 cells for 1 columns"),
        (("memory",), "is empty"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(table, lines, says):
    with pytest.raises(ConfigError, match=r"budgets\.csv") as refused:
        table(*lines, clients=1)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_table_of_the_guide_has_ten_clients(table):
    guide = (Path(__file__).parents[3] / "docs/guides/budgets.md").read_text()
    [text] = re.findall(r"^```text\n(.*?)^```", guide, flags=re.DOTALL | re.MULTILINE)
    found = table(*text.splitlines(), clients=10)
    assert [(len(one.clients), one.device) for one in found] == [
        (4, "pi-4"),
        (3, "phone-entry"),
        (1, "workstation"),
        (2, ""),
    ]


def test_clients_without_a_budget_are_named(table):
    with pytest.raises(ConfigError, match=r"no budget for clients 1, 2; the federation has 3"):
        table("memory", "1 MiB", clients=3)


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.csv: cannot be read: No such file"):
        read_budgets(tmp_path / "none.csv", 1)


@pytest.mark.parametrize("name", list_devices())
def test_every_number_of_a_device_has_a_source(name):
    device = get_device(name)
    numbers = {key for key, value in vars(device).items() if isinstance(value, (int, float))}
    assert set(device.sources) == numbers
    assert all(len(source) > len("our choice") or source == "our choice" for source in device.sources.values())


def test_a_run_s_budgets_are_of_its_clients():
    tree = {"federation": {"clients": 2}, "run": {"budgets": [{"clients": [0, 2], "memory_mib": 10}]}}
    with pytest.raises(ConfigError, match=r"run.budgets: found client 2; expected clients from 0 to 1"):
        resolve(tree)
    with pytest.raises(ConfigError, match=r"run.budgets.0.memory_mib: expected above 0"):
        resolve({"run": {"budgets": [{"clients": [0], "memory_mib": 0}]}})


def test_budgets_make_no_other_experiment():
    plain = resolve({})
    watched = resolve({"run": {"budgets": [{"clients": [0], "memory_mib": 10}]}})
    assert watched.experiment_id == plain.experiment_id
    assert "budgets" not in plain.toml()
    assert resolve(watched.tree()).run == watched.run
