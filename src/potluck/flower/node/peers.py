"""A node's key for secure sums, and the list of those whose keys its owner trusts: `potluck peer`, `join --peers`.

The server passes on all that nodes say to one another. A list from somewhere else is what keeps it from putting keys
of its own in the place of theirs.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck.core.ground.errors import ConfigError, StorageError
from potluck.core.ground.text import one_line
from potluck.flower.deploy.processes import private_folder

SUMS_KEY = "sums.key"
"""The file of a node's own key, in the folder for its state."""

_KEY_BYTES = 32
_LINE = re.compile(r"(\S{1,64})\s+([0-9a-f]{64})")


def identity_in(state: Path) -> Ed25519PrivateKey:
    """The key with which a node signs its part in secure sums, made at its first use.

    Raises:
        ConfigError: the file holds none, or others may read it.
        StorageError: it cannot be read or written.
    """
    path = state / SUMS_KEY
    try:
        if not path.exists():
            _make(path)
        secret, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error
    if mode & 0o077:
        raise ConfigError(f"{path}: others may read this secret; expected mode 600: chmod 600 {path}")
    if len(secret) != _KEY_BYTES:
        raise ConfigError(f"{path}: found {len(secret)} bytes; expected the {_KEY_BYTES} of a key that `potluck` made")
    return Ed25519PrivateKey.from_private_bytes(secret)


def public_text(identity: Ed25519PrivateKey) -> str:
    """The public half as 64 hex digits, as introductions and lists of peers have it."""
    return identity.public_key().public_bytes_raw().hex()


def line_of(name: str, state: Path) -> str:
    """A node's line for the lists of others' owners.

    Raises:
        ConfigError: the name is none, or the key's file holds none.
        StorageError: the folder cannot be written to.
    """
    if not _LINE.fullmatch(f"{name} {'0' * 64}"):
        raise ConfigError(f"found the name {one_line(name, 80)!r}; expected up to 64 characters without spaces")
    private_folder(state)
    return f"{name} {public_text(identity_in(state))}"


def read_peers(path: Path | None) -> Collection[bytes] | None:
    """The keys in an owner's list, one on a line after a name; None without a list. What follows `#` is a comment.

    Raises:
        ConfigError: the file cannot be read, a line is none, or a key is there twice.
    """
    if path is None:
        return None
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--peers {path}: {one_line(str(error), 120)}; expected a file of `potluck peer`'s lines"
        ) from error
    found: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not (said := line.partition("#")[0].strip()):
            continue
        if not (match := _LINE.fullmatch(said)):
            raise ConfigError(f"--peers {path}, line {number}: expected NAME KEY, as `potluck peer NAME` prints it")
        if (first := found.setdefault(bytes.fromhex(match[2]), number)) != number:
            raise ConfigError(f"--peers {path}, line {number}: the key of line {first} again; expected one of its own")
    if not found:
        raise ConfigError(
            f"--peers {path}: found no line; expected one for each peer, as `potluck peer NAME` prints it"
        )
    return found.keys()


def _make(path: Path) -> None:
    """Write a new key, which nobody else may read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(Ed25519PrivateKey.generate().private_bytes_raw())
        file.flush()
        os.fsync(file.fileno())
