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
from potluck.records import CHECKPOINT, LAST, ROUNDS, Checkpoint, Progress, RoundRecord

_LOOK_EVERY = 0.5
_QUIET = 15.0  # seconds without a word, after which Flower is asked: its commands take a second of a whole core


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


@dataclass(frozen=True)
class NodeRefused:
    """A node takes no part in a run; `why` is one line, in part of the node's own words."""

    name: str
    why: str


def run_app(
    link: SuperLink,
    app: Path,
    run: Path,
    say: Callable[[str], None],
    tell_of_node: Callable[[str], None] | None = None,
) -> Iterator[RoundRecord | Progress | NodeRefused]:
    """Submit an app and yield the rounds as they end, and in between how the run stands and which nodes are refused.

    The run is stopped when the caller stops iterating.

    Args:
        link: the SuperLink to submit to.
        app: the folder that `write_app` wrote.
        run: the run's folder.
        say: called with what the run waits for, and other news of it.
        tell_of_node: called with news of registered and revoked nodes; by default `say`.

    Raises:
        FlowerError: the run failed; says why.
    """
    finished, heard = _Finished(run), EventLog(run).size
    number, over = link.submit(app), False
    before: Progress | None = None
    last = time.monotonic()
    try:
        while not over:
            event, read = EventLog(run).after(heard)
            yield from finished.new()
            yield from event.refused
            if read != heard:
                heard, last = read, time.monotonic()
            if (now := Progress.read(run)) not in (before, None):
                before, last = now, time.monotonic()
                yield now
            for line in event.lines:
                say(line)
            for line in link.register():
                (tell_of_node or say)(line)
            if event.failure:
                raise FlowerError(event.failure)
            over = event.over
            link.check()
            if time.monotonic() - last > _QUIET:
                _check_alive(link, number)
                last = time.monotonic()
            time.sleep(_LOOK_EVERY)
    finally:
        if not over:
            with suppress(FlowerError):
                link.stop_run(number)


@dataclass(frozen=True)
class Events:
    """A server app's events: lines for the user, whether it has ended, the reason if it failed, and refused nodes."""

    lines: list[str]
    over: bool
    failure: str | None
    refused: list[NodeRefused]


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

    def refuse(self, name: str, why: str) -> None:
        """Tell of a node that takes no part."""
        self._append({"refused": name, "why": why})

    def end(self, failure: str | None = None) -> None:
        """Report the end, and the reason if it is a failure."""
        self._append({"end": failure})

    def after(self, position: int) -> tuple[Events, int]:
        """The events after a position, and the new position."""
        lines, position = lines_after(self._path, position)
        events = [json.loads(line) for line in lines]
        ends = [event["end"] for event in events if "end" in event]
        said = [event["say"] for event in events if "say" in event]
        refused = [NodeRefused(event["refused"], event["why"]) for event in events if "refused" in event]
        return Events(said, bool(ends), ends[-1] if ends else None, refused), position

    def _append(self, event: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(event) + "\n")


class _Finished:
    """The rounds that end from now on, each of whose lines is read once, however many there are.

    Lines that a killed run has left beyond its checkpoint are in the file at first, and do not count. Whoever goes on
    with the run writes the file anew without them, and adds those rounds again.

    Args:
        run: the run's folder.
    """

    def __init__(self, run: Path) -> None:
        self._place = run / ROUNDS
        checkpoint = Checkpoint.read(run / CHECKPOINT / LAST)
        records = checkpoint.records if checkpoint else None
        self._again = records[ROUNDS].bytes if records and ROUNDS in records else 0
        self._last = checkpoint.round if checkpoint else 0
        self._file, self._position = self._now()

    def new(self) -> list[RoundRecord]:
        """Those that have ended since the last time."""
        file, _ = self._now()
        if file not in (self._file, None):
            self._file, self._position = file, self._again if self._file is not None else 0
        lines, self._position = lines_after(self._place, self._position)
        found = [record for record in (RoundRecord(**json.loads(line)) for line in lines) if record.round > self._last]
        self._last = found[-1].round if found else self._last
        return found

    def _now(self) -> tuple[int | None, int]:
        """Which file it is, None if there is none, and how long it is."""
        try:
            found = self._place.stat()
        except FileNotFoundError:
            return None, 0
        return found.st_ino, found.st_size


def _check_alive(link: SuperLink, number: str) -> None:
    """Check that Flower still runs the app, which may die without reporting it.

    Raises:
        FlowerError: it does not.
    """
    status, why = link.status(number)
    if status.startswith("finished") and status != "finished:completed":
        raise FlowerError(f"Flower ended the run: {why or status}; see {link.log}")
