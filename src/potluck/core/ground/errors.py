"""The errors that callers may catch; the command line prints them on one line and exits with 2."""

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

_OURS = Path(__file__).resolve().parents[2]
_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_LONGEST = 300


class PotluckError(Exception):
    """An error that the user can fix; the message says what was found, where, what was expected, and what to do."""


class ConfigError(PotluckError, ValueError):
    """A configuration key or value is not one that Potluck accepts."""


class StartAnew(ConfigError):
    """A setting wants the program to be started with other environment variables; the command line does so by itself.

    Attributes:
        environment: these variables.
    """

    def __init__(self, message: str, environment: Mapping[str, str]) -> None:
        super().__init__(message)
        self.environment = environment


class DataError(PotluckError, ValueError):
    """A data set is missing or cannot be divided as asked."""


class WireError(PotluckError, ValueError):
    """Bytes that should be a message are not, or a message holds a value that cannot be sent."""


class EntryError(PotluckError, KeyError):
    """A message has no entry with the name that was read."""

    __str__ = Exception.__str__  # a KeyError would show the text in quotes


class DivergenceError(PotluckError):
    """Numbers became NaN, infinite or far too large, and the run is not configured to continue without them."""


class CheckpointError(PotluckError):
    """A run folder cannot be resumed or read."""


class StorageError(PotluckError, OSError):
    """A file of a run cannot be read or written: the disk is full, say, or permission is missing."""


class PotluckWarning(UserWarning):
    """A warning that the user should see before the first round; the command line prints it on one line."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The `count` names closest to `name`, best first; never empty if there are names."""
    known = sorted(known)
    return difflib.get_close_matches(name, known, n=count, cutoff=0.3) or known[:count]


def explained(error: BaseException) -> str:
    """Type and text of an error on one line, with the last line of the traceback that is in one of the user's files."""
    text = " ".join(str(error).split())
    shown = f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{shown}; {frames[-1].filename}, line {frames[-1].lineno}" if frames else shown


def place_in(trace: str) -> str:
    """The last line in a file of the user's that a traceback's text shows, as "FILE, line N"; empty if none does."""
    places = re.findall(r'^ *File "(.+?)", line (\d+)', trace, flags=re.MULTILINE)
    own = [f"{file}, line {line}" for file, line in places if is_users(file)]
    return own[-1] if own else ""


def is_users(filename: str) -> bool:
    """Whether a source file is the user's: neither Potluck's, nor Python's, nor an installed package's."""
    path = Path(filename)
    return path.is_absolute() and not any(path.resolve().is_relative_to(place) for place in (_OURS, *_INSTALLED))
