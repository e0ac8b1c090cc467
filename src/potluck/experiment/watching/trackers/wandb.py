"""Weights & Biases: a run of the project `potluck`, or of `WANDB_PROJECT`, with its files in the run's folder.

Without a login nothing leaves the machine; `wandb sync RUN/wandb/offline-run-*` sends it later.
"""

import io
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

from potluck.experiment.watching.trackers.tracker import Tracker

_HEADER, _BLOCK = 7, 2**15
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class WeightsAndBiases(Tracker):
    """Logs to Weights & Biases: online if the user is logged in or `WANDB_MODE` says so, else to files."""

    def __init__(self) -> None:
        super().__init__()
        self._run: Any = None

    def open(self, folder: Path, name: str, identity: str, settings: Mapping[str, Any]) -> Collection[int]:
        """The run with this identity; a resumed one without a login has a further folder of files, of the same run."""
        known = {step for path in folder.glob("wandb/offline-run-*/run-*.wandb") for step in steps_in(path)}
        mode = _mode()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "potluck"),
            id=identity,
            name=name,
            dir=folder,
            config=dict(settings),
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
        return known | set(range(1, self._run.step)) if self._run.resumed else known

    def send(self, round: int, numbers: Mapping[str, float]) -> None:
        """One step."""
        self._run.log(dict(numbers), step=round, commit=True)

    def close(self, status: str) -> None:
        """Finish, and end the processes and threads of Weights & Biases."""
        if self._run:
            self._run.finish(exit_code=0 if status == "finished" else 1)
            wandb.teardown()


def _mode() -> Any:
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    with redirect_stderr(io.StringIO()):  # it says where it has found the key
        return "online" if wandb.login(prompt=False, verify=False) else "offline"


def steps_in(path: Path) -> set[int]:
    """The steps in a file of an offline run; what a kill has cut short at its end does not count."""
    records = (Record.FromString(content) for content in _records(path.read_bytes()))
    return {record.history.step.num for record in records if record.WhichOneof("record_type") == "history"}


def _records(content: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format behind a header: blocks, in which a record may be divided."""
    place, parts = _HEADER, bytearray()
    while place + _HEADER <= len(content):
        room = _BLOCK - place % _BLOCK
        if room < _HEADER:
            place += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        place += _HEADER
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or place + length > len(content):
            return
        parts = bytearray() if kind in (_WHOLE, _FIRST) else parts
        parts += content[place : place + length]
        place += length
        if kind in (_WHOLE, _LAST):
            yield bytes(parts)


TRACKER = WeightsAndBiases
