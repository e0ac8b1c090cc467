import pytest

from potluck.engine.room import available_bytes

MIB = 2**20


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


MEMORY = {"proc/meminfo": "MemTotal: 9999999 kB\nMemAvailable:   2048 kB\n"}


def test_a_machine_has_what_it_says_is_available(machine):
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
