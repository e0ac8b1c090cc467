"""Submitting a run to Flower, and following it."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from potluck.experiment.settings.schema import Experiment
from potluck.flower import LARGEST_REPLY
from potluck.flower.deploy.processes import lines_after
from potluck.flower.deploy.superlink import FlowerError, SuperLink
from potluck.records import ROUNDS, Progress, RoundRecord

_LOOK_EVERY = 0.5
_ASK_EVERY = 15.0  # seconds; Flower's commands take a second of processor time each


def write_app(
    place: Path, experiment: Experiment, run: Path, largest: int = LARGEST_REPLY, *, allow_versions: bool = False
) -> Path:
    """Write the app to submit: a Flower app that names Potluck's and contains no code.

    Args:
        place: the folder to write.
        experiment: the experiment to run.
        run: the run's folder.
        largest: the most bytes of a node's reply, where the method sets no limit.
        allow_versions: whether nodes with other software may take part.
    """
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    config = {
        "experiment": json.dumps(experiment.tree()),
        "folder": str(run.resolve()),
        "largest-reply": largest,
        "allow-versions": allow_versions,
    }
    app = {
        "publisher": "potluck",
        "components": {
            "serverapp": "potluck.flower.server.serverapp:server_app",
            "clientapp": "potluck.flower.node.clientapp:client_app",
        },
        "config": config,
    }
    project = {
        "name": "potluck-run",
        "version": "0.1.0",
        "description": "A run of Potluck",
        "license": "Apache-2.0",
        "dependencies": ["flwr>=1.41,<2"],
    }
    (place / "pyproject.toml").write_text(tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}}))
    return place


def run_app(link: SuperLink, app: Path, run: Path, say: Callable[[str], None]) -> Iterator[RoundRecord | Progress]:
    """Submit an app and yield the rounds as they end, and in between how the run stands.

    The run is stopped when the caller stops iterating.

    Args:
        link: the SuperLink to submit to.
        app: the folder that `write_app` wrote.
        run: the run's folder.
        say: called with news of registered and revoked nodes, and of what the run waits for.

    Raises:
        FlowerError: the run failed; says why.
    """
    shown, heard = len(_rounds(run)), EventLog(run).size
    number, over = link.submit(app), False
    before: Progress | None = None
    asked = time.monotonic()
    try:
        while not over:
            event, heard = EventLog(run).after(heard)
            for record in _rounds(run)[shown:]:
                shown += 1
                yield record
            if (now := Progress.read(run)) not in (before, None):
                before = now
                yield now
            for line in (*event.lines, *link.register()):
                say(line)
            if event.failure:
                raise FlowerError(event.failure)
            over = event.over
            if time.monotonic() - asked > _ASK_EVERY:
                link.check()
                _check_alive(link, number)
                asked = time.monotonic()
            time.sleep(_LOOK_EVERY)
    finally:
        if not over:
            with suppress(FlowerError):
                link.stop_run(number)


@dataclass(frozen=True)
class Events:
    """A server app's events: lines for the user, whether it has ended, and the reason if it failed."""

    lines: list[str]
    over: bool
    failure: str | None


class EventLog:
    """A file in the run's folder by which the server app, in a process of Flower's, reports to `run_app`."""

    def __init__(self, run: Path) -> None:
        self._path = run / "flower.jsonl"

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self._path.stat().st_size if self._path.is_file() else 0

    def say(self, line: str) -> None:
        """Tell something."""
        self._append({"say": line})

    def end(self, failure: str | None = None) -> None:
        """Report the end, and the reason if it is a failure."""
        self._append({"end": failure})

    def after(self, position: int) -> tuple[Events, int]:
        """The events after a position, and the new position."""
        lines, position = lines_after(self._path, position)
        events = [json.loads(line) for line in lines]
        ends = [event["end"] for event in events if "end" in event]
        return Events(
            [event["say"] for event in events if "say" in event], bool(ends), ends[-1] if ends else None
        ), position

    def _append(self, event: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(event) + "\n")


def _rounds(run: Path) -> list[RoundRecord]:
    return [RoundRecord(**json.loads(line)) for line in lines_after(run / ROUNDS, 0)[0]]


def _check_alive(link: SuperLink, number: str) -> None:
    """Check that Flower still runs the app, which may die without reporting it.

    Raises:
        FlowerError: it does not.
    """
    status, why = link.status(number)
    if status.startswith("finished") and status != "finished:completed":
        raise FlowerError(f"Flower ended the run: {why or status}; see {link.log}")
