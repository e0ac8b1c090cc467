import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from potluck.cli import main

SMALL = (
    "federation.clients=3 run.rounds=2 federation.public=holdout"
    " \"federation.models=[{name='cnn2',width=4},{name='cnn3',width=4}]\""
)


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def potluck(tmp_path, monkeypatch, capsys) -> Callable[[str], Outcome]:
    """Runs a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(line: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["potluck", *shlex.split(line)])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return Outcome(int(stopped.value.code or 0), captured.out, captured.err)

    return run
