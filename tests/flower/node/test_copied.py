"""Programs that are copies of one that has imported all: against real processes."""

import json
import os
import subprocess
import sys
import time

import pytest

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from potluck.flower.node.copied import Copied

place = Path(sys.argv[1])

def imports():
    sys.imported = time.monotonic()

def program():
    (place / f"{sys.argv[1]}.part").write_text(json.dumps([sys.argv, sys.imported, os.getpid(), os.getppid()]))
    (place / f"{sys.argv[1]}.part").rename(place / sys.argv[1])
    if sys.argv[1] == "fails":
        raise ValueError("as it happens")

copied = Copied("ours", imports, program)
for line in sys.stdin:
    words = json.loads(line)
    if words[0] == "kill":
        os.kill(words[1], signal.SIGKILL)
        time.sleep(0.5)
    else:
        copied.Popen(words)
"""


@pytest.fixture
def asked(tmp_path):
    """Tell the script what to start, and what that found of itself."""
    program = tmp_path / "ours"  # what is started where nothing is copied
    program.write_text('#!/bin/sh\necho \\"started\\" > "$1.part"\nmv "$1.part" "$1"\n')
    program.chmod(0o700)
    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    script = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=env, cwd=tmp_path)

    def ask(*words):
        script.stdin.write(json.dumps(words) + "\n")
        script.stdin.flush()
        if words[0] == "kill":
            return None
        place, deadline = tmp_path / words[1], time.monotonic() + 30
        while not place.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return json.loads(place.read_text())

    yield ask
    script.stdin.close()
    assert script.wait(30) == 0


@pytest.mark.slow
def test_each_is_a_process_of_its_own_with_its_own_words_and_imports_nothing(asked):
    words, imported, process, parent = asked("ours", "one", "--token", "a b")
    assert words == ["ours", "one", "--token", "a b"]
    again = asked("ours", "two")
    assert (again[0], again[1], again[3]) == (["ours", "two"], imported, parent)
    assert again[2] != process
    asked("ours", "fails")
    assert asked("ours", "three")[1] == imported


@pytest.mark.slow
def test_it_is_started_where_there_is_nothing_to_copy_any_more(asked):
    *_, parent = asked("ours", "one")
    asked("kill", parent)
    assert asked("ours", "two") == "started"


@pytest.mark.slow
def test_other_programs_are_started(asked, tmp_path):
    (tmp_path / "theirs").symlink_to(tmp_path / "ours")
    assert asked("theirs", "one") == "started"
