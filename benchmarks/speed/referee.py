"""Starts contestants, lets them play in turn, and reads the clocks.

Who waits is stopped by signal: some frameworks look for work many times a second, at the expense of whoever plays.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any

from entries import Entry
from machine import Processes
from workloads import WORKLOADS, chosen_workload

HERE = Path(__file__).parent
PATIENCE_SECONDS = 1800
"""After so long without an answer a contestant is killed."""
SETTLING_SECONDS = 0.3
"""Between waking a contestant and its turn, for the timers that have run out meanwhile."""


class Fallen(Exception):
    """A contestant that plays no more."""


@dataclass
class Contestant:
    """One variant in its process.

    Attributes:
        entry: what plays.
        workload: what is played.
        smoke: whether in small.
        python: the interpreter.
        log: where its standard error goes.
        start: what it said of itself, and how long it took until then.
        readings: of the measured rounds.
        error: why it fell out; None if it did not.
    """

    entry: Entry
    workload: str
    smoke: bool
    python: str
    log: Path
    start: dict[str, Any] = field(default_factory=dict)
    readings: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    _process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """Of the process at the root of its tree."""
        assert self._process is not None
        return self._process.pid

    @property
    def folder(self) -> Path:
        """Where its module lies."""
        return HERE if self.entry.checkout is None else self.entry.checkout / "benchmarks" / "speed"

    @property
    def environment(self) -> dict[str, str]:
        """Its process's, in which another checkout's sources go before those that are installed."""
        if self.entry.checkout is None:
            return dict(os.environ)
        return {**os.environ, "PYTHONPATH": str(self.entry.checkout / "src")}

    def get_ready(self) -> None:
        """Start it, and wait until its first round, which is not measured, is over.

        Raises:
            Fallen: it did not get so far.
        """
        started = time.perf_counter()
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self.entry.command(self.python, self.workload, self.smoke),
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        told = json.loads(self._answer("ready ").removeprefix("ready "))
        seconds = time.perf_counter() - started
        if told["parameters"] != WORKLOADS[self.workload].parameters:
            raise Fallen(f"has {told['parameters']} weights; expected {WORKLOADS[self.workload].parameters}")
        self.start = {"seconds": seconds, "cpu_seconds": Processes().cpu_seconds(self.pid), **told}
        self._signal(signal.SIGSTOP)

    def play(self, place: dict[str, int], others: list["Contestant"]) -> None:
        """Take one turn.

        Args:
            place: of the turn in the run, for the record.
            others: those who wait; should they take CPU time meanwhile, it is noted.

        Raises:
            Fallen: it ended, or did not do the work that it should.
        """
        self._signal(signal.SIGCONT)
        time.sleep(SETTLING_SECONDS)
        before = Processes()
        self._say("go")
        told = json.loads(self._answer("{"))
        after = Processes()
        self._signal(signal.SIGSTOP)
        expected = chosen_workload(self.workload, self.smoke).steps
        if told["steps"] != expected:
            raise Fallen(f"took {told['steps']} optimiser steps in a round; expected {expected}")
        taken = {other.pid: after.cpu_seconds(other.pid) - before.cpu_seconds(other.pid) for other in [self, *others]}
        cpu_seconds = taken.pop(self.pid)
        self.readings.append(
            {**place, **told, "cpu_seconds": cpu_seconds, "others_cpu_seconds": round(sum(taken.values()), 2)}
        )

    def end(self) -> None:
        """Let it go; by force, with all its processes, if it does not go by itself."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def record(self) -> dict[str, Any]:
        """Everything, for the results' file."""
        told = ("framework", "variant", "apart")
        return {
            **{name: getattr(self.entry, name) for name in told},
            "command": self.entry.command("python", self.workload, self.smoke),
            "start": self.start,
            "readings": self.readings,
            "error": self.error,
        }

    def _signal(self, number: signal.Signals) -> None:
        """To the process and all below it."""
        if self._process.poll() is None:
            for process in Processes().tree(self.pid):
                with suppress(ProcessLookupError):
                    os.kill(process, number)

    def _say(self, word: str) -> None:
        try:
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Fallen(self._last_words()) from error

    def _answer(self, beginning: str) -> str:
        """The next line that begins so; others are a framework's chatter."""
        watchdog = Timer(PATIENCE_SECONDS, self._signal, (signal.SIGKILL,))
        watchdog.start()
        try:
            for line in iter(self._process.stdout.readline, ""):
                if line.startswith(beginning):
                    return line
        finally:
            watchdog.cancel()
        raise Fallen(self._last_words())

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "ended without a word"


def play_all(contestants: list[Contestant], repeats: int, tell: Callable[[str], None]) -> None:
    """Start all, one at a time, then let each play one round in every repeat, in an order that rotates.

    Args:
        contestants: who plays one workload.
        repeats: measured rounds of each.
        tell: is given a line whenever something has happened.
    """
    try:
        for contestant in contestants:
            _try(contestant, contestant.get_ready)
            tell(f"  {contestant.entry.label}: {contestant.error or 'ready'}")
        for repeat in range(repeats if contestants else 0):
            first = repeat % len(contestants)
            for place, contestant in enumerate(contestants[first:] + contestants[:first]):
                others = [other for other in contestants if other is not contestant and other.error is None]
                if contestant.error is None:
                    _try(contestant, contestant.play, {"repeat": repeat, "place": place}, others)
            tell(f"  repeat {repeat + 1} of {repeats}")
    finally:
        for contestant in contestants:
            contestant.end()


def _try(contestant: Contestant, act: Callable[..., None], *arguments: Any) -> None:
    """Let it act; whoever falls is out, and the others go on."""
    try:
        act(*arguments)
    except Fallen as error:
        contestant.error = str(error)
        contestant.end()
