"""TensorBoard: event files in the run's folder `tensorboard`; `tensorboard --logdir runs` shows all runs."""

import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from potluck.experiment.watching.trackers.tracker import Tracker


class TensorBoard(Tracker):
    """Writes event files. A round is one event, so that a file cut short by a kill has it whole or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self._writer: Any = None

    def open(self, folder: Path, name: str, identity: str, settings: Mapping[str, Any]) -> Collection[int]:
        """A new file for this process, beside those of earlier ones."""
        place = folder / "tensorboard"
        place.mkdir(exist_ok=True)
        known = {step for path in sorted(place.glob("events.out.tfevents.*")) for step in _steps_in(path)}
        now = time.time()
        file = (place / f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}").open("xb")
        self._writer = RecordWriter(file)
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        if not known:
            self._write(
                Event(wall_time=now, summary=hparams_pb(dict(settings), trial_id=identity, start_time_secs=now))
            )
        return known - {0}

    def send(self, round: int, numbers: Mapping[str, float]) -> None:
        """One event."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._write(Event(wall_time=time.time(), step=round, summary=Summary(value=values)))

    def close(self, status: str) -> None:
        """Close the file."""
        if self._writer:
            self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def _steps_in(path: Path) -> set[int]:
    """The steps that a file has numbers of; a torn event at its end does not count."""
    return {event.step for event in EventFileLoader(str(path)).Load() if event.HasField("summary")}


TRACKER = TensorBoard
