"""What a client's round takes, from lines worked out by hand."""

import json

import pytest

from potluck.analysis.costs import WorkRow, work_table
from potluck.analysis.page import page_text
from potluck.analysis.read import read_run

from .test_page import Page

KEYS = ("round", "exchange", "client", "flops", "memory", "bytes_down", "bytes_up")


def with_costs(folder, *lines):
    (folder / "costs.jsonl").write_text(
        "".join(f"{json.dumps(dict(zip(KEYS, line, strict=True)))}\n" for line in lines)
    )
    return folder


LINES = (
    (1, 1, 0, 2 * 10**9, 5 * 10**6, 10**6, 2 * 10**6),
    (1, 2, 0, 4 * 10**9, 7 * 10**6, 10**6, 0),
    (1, 1, 1, None, None, 10**6, 0),  # failed
    (1, 1, 3, 10**9, 9 * 10**6, 3 * 10**6, 10**6),
    (1, 0, None, 3 * 10**9, 10**6, 0, 0),
    (2, 1, 0, 10**9, 10**6, 10**6, 10**6),
    (2, 0, None, 5 * 10**9, 10**6, 0, 0),
    (7, 1, 0, 99 * 10**9, 99 * 10**6, 99, 99),  # of a round that the run has not finished
)


def test_a_client_s_exchanges_of_a_round_add_up_and_the_failed_computed_nothing(store_run):
    rows = work_table([read_run(with_costs(store_run(), *LINES))])
    assert rows == [
        WorkRow("small", 2, 3.5, 6.0, 7.0, pytest.approx((2 + 1 + 1) / 3), 1.0),
        WorkRow("large(width=8)", 1, 1.0, 1.0, 9.0, 3.0, 1.0),
        WorkRow("server", None, 4.0, 5.0, 1.0, 0.0, 0.0),
    ]


def test_machines_that_do_not_say_what_they_computed_have_only_bytes(store_run):
    lines = [(*line[:3], None, None, *line[5:]) for line in LINES if line[2] is not None]
    small, large = work_table([read_run(with_costs(store_run(), *lines))])
    assert (small.gigaflops, small.memory, small.megabytes_up) == (None, None, 1.0)
    assert large == WorkRow("large(width=8)", 1, None, None, None, 3.0, 1.0)


def test_the_page_has_them_and_curves_over_operations(store_run):
    rounds = [(number, 1, 0, number * 10**12, 10, 1, 1) for number in range(1, 7)]
    folder = with_costs(store_run(), *rounds)
    page = Page(page_text([read_run(folder)]))
    assert page.tables["work"][1] == ["small", "1", "3,500", "6,000", "0.0000100", "0.00000100", "0.00000100"]
    (run,) = page.numbers["experiments"][0]["runs"]
    assert run["spent"]["teraflops"] == [1, 3, 6, 10, 15, 21]


def test_of_a_run_of_an_earlier_version_nothing_is_said(store_run):
    assert "work" not in Page(page_text([read_run(store_run())])).tables
