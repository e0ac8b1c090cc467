"""The errors a caller would catch; the command line prints them on one line and exits with 2."""

import difflib
from collections.abc import Iterable


class PotluckError(Exception):
    """Something the user can mend; the message says what was found, where, what was expected, what to do."""


class ConfigError(PotluckError, ValueError):
    """A configuration key or value is not one that Potluck accepts."""


class DataError(PotluckError, ValueError):
    """A data set is missing or cannot be divided as asked."""


class WireError(PotluckError, ValueError):
    """Bytes that should hold a message do not, or a value that cannot cross the wire was put in one."""


class DivergenceError(PotluckError):
    """Numbers became NaN, infinite or far too large, and the run was not told to go on without them."""


class CheckpointError(PotluckError):
    """A run folder cannot be resumed or read."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The `count` names closest to `name`, best first, never empty while there are names."""
    known = sorted(known)
    return difflib.get_close_matches(name, known, n=count, cutoff=0.3) or known[:count]
