import pytest

from potluck.core.ground.errors import DataError
from potluck.core.ground.machine import available_bytes, check_fits

MIB = 2**20
MEMORY = {"proc/meminfo": "MemTotal: 9999999 kB\nMemAvailable:   1536 kB\nSwapFree:   512 kB\n"}


@pytest.fixture
def machine(tmp_path):
    """A file system that says what a machine and its containers have."""

    def made(files):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    return made


def test_a_machine_has_what_is_free_or_freeable_and_swap(machine):
    assert available_bytes(machine(MEMORY)) == 2 * MIB


@pytest.mark.parametrize(("limit", "expected"), [("max", 2 * MIB), (f"{MIB}", MIB - 1000 + 300), (f"{2**40}", 2 * MIB)])
def test_a_container_has_its_limit_less_what_it_uses_but_for_caches(machine, limit, expected):
    files = {
        "proc/self/cgroup": "0::/one/two\n",
        "sys/fs/cgroup/one/memory.max": f"{limit}\n",
        "sys/fs/cgroup/one/memory.current": "1000\n",
        "sys/fs/cgroup/one/memory.stat": "anon 700\ninactive_file 300\n",
    }
    assert available_bytes(machine({**MEMORY, **files})) == expected


def test_older_control_groups_are_understood(machine):
    files = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{MIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1000\n",
        "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 200\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        "sys/fs/cgroup/memory/memory.stat": "\n",
    }
    assert available_bytes(machine({**MEMORY, **files})) == MIB - 800


def test_this_machine_says_something():
    found = available_bytes()
    assert found is None or found > 0


def test_available_is_all_memory_where_no_more_is_known(machine, monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert available_bytes(machine({})) == 3 * 4096


def test_available_is_unknown_where_the_system_does_not_say(machine, monkeypatch):
    monkeypatch.delattr("os.sysconf")
    assert available_bytes(machine({})) is None


def test_check_fits_refuses_what_is_more_than_a_full_container_has_left(machine, monkeypatch):
    """The container's limit would hold it, but most of that is used."""
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{4 * 2**30}\n",
        "sys/fs/cgroup/memory.current": f"{4 * 2**30 - 100 * MIB}\n",
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        "proc/meminfo": f"MemAvailable: {8 * MIB} kB\n",
    }
    root = machine(files)
    monkeypatch.setattr("potluck.core.ground.machine.available_bytes", lambda: available_bytes(root))
    check_fits(100 * MIB, "a net", "choose another", DataError)
    with pytest.raises(DataError) as caught:
        check_fits(3 * 2**30, "a net", "choose another", DataError)
    assert str(caught.value) == "a net: at least 3.0 GiB of memory needed, 0.1 GiB left; choose another"


def test_what_the_system_does_not_say_refuses_nothing(monkeypatch):
    monkeypatch.setattr("potluck.core.ground.machine.available_bytes", lambda: None)
    check_fits(2**80, "it", "no matter", DataError)
