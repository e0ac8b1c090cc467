"""The virtual clock, against times worked out by hand."""

import math
import re
from pathlib import Path

import pytest

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import Key
from potluck.experiment.settings.devices import get_device
from potluck.experiment.settings.resolve import named_devices
from potluck.twin.devices import Fleet, TwinDevice, read_devices
from potluck.twin.simulate import Load, Timed, doubted, simulate, summed
from potluck.twin.timeline import Closing, Errand, Timeline, Turn

GIGA = 10**9
MBIT = 125_000  # bytes


def course(*devices, closing=None, clients=3, **options):
    return Timeline(Fleet(devices, range(clients)), closing or Closing(), **options)


def fates(turns):
    return [turn.fate for turn in turns]


def test_a_turn_is_receiving_computing_and_sending():
    device = TwinDevice(gflops=2.0, down_mbit=8.0, up_mbit=4.0, latency_s=0.5, watts=3.0)
    clock = course(device, clients=1)
    (turn,) = clock.exchange({0: Errand(6 * GIGA, 16 * MBIT, 4 * MBIT)})
    assert turn.finish == pytest.approx(0.5 + 2.0 + 3.0 + 1.0)
    assert turn.computing == pytest.approx(3.0)
    assert turn.joules == pytest.approx(3.0 * 6.5)
    assert clock.now == turn.finish


def test_a_device_may_have_another_speed_from_the_second_exchange_on():
    clock = course(TwinDevice("0", gflops=2.0, gflops_later=4.0), TwinDevice(gflops=2.0), clients=2)
    taken = [
        [turn.computing for turn in clock.exchange(dict.fromkeys(range(2), Errand(8 * GIGA, 0, 0, exchange=number)))]
        for number in (1, 2, 3)
    ]
    assert taken == [[4.0, 4.0], [2.0, 4.0], [2.0, 4.0]]


def test_work_that_does_not_fit_into_memory_fails_when_it_begins():
    clock = course(TwinDevice("0", gflops=1.0, down_mbit=8.0, memory_mib=2.0), TwinDevice(gflops=4.0), clients=2)
    first, second = clock.exchange(dict.fromkeys(range(2), Errand(4 * GIGA, 16 * MBIT, 0, 2 * 2**20 + 1)))
    assert (first.fate, first.finish, first.computing) == ("failed", 2.0, 0.0)
    assert second.fate == "counted"
    (first,) = clock.exchange({0: Errand(4 * GIGA, 0, 0, 2 * 2**20)})
    assert first.fate == "counted"


def test_an_exchange_waits_for_the_slowest():
    clock = course(TwinDevice("0", gflops=1.0), TwinDevice("1", gflops=4.0), TwinDevice(gflops=2.0))
    turns = clock.exchange(dict.fromkeys(range(3), Errand(4 * GIGA, 0, 0)))
    assert [turn.finish for turn in turns] == [4.0, 1.0, 2.0]
    assert clock.now == 4.0


def test_after_the_deadline_nobody_counts_and_the_late_are_busy():
    slow = course(TwinDevice("0", gflops=1.0), TwinDevice(gflops=4.0), closing=Closing(deadline=2.0))
    work = dict.fromkeys(range(3), Errand(4 * GIGA, 0, 0))
    assert fates(slow.exchange(work)) == ["late", "counted", "counted"]
    assert slow.now == 2.0
    assert slow.absent(range(3)) == {0: "is still at work on what came too late"}
    assert fates(slow.exchange(work)) == ["absent", "counted", "counted"]
    assert slow.now == 3.0  # all that were asked have answered: the deadline is not waited for


def test_with_fewer_than_the_quorum_it_stays_open_until_there_are_as_many():
    clock = course(
        TwinDevice("0", gflops=1.0),
        TwinDevice("1", gflops=2.0),
        TwinDevice(gflops=4.0),
        closing=Closing(deadline=1.5, quorum=2),
    )
    assert fates(clock.exchange(dict.fromkeys(range(3), Errand(4 * GIGA, 0, 0)))) == ["late", "counted", "counted"]
    assert clock.now == 2.0


def test_of_more_than_are_needed_the_first_count():
    clock = course(
        TwinDevice("0", gflops=1.0),
        TwinDevice("1", gflops=2.0),
        TwinDevice(gflops=4.0),
        closing=Closing(over_select=0.5),
    )
    assert fates(clock.exchange(dict.fromkeys(range(3), Errand(4 * GIGA, 0, 0)))) == ["late", "counted", "counted"]
    assert clock.now == 2.0


@pytest.mark.parametrize("needed", range(1, 40))
@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.5, 1.0, 2.0])
def test_as_many_are_enough_as_there_would_be_without_the_others(needed, share):
    assert Closing(over_select=share).enough(math.ceil(needed * (1 + share) - 1e-9)) == needed


def test_who_leaves_in_the_middle_has_worked_in_vain():
    clock = course(TwinDevice("0", gflops=1.0, available="0-1", watts=1.0), TwinDevice(gflops=1.0), clients=2)
    clock.now = 3599.0
    first, second = clock.exchange(dict.fromkeys(range(2), Errand(4 * GIGA, 0, 0)))
    assert (first.fate, first.finish, first.computing, first.joules) == ("left", 3600.0, 1.0, 1.0)
    assert (second.fate, clock.now) == ("counted", 3603.0)
    assert clock.absent([0]) == {0: "is not there"}


def test_waiting_goes_on_to_the_next_arrival():
    clock = course(TwinDevice("0", available="5-6"), TwinDevice(available="3-4"), clients=2, starts_at=1.0)
    assert clock.wait([0, 1]) == 2 * 3600.0
    assert clock.absent([0, 1]) == {0: "is not there"}
    assert clock.wait([0, 1]) == 2 * 3600.0
    assert clock.absent([0, 1]) == {1: "is not there"}


def test_another_course_goes_on_from_a_state():
    work = dict.fromkeys(range(3), Errand(4 * GIGA, 0, 0))
    devices = TwinDevice("0", gflops=1.0), TwinDevice(gflops=4.0)
    one = course(*devices, closing=Closing(deadline=2.0))
    one.exchange(work)
    other = course(*devices, closing=Closing(deadline=2.0))
    other.go_on(one.state())
    assert other.exchange(work) == one.exchange(work)
    assert other.now == one.now


def test_the_sum_of_rounds_says_what_was_waited_for_and_dropped():
    devices = TwinDevice("0", gflops=1.0, watts=2.0), TwinDevice(gflops=4.0, watts=1.0)
    loads = [Load([dict.fromkeys(range(2), Errand(4 * GIGA, 0, 0))], GIGA)] * 2
    clock = course(*devices, clients=2, server_gflops=1.0)
    found = summed(simulate(clock, loads, lambda clients: clients))
    assert (found.rounds, found.seconds, found.asked, found.counted) == (2, 10.0, 4, 4)
    assert found.idle_share == pytest.approx(3 / 8)  # of 4 s each, the fast one waits for 3
    assert found.dropped == 0
    assert found.joules == pytest.approx(2 * (2.0 * 4 + 1.0 * 1))
    late = course(*devices, clients=2, closing=Closing(deadline=1.0))
    found = summed(simulate(late, loads[:1], lambda clients: 1))
    assert found.dropped_share == pytest.approx(4 / 5)


def test_a_device_that_has_left_waits_for_nobody():
    turns = (1, Turn(0, "left", 0.0, 1.0, 1.0)), (1, Turn(1, "counted", 0.0, 4.0, 4.0))
    found = summed([Timed(1, 0.0, 4.0, turns)])
    assert (found.open, found.idle) == (5.0, 0.0)


def test_a_client_that_is_lost_in_one_exchange_is_not_in_the_next():
    clock = course(TwinDevice("0", gflops=1.0), TwinDevice(gflops=4.0), clients=2, closing=Closing(deadline=2.0))
    work = dict.fromkeys(range(2), Errand(4 * GIGA, 0, 0))
    (timed,) = simulate(clock, [Load([work, work])], lambda clients: 1)
    assert [(place, turn.client, turn.fate) for place, turn in timed.turns] == [
        (1, 0, "late"),
        (1, 1, "counted"),
        (2, 1, "counted"),
    ]


def test_doubt_is_drawn_for_each_device_and_is_none_at_zero():
    devices = [TwinDevice("0", down_mbit=3.0), TwinDevice()]
    assert doubted(devices, 0.0, Key(("a",))) == devices
    first, second = doubted(devices, 0.5, Key(("a",)))
    assert doubted(devices, 0.5, Key(("a",))) == [first, second]
    assert first.gflops != second.gflops
    assert (first.up_mbit, second.down_mbit) == (None, None)


def test_a_trace_is_looked_for_beside_the_file_that_names_it(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("clients,available\n0,traces/a.csv\n1,/b.csv\n*,22-6\n")
    assert [row["available"] for row in read_devices(path)] == [str(tmp_path / "traces" / "a.csv"), "/b.csv", "22-6"]


def test_every_client_has_the_first_device_that_names_it():
    fleet = Fleet([TwinDevice("0, 2-3", gflops=1), TwinDevice("3", gflops=2), TwinDevice(gflops=3)], range(5))
    assert [fleet[client].gflops for client in range(5)] == [1, 3, 1, 1, 3]
    with pytest.raises(ConfigError, match="client 1 has none; expected one whose clients are"):
        Fleet([TwinDevice("0")], range(2))


@pytest.mark.parametrize("table", [{"clients": "all"}, {"gflops": 0.0}, {"available": "sometimes"}, {"watts": -1.0}])
def test_a_device_is_checked(table):
    with pytest.raises(ConfigError):
        TwinDevice(**table)


def test_the_file_of_the_guide_has_a_device_for_twelve_clients(tmp_path):
    guide = (Path(__file__).parents[2] / "docs/guides/twin.md").read_text()
    [text] = re.findall(r"^```text\n(.*?)^```", guide, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "devices.csv").write_text(text)
    tables = named_devices(read_devices(tmp_path / "devices.csv"))
    fleet = Fleet([TwinDevice(**table) for table in tables], range(12))
    assert [fleet[client].name for client in (5, 6, 11)] == ["phone-entry", "pi-4", "workstation"]
    assert fleet[0].gflops == get_device("phone-entry").gflops
    assert fleet.availability(0).leaves(0.0) == 6 * 3600.0


def test_a_file_of_devices_has_their_keys_as_columns(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("clients,gflops,available\n0-4,0.5,22-6\n*,2,\n")
    assert read_devices(path) == [
        {"clients": "0-4", "gflops": 0.5, "available": "22-6"},
        {"clients": "*", "gflops": 2.0},
    ]
    wrong = {"speed\n1\n": "the column 'speed'", "gflops\nfast\n": "line 2", "gflops\n": "no device"}
    for content, found in wrong.items():
        path.write_text(content)
        with pytest.raises(ConfigError, match=found):
            read_devices(path)
