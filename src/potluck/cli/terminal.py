"""Writing to a terminal: a console whose reader may go, and how numbers of a run read."""

import os
from contextlib import suppress
from typing import Any, TextIO, cast

from rich.console import Console

from potluck.records import Progress, duration

_MEGABYTE = 10**6


class _Patient:
    """A stream whose reader may close it, after which output is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, unless the reader is gone."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console_on(stream: TextIO) -> Console:
    """A console that goes on when the reader of its stream has gone."""
    return Console(file=cast("TextIO", _Patient(stream)))


def line_of(progress: Progress, *, ended: bool = False) -> str:
    """How a run stands on one line; if a round has `ended`, without what is done at the moment."""
    words = [f"round {progress.round}/{progress.rounds}"]
    words += [] if ended else [progress.words]
    words += [f"loss {progress.loss:.4g}"] if progress.loss is not None else []
    words += [progress.score] if progress.score else []
    words += [megabytes(progress.bytes)] if progress.bytes or ended else []
    words += [f"{duration(progress.seconds_left)} left"] if progress.seconds_left and progress.round else []
    return "  ".join(words)


def megabytes(count: int) -> str:
    """A number of bytes."""
    return f"{count / _MEGABYTE:.1f} MB"
