import pytest

from potluck.core import machine
from potluck.core.errors import DataError

GIB = 2**30


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A made-up machine: 3 GiB available, 1 GiB of swap; the function returned sets the container's limit."""
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 3145728 kB\nSwapFree: 1048576 kB\n")
    monkeypatch.setattr(machine, "_PROC", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_LIMITS", (tmp_path / "memory.max",))
    return (tmp_path / "memory.max").write_text


def test_available_is_what_is_free_or_freeable_and_swap(system):
    assert machine.available_bytes() == 4 * GIB
    system("max\n")
    assert machine.available_bytes() == 4 * GIB


def test_available_is_bounded_by_the_container(system):
    system(f"{2 * GIB}\n")
    assert machine.available_bytes() == 2 * GIB


def test_available_is_all_memory_where_no_more_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_PROC", tmp_path / "nothing")
    monkeypatch.setattr(machine, "_LIMITS", ())
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert machine.available_bytes() == 3 * 4096


def test_available_is_unknown_where_the_system_does_not_say(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_PROC", tmp_path / "nothing")
    monkeypatch.setattr(machine, "_LIMITS", ())
    monkeypatch.delattr("os.sysconf")
    assert machine.available_bytes() is None
    machine.check_fits(2**80, "it", "no matter", DataError)


@pytest.mark.usefixtures("system")
def test_check_fits_refuses_what_is_more_than_is_left():
    machine.check_fits(4 * GIB, "a net", "choose another", DataError)
    with pytest.raises(DataError) as caught:
        machine.check_fits(4 * GIB + 2**28, "a net", "choose another", DataError)
    assert str(caught.value) == "a net: at least 4.2 GiB of memory needed, 4.0 GiB left; choose another"
