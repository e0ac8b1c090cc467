"""What Flower's programs write does not fill the disk."""

import time

import pytest

from potluck.flower.deploy import logs
from potluck.flower.deploy.logs import LONGEST_LOG, shorten
from potluck.flower.deploy.processes import PYTHON, lines_after, start, stop

FLOOD = """
import pathlib, sys, time
for number in range(200):
    print("x" * 99_999, flush=True)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def test_a_program_that_writes_without_end_does_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_LOOK_EVERY", 0.01)
    monkeypatch.setattr(logs, "LONGEST_LOG", 10**6)
    log, before, written = (tmp_path / name for name in ("program.log", "program.log.1", "written"))
    process = start(PYTHON, ["-c", FLOOD, str(written)], tmp_path, log)
    try:
        deadline = time.monotonic() + 30.0
        while not written.is_file() or log.stat().st_size > 10**6:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        stop(process)
    assert before.stat().st_size <= 10**6


@pytest.mark.parametrize("length", [LONGEST_LOG, LONGEST_LOG + 1])
def test_a_long_log_is_begun_anew_and_its_end_is_kept(tmp_path, length):
    log = tmp_path / "a.log"
    log.write_bytes(b"a" * (length - 4) + b"end\n")
    shorten(log)
    anew = length > LONGEST_LOG
    assert log.stat().st_size == (0 if anew else length)
    assert (tmp_path / "a.log.1").is_file() == anew
    if anew:
        assert (tmp_path / "a.log.1").read_bytes()[-4:] == b"end\n"
        assert (tmp_path / "a.log.1").stat().st_size == LONGEST_LOG


def test_a_log_that_was_begun_anew_is_read_from_its_start(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("one\ntwo\n")
    assert lines_after(log, 4) == (["two"], 8)
    log.write_text("three\n")
    assert lines_after(log, 8) == (["three"], 6)
