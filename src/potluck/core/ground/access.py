"""The door to files that an experiment names: open in one's own runs, and at a node only to what its owner named.

The experiment that a node carries out is a stranger's text. Whatever makes code, data or weights of a path asks here
first, so that it does not matter by which setting the path came.
"""

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from potluck.core.ground.errors import ConfigError

_owners: tuple[Path, ...] | None = None  # of the process, not of a thread: a thread that starts later is kept out too


@contextmanager
def only(owners: Iterable[Path]) -> Generator[None]:
    """Inside the block this process makes nothing of any file but these, and those below folders among them."""
    global _owners
    before, _owners = _owners, tuple(map(_plain, owners))
    try:
        yield
    finally:
        _owners = before


def entered(path: Path) -> Path:
    """The path, if this process may open it.

    Raises:
        ConfigError: it is not among those that the node's owner named; whether there is such a file is not told.
    """
    if _owners is not None and not any(_plain(path).is_relative_to(own) for own in _owners):
        raise ConfigError(
            f"{str(path)[:80]!r} is no file that this node's owner named; an experiment names no files at a node: its"
            " owner does, by potluck join --data, --model and --allow-code"
        )
    return path


def _plain(path: Path) -> Path:
    """The path from the root, without `..`; no link is followed, since what an owner's folder holds is the owner's."""
    return Path(os.path.abspath(os.path.expanduser(path)))
