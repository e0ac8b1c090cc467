"""The keys that nodes, or observers, have and had, as files of public keys in a folder of the server's.

A present key has no end. One that was renewed counts until a date, or until its holder comes with the successor; one
that was revoked counts no more, and is kept so that the holder can be told since when.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from potluck.core.ground.errors import ConfigError

REGISTERED, FORMER = "registered", "former"
"""Folders of files NAME.pub: with the present key of each holder; and with those that it had, a line each."""

_REVOKED, _RENEWED = "revoked", "renewed"
_WORDS = 4  # of a line on a former key: the two of the key, why it ends, and when
_LOOK_EVERY = 1.0  # seconds
_SETTLED = 100_000_000  # nanoseconds after which another change of a folder has another time


@dataclass(frozen=True)
class RegisteredKey:
    """A key that a node or an observer, its holder, has or had.

    Attributes:
        name: the holder's.
        public: the public key, as in OpenSSH's files, without a comment.
        pem: the same in the format of nodes' requests.
        ends: when it counts no more; None for no end.
        revoked: whether that is because the operator revoked it; otherwise it has a successor.
    """

    name: str
    public: str
    pem: bytes
    ends: datetime | None = None
    revoked: bool = False

    def counts(self, now: datetime) -> bool:
        """Whether the holder may come with it."""
        return self.ends is None or now < self.ends

    @property
    def line(self) -> str:
        """A former key in its file."""
        assert self.ends is not None
        return f"{self.public} {_REVOKED if self.revoked else _RENEWED} {self.ends.isoformat(timespec='seconds')}\n"


def registered(folder: Path) -> dict[str, Path]:
    """The files of the present public keys of those that may come, by name."""
    return {path.stem: path for path in sorted((folder / REGISTERED).glob("*.pub"))}


def present_and_former(folder: Path) -> list[RegisteredKey]:
    """All keys that holders have or had, the present ones last.

    Raises:
        ConfigError: a file holds something else.
    """
    return [key for path in _files_of(folder) for key in _keys_in(path)]


def present_key(path: Path) -> RegisteredKey:
    """The key in a file of a registered one.

    Raises:
        ConfigError: the file does not hold a public key.
    """
    return _key(path, path.read_text(errors="replace").split())


def former_keys(path: Path) -> list[RegisteredKey]:
    """The keys in a file of former ones, which need not be there.

    Raises:
        ConfigError: the file holds something else.
    """
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return [_former(path, line.split()) for line in lines]


class Registry:
    """The keys in a folder, read again when its files change.

    Args:
        folder: the folder of `Role.registry_in`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._folders: Stamps | None = None
        self._files: Stamps | None = None
        self._look_again = 0.0
        self._keys: dict[bytes, RegisteredKey] = {}

    def keys(self) -> dict[bytes, RegisteredKey]:
        """By public key in the format of requests, all keys that holders have or had.

        A file that comes or goes is noticed at once, one that is written over within a second: this is asked for every
        request of a thousand nodes, and does not look at as many files each time.
        """
        folders = stamps(*(self.folder / name for name in (FORMER, REGISTERED)))
        if folders != self._folders or time.monotonic() >= self._look_again:
            settled = all(time.time_ns() - changed > _SETTLED for _, changed, _, _ in folders)
            self._folders = folders if settled else None
            self._look_again = time.monotonic() + _LOOK_EVERY
            self._look()
        return self._keys

    def _look(self) -> None:
        places = _files_of(self.folder)
        if (files := stamps(*places)) != self._files:
            self._files, self._keys = files, {}
            for path in places:
                with suppress(ConfigError, OSError):  # a file that is none costs its own holder, and no other
                    self._keys |= {key.pem: key for key in _keys_in(path)}


Stamps = tuple[tuple[str, int, int, int], ...]
"""What differs when one of several files was written, exchanged or removed."""


def stamps(*paths: Path) -> Stamps:
    """What differs from then on when one of these files is written, exchanged or removed."""
    return tuple(sorted(stamp for stamp in map(_stamp, paths) if stamp is not None))


def _files_of(folder: Path) -> list[Path]:
    return [path for kind in (FORMER, REGISTERED) for path in sorted((folder / kind).glob("*.pub"))]


def _keys_in(path: Path) -> list[RegisteredKey]:
    return former_keys(path) if path.parent.name == FORMER else [present_key(path)]


def _stamp(path: Path) -> tuple[str, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return str(path), found.st_mtime_ns, found.st_ino, found.st_size


def _former(path: Path, words: Sequence[str]) -> RegisteredKey:
    try:
        why, ends = words[2], datetime.fromisoformat(words[3])
        if len(words) != _WORDS or why not in (_REVOKED, _RENEWED) or ends.tzinfo is None:
            raise ValueError
    except (LookupError, ValueError) as error:
        raise ConfigError(
            f"{path}: expected lines of a public key, why it ended and when; delete the file, and with it those keys"
        ) from error
    return replace(_key(path, words), ends=ends, revoked=why == _REVOKED)


def _key(path: Path, words: Sequence[str]) -> RegisteredKey:
    public = " ".join(words[:2])
    try:
        key = load_ssh_public_key(public.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} holds no public key: {error}") from error
    return RegisteredKey(path.stem, public, key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
