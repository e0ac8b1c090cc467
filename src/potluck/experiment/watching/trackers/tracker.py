"""What all trackers share: which numbers they get, under which names, and that no round is logged twice."""

import importlib
import json
import secrets
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from potluck.core.ground.errors import ConfigError
from potluck.engine.disk.files import write_atomically
from potluck.experiment.watching.observers import Observer, RunEnd, RunStart
from potluck.experiment.watching.trackers.names import TrackerName, check_installed, names_of
from potluck.records import TRACKED, RoundRecord


class Tracker(Observer):
    """Sends each round's numbers somewhere, once.

    When a run is resumed, the tracker asks for the rounds that it has already, and sends those that are in the run's
    records and not there: a process that was killed may not have sent its last ones.
    """

    may_fail: ClassVar[bool] = True

    def __init__(self) -> None:
        self._sent: set[int] = set()

    def on_run_start(self, event: RunStart) -> None:
        """Begin or continue the tracked run."""
        assert event.folder is not None  # as `Run` has checked
        name = event.folder.resolve().name
        self._sent = set(self.open(event.folder, name, identity_of(event.folder), dict(flat_settings(event.settings))))
        for record in event.earlier():
            self.on_round_end(record)

    def on_round_end(self, event: RoundRecord) -> None:
        """Send a round's numbers, unless they were sent before."""
        if event.round not in self._sent:
            self._sent.add(event.round)
            self.send(event.round, numbers_of(event))

    def on_run_end(self, event: RunEnd) -> None:
        """Let go of the tracked run, and say how the run ended."""
        self.close(event.status)

    @abstractmethod
    def open(self, folder: Path, name: str, identity: str, settings: Mapping[str, Any]) -> Collection[int]:
        """Begin or continue the tracked run; return the rounds that it has already.

        Args:
            folder: of the run.
            name: of the run, for people.
            identity: of the tracked run: the same when the run is resumed, and no other run's.
            settings: the configuration by dotted key.
        """

    @abstractmethod
    def send(self, round: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of one round."""

    @abstractmethod
    def close(self, status: str) -> None:
        """End in order; also called if `open` failed."""


def trackers(track: TrackerName | Sequence[TrackerName]) -> list[Tracker]:
    """A tracker for each name, none of them begun.

    Raises:
        ConfigError: one is not installed, or cannot be used.
    """
    check_installed(track)
    return [_tracker(name) for name in names_of(track)]


def _tracker(name: TrackerName) -> Tracker:
    try:
        return importlib.import_module(f"potluck.experiment.watching.trackers.{name}").TRACKER()
    except Exception as error:
        raise ConfigError(f"run.track: {name} cannot be used: {type(error).__name__}: {error}") from error


def identity_of(folder: Path) -> str:
    """The identity of a run for trackers, drawn once and kept in its folder."""
    place = folder / TRACKED
    if not place.is_file():
        write_atomically(place, json.dumps({"identity": secrets.token_hex(8)}).encode())
    return str(json.loads(place.read_bytes())["identity"])


def numbers_of(record: RoundRecord) -> dict[str, float]:
    """The numbers of a record by readable name, such as `personal/accuracy` or `bytes/up`."""
    found: dict[str, float | None] = {
        "loss/local": record.loss_local,
        "bytes/down": record.bytes_down,
        "bytes/up": record.bytes_up,
        "bytes/evaluation": record.bytes_evaluation,
        "clients/replied": len(record.replied),
        "clients/failed": len(record.failed),
    }
    for measure, values in (record.metrics or {}).items():
        found |= {f"{measure}/{name}": value for name, value in values.items()}
    for measure, architectures in (record.metrics_by_architecture or {}).items():
        for architecture, values in architectures.items():
            found |= {f"{measure}/{name}/{architecture}": value for name, value in values.items()}
    found |= {f"notes/{name}": value for name, value in (record.notes or {}).items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def flat_settings(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The settings by dotted key; what is not set is left out."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from flat_settings(value, f"{above}{key}.")
        elif value is not None:
            yield f"{above}{key}", value if isinstance(value, bool | int | float | str) else json.dumps(value)
