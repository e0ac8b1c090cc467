"""trackio: a run of the project `potluck` in trackio's own store; `trackio show` shows it."""

import io
from collections.abc import Collection, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import trackio

from potluck.experiment.watching.trackers.tracker import Tracker

_PROJECT = "potluck"


class Trackio(Tracker):
    """Logs to trackio, which sends what it is given once a second."""

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None

    def open(self, folder: Path, name: str, identity: str, settings: Mapping[str, Any]) -> Collection[int]:
        """The run whose name ends in this identity."""
        with redirect_stdout(io.StringIO()):  # it prints how to start its dashboard
            self._run = trackio.init(
                project=_PROJECT,
                name=f"{name}-{identity[:8]}",
                resume="allow",
                config=dict(settings),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        return _steps_of(self._run.name)

    def send(self, round: int, numbers: Mapping[str, float]) -> None:
        """One step."""
        self._run.log(dict(numbers), step=round)

    def close(self, status: str) -> None:
        """Wait until everything is stored."""
        if self._run:
            with redirect_stdout(io.StringIO()):
                self._run.finish()


def _steps_of(run: str) -> set[int]:
    from trackio.sqlite_storage import SQLiteStorage

    return {entry["step"] for entry in SQLiteStorage.get_logs(_PROJECT, run)}


TRACKER = Trackio
