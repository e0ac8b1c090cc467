"""The virtual time of runs in a report: its numbers are those of `potluck twin`, its bars those worked out by hand."""

import json
import re

import pytest

from potluck.analysis.costs import COSTS, over_cost
from potluck.analysis.courses import course_of, median_round, reached_at, virtual
from potluck.analysis.groups import group
from potluck.analysis.page import page_text
from potluck.analysis.plots.gantt import MOST_ROWS, Bar, gantt
from potluck.analysis.read import read_run
from potluck.cli.twin import Question, print_twins
from potluck.twin.simulate import Timed
from potluck.twin.timeline import UNAWAITED, Turn

from .test_page import Page


def with_twin(folder, ends=(10, 30, 40, 60, 75, 100)):
    """Rounds of four clients, of whom the last is late and another absent; every second round begins 2 s later."""
    start, lines = 0.0, []
    for number, end in enumerate(ends, start=1):
        begins = start + 2 * (number % 2)
        turns = [
            [1, 0, "counted", begins, end - 4, end - begins - 5, 90_000.0],
            [1, 1, "counted", begins, end, 3.0, 0.0],
            [1, 2, "absent", begins, begins, 0.0, 0.0],
            [1, 3, "late", begins, end + 50, end + 40 - begins, 0.0],
        ]
        lines.append({"round": number, "start": start, "end": end, "turns": turns, "now": end, "busy": {}})
        start = end
    (folder / "twin.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


@pytest.fixture
def run(store_run):
    return read_run(with_twin(store_run()))


def test_the_page_has_the_numbers_of_the_command(store_run, capsys):
    folders = [with_twin(store_run()), with_twin(store_run("b", method="fedavg"), (5, 9, 40, 60, 75, 200))]
    page = Page(page_text([read_run(folder) for folder in folders], 0.55))
    heading, *rows = page.tables["virtual"]
    assert heading[1:] == ["Rounds", "Time", "A round", "Counted", "Waiting", "Dropped", "Energy", "Until 55.0 %"]
    assert rows[0] == ["fedin", "6", "1:40 min", "18 s", "50%", "9%", "80%", "0.15 kWh", "1:00 min"]
    print_twins(list(map(str, folders)), Question(target=0.55))
    lines = {
        line.split()[0]: re.split(r"\s{2,}", line.strip())
        for line in capsys.readouterr().out.splitlines()
        if line.strip()
    }
    assert [lines["run"][1:], lines["b"][1:]] == [row[1:] for row in rows]


def test_a_target_is_reached_when_its_round_ends(run):
    rounds = course_of(run)
    assert reached_at(run, rounds, 0.3) == 30
    assert reached_at(run, rounds, 0.55, "common") == 60
    assert virtual(reached_at(run, rounds, 0.99)) == "never"
    assert reached_at(run, rounds[:1], 0.3) == float("inf")


def test_curves_go_over_virtual_seconds(run):
    (found,) = Page(page_text([run])).numbers["experiments"][0]["runs"]
    assert found["spent"]["virtual"] == [10, 30, 40, 60, 75, 100]
    clock = next(cost for cost in COSTS if cost.name == "virtual")
    assert over_cost(group([run])[0], clock, "personal") == [(30, 0.4), (60, 0.6), (100, 0.55)]


def test_runs_without_a_twin_have_no_virtual_time(store_run, run):
    plain = store_run("plain", method="local")
    assert "virtual" not in Page(page_text([read_run(plain)])).tables
    both = Page(page_text([run, read_run(plain)]))
    assert [row[0] for row in both.tables["virtual"][1:]] == ["fedin"]
    assert ["virtual" in one["runs"][0]["spent"] for one in both.numbers["experiments"]] == [True, False]


def test_the_round_that_is_drawn_is_the_median_one(run):
    assert median_round(course_of(run)).number == 5  # of 10, 10, 15, 20, 20 and 25 s
    assert "Round 5, the median one: 2 counted, 1 late, 1 absent" in page_text([run])


def test_bars_are_in_percent_of_what_is_drawn():
    turns = (
        (1, Turn(0, "counted", 12.0, 17.0, 4.0)),
        (1, Turn(1, "counted", 12.0, 20.0, 8.0)),
        (1, Turn(2, "absent", 12.0, 12.0)),
        (1, Turn(3, "late", 12.0, 99.0, 80.0)),
        (1, Turn(4, "left", 12.0, 14.0, 2.0)),
    )
    found = gantt([Timed(7, 10.0, 20.0, turns)], lambda client: f"c{client}")  # 12 s are drawn, so 3 s are 25 %
    assert found is not None
    assert {row.name: row.words for row in found.rows} == {
        "c0": "counted, 5 s",
        "c1": "counted, 8 s",
        "c2": "absent",
        "c3": "late, 1:27 min ›",
        "c4": "left, 2 s",
    }
    bars = {row.name: [(bar.kind, bar.left, bar.width) for bar in row.bars] for row in found.rows}
    assert bars == {
        "c0": [("computing", 16.67, 33.33), ("carrying", 50.0, 8.33), ("waiting", 58.33, 25.0)],
        "c1": [("computing", 16.67, 66.66)],
        "c2": [("absent", 16.67, 66.66)],
        "c3": [("vain", 16.67, 83.33)],
        "c4": [("vain", 16.67, 16.66)],
    }
    assert found.rows[0].bars[1] == Bar("carrying", 50.0, 8.33, "carrying: receiving and sending, drawn together, 1 s")
    assert (found.closes, found.goes_on) == ((83.33,), True)
    assert found.ticks == ((0, "0 s"), (25, "3 s"), (50, "6 s"), (75, "9 s"), (100, "12 s"))


def test_of_many_clients_it_is_counted_how_many_do_what():
    half = 2 * MOST_ROWS
    turns = [(1, Turn(c, "counted", 0.0, 60.0 if c % 2 else 30.0, 30.0)) for c in range(half)]
    turns += [(1, Turn(half + c, "absent", 0.0, 0.0)) for c in range(half)]
    found = gantt([Timed(1, 0.0, 60.0, tuple(turns))], str)
    assert found is not None
    assert (found.rows, found.clients, found.words) == ((), 160, "80 counted, 80 absent")
    early, late = found.slices[0].stacked, found.slices[-1].stacked
    assert early == (("computing", 0.0, 50.0), ("absent", 50.0, 50.0))
    assert late == (("carrying", 0.0, 25.0), ("waiting", 25.0, 25.0), ("absent", 50.0, 50.0))


def test_a_client_that_is_lost_is_asked_no_more():
    turns = ((1, Turn(0, "counted", 0, 2, 2)), (1, Turn(1, "counted", 0, 3, 3)))
    turns += ((2, Turn(0, "counted", 3, 4, 1)), (2, Turn(1, "left", 3, 3.5, 0.5)))
    found = gantt([Timed(1, 0.0, 4.0, turns)], str)
    assert found is not None
    assert [row.words for row in found.rows] == ["3 s in 2 exchanges", "left in exchange 2, 0.5 s"]
    assert found.words == "2 exchanges: 3 counted, 1 left"
    assert found.closes == (75.0, 100.0)


def test_a_round_in_which_no_time_passes_has_no_picture():
    assert gantt([Timed(1, 5.0, 5.0, ((1, Turn(0, "counted", 5.0, 5.0)),))], str) is None


def test_of_asynchronous_rounds_the_first_ones_are_drawn_and_nobody_waits():
    rounds = [
        Timed(
            1,
            0.0,
            2.0,
            ((UNAWAITED, Turn(0, "counted", 0.0, 1.0, 1.0)), (UNAWAITED, Turn(1, "counted", 0.0, 2.0, 1.0))),
        ),
        Timed(
            2, 2.0, 4.0, ((UNAWAITED, Turn(0, "counted", 1.0, 3.0, 2.0)), (UNAWAITED, Turn(2, "left", 0.0, 4.0, 4.0)))
        ),
    ]
    found = gantt(rounds, lambda client: f"c{client}")
    assert found is not None
    assert (found.title, found.words, found.closes) == ("rounds 1 to 2", "3 counted, 1 left", (50.0, 100.0))
    bars = {row.name: [(bar.kind, bar.left, bar.width) for bar in row.bars] for row in found.rows}
    assert bars == {
        "c0": [("computing", 0.0, 25.0), ("computing", 25.0, 50.0)],
        "c1": [("computing", 0.0, 25.0), ("carrying", 25.0, 25.0)],
        "c2": [("vain", 0.0, 100.0)],
    }
    assert {row.name: row.words for row in found.rows} == {
        "c0": "2 of 2 counted",
        "c1": "counted, 2 s",
        "c2": "left, 4 s",
    }
