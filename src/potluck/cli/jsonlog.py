"""What `potluck serve` and `join` say on their terminals, as JSON lines in a file that a collector of logs follows."""

import json
import os
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import typer

from potluck.cli.ending import of_the_machine
from potluck.core.ground.errors import ConfigError, PotluckError, PotluckWarning, StartAnew, explained
from potluck.core.ground.text import one_line
from potluck.locks import shortly_locked

_LONGEST_TEXT = 2000
"""The most characters of a line's text."""

_PATIENCE = 1.0
"""Seconds to wait for another process that holds the file's lock; a collector that keeps it stops nobody."""

_KEYS = "KEYS"
"""What stands in texts for the path of the folder of keys."""

_WARNINGS = ("warning: ", "refused ")
_NODE = re.compile(
    r"(?:warning: |refused |refused a request of |a former key of )?node ([A-Za-z0-9][A-Za-z0-9._-]{0,63}) "
)
"""Our own lines about one node begin so; whatever a caller has said comes later in a line."""


class JsonLog:
    """A file with a JSON object for each line that a terminal is told.

    A line is written at once, whole and in ASCII, so that no text can end it or look like another one. The file is
    opened anew for each, so that it can be renamed, emptied or removed meanwhile. It has no key, and no path of one.

    Args:
        path: the file, made for its owner alone if there is none; None writes nothing.
        side: "server" or "node".
        keys: the folder of keys, whose path is in no text.

    Raises:
        ConfigError: nothing can be appended to the file.
    """

    def __init__(self, path: Path | None, side: str, keys: Path | None = None) -> None:
        self._path = path
        self._about: dict[str, str | int] = {"side": side}
        self._hidden, self._has_names = _without_path(keys), keys is not None
        self._one_at_a_time = threading.Lock()
        self._is_broken = False
        self._warned: set[str] = set()
        self._shown_by = warnings.showwarning
        if path is not None:
            if path.exists() and not path.is_file():
                raise ConfigError(f"--log-json {path}: no file that lines can be appended to; name a file")
            try:
                _append(path, b"")
            except OSError as error:
                raise ConfigError(f"--log-json {path}: {error.strerror}; name a file that can be written") from error

    def __enter__(self) -> Self:
        self._shown_by = warnings.showwarning
        warnings.showwarning = self._warn
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        warnings.showwarning = self._shown_by
        if error is not None and (why := _reason(error)):
            self.note(why, "ended", level="error")

    def tell(self, **facts: str | int) -> None:
        """Know something that all lines say from now on, such as the run's name and its round."""
        self._about |= facts

    def note(self, text: str, event: str, *, level: str | None = None, **where: Any) -> None:
        """Add a line. Trouble in writing it is said on the terminal and ends nothing.

        Args:
            text: what the terminal says.
            event: what it is about, in a word.
            level: "info", "warning" or "error"; by default as the text begins.
            where: such as the round.
        """
        if self._path is None:
            return
        found = _NODE.match(text) if self._has_names else None
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": level or ("warning" if text.startswith(_WARNINGS) else "info"),
            "event": event,
            **self._about,
            **({"node": found[1]} if found else {}),
            **{name: value for name, value in where.items() if value is not None},
            "text": one_line(self._hidden(text), _LONGEST_TEXT),
        }
        with self._one_at_a_time:
            self._write(self._path, json.dumps(entry).encode() + b"\n")

    def _write(self, path: Path, line: bytes) -> None:
        try:
            _append(path, line)
            self._is_broken = False
        except OSError as error:
            if not self._is_broken:
                why = f"potluck: --log-json {path}: {error.strerror}; it lacks what is said meanwhile"
                with suppress(OSError):  # the reader of the terminal may be gone, too
                    typer.echo(why, err=True)
            self._is_broken = True

    def _warn(self, message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        """Show a warning as before; Potluck's own are lines, once each."""
        self._shown_by(message, category, *place, **more)
        if issubclass(category, PotluckWarning) and str(message) not in self._warned:
            self._warned.add(str(message))
            self.note(str(message), "warning", level="warning")


def _append(path: Path, line: bytes) -> None:
    """Append a line to a file by one call of the system's, after whatever a full disk has left of another one.

    Raises:
        OSError: it cannot be written, or not whole.
    """
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        with shortly_locked(file, _PATIENCE):  # a line that another process is writing looks torn
            length = os.fstat(file).st_size
            is_torn = bool(line) and length > 0 and os.pread(file, 1, length - 1) != b"\n"
            whole = b"\n" + line if is_torn else line
            if os.write(file, whole) < len(whole):
                raise OSError(None, "only a part of a line could be written")
    finally:
        os.close(file)


def _without_path(keys: Path | None) -> Callable[[str], str]:
    """A function that replaces the path of the folder of keys in a text.

    A folder's bare name may be a word that means something else; what lies in it is always written as a path.
    """
    if keys is None:
        return lambda text: text
    places = sorted({str(keys), str(keys.absolute()), str(keys.resolve())}, key=len, reverse=True)
    ends = {place: r"(?=/)" if os.sep not in place else r"(?![\w.-])" for place in places}
    pattern = re.compile("|".join(rf"(?<![\w./-]){re.escape(place)}{end}" for place, end in ends.items()))
    return lambda text: pattern.sub(_KEYS, text)


def _reason(error: BaseException) -> str | None:
    """Why a command ends, as its terminal says it; None if that was said, or it does not end."""
    if isinstance(error, StartAnew | typer.Exit | KeyboardInterrupt):
        return None
    if isinstance(error, PotluckError):
        return str(error)
    return of_the_machine(error) if isinstance(error, OSError | MemoryError) else explained(error)
