"""When devices are there."""

import math

import pytest

from potluck.core.ground.errors import ConfigError
from potluck.twin.availability import ALWAYS, DAY, HOUR, daily, traces


def test_a_night_goes_over_midnight():
    night = daily("22-6")
    assert night.is_on(23 * HOUR)
    assert night.is_on(5.9 * HOUR)
    assert not night.is_on(6 * HOUR)
    assert night.leaves(23 * HOUR) == 30 * HOUR
    assert night.comes(12 * HOUR) == 22 * HOUR
    assert night.comes(DAY + 12 * HOUR) == DAY + 22 * HOUR
    assert night.comes(23 * HOUR) == 23 * HOUR


def test_before_the_clock_starts_is_the_day_before():
    assert daily("22-6").is_on(-1 * HOUR)
    assert daily("22-6").comes(-4 * HOUR) == -2 * HOUR


def test_hours_that_touch_are_one_span():
    assert daily("0-6, 6-12") == daily("0-12")
    assert daily("0-12, 12-24") == ALWAYS
    assert ALWAYS.leaves(5.0) == math.inf
    assert daily("12-12.5, 3-4").comes(5 * HOUR) == 12 * HOUR


@pytest.mark.parametrize("text", ["22", "6-6", "1-25", "at night", "3-4;5-6"])
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError, match=r"available: found .*; expected 'always', hours of the day"):
        daily(text)


def test_a_trace_is_repeated_whole(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client,from_s,to_s\n0,0,10\n1,90,100\n0,50,60\n")
    found = traces(path)
    assert found[0].comes(20.0) == 50.0
    assert found[0].comes(70.0) == 100.0
    assert found[0].leaves(105.0) == 110.0
    assert not found[1].is_on(100.0)
    assert found[1].is_on(195.0)


@pytest.mark.parametrize("line", ["0,5,5", "0,a,5", "x,0,5", "0,-1,5", "0,1,inf"])
def test_a_damaged_trace_is_refused(line, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(f"client,from_s,to_s\n{line}\n")
    with pytest.raises(ConfigError, match=r"trace\.csv"):
        traces(path)
