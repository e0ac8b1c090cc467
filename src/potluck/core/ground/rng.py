"""Randomness by key: every draw is named by its purpose, so order and parallelism never change a result."""

import hashlib
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index

import torch

_PLAIN = frozenset({int, str})
_turn = threading.RLock()
"""Held by the thread that uses torch's global generator; others wait, or they would share draws."""


def _new_turn() -> None:
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):  # the thread that held the lock may not exist in the new process
    os.register_at_fork(after_in_child=_new_turn)


@dataclass(frozen=True)
class Key:
    """A place in the tree of random draws, such as (seed, "client", round, exchange, id).

    Keys are values: folding returns a new key and nothing is ever advanced, so no generator state has to be
    saved with a checkpoint and a resumed run draws what the uninterrupted one would have drawn.
    """

    path: tuple[int | str, ...]

    def __post_init__(self) -> None:
        if type(self.path) is tuple and _PLAIN.issuperset(map(type, self.path)):
            return
        # Subclasses of int and str must not change the draw, as their repr would.
        plain = tuple(str.__str__(part) if isinstance(part, str) else index(part) for part in self.path)
        object.__setattr__(self, "path", plain)

    def fold(self, *parts: int | str) -> "Key":
        """This key extended by `parts`."""
        return Key(self.path + parts)

    @property
    def seed(self) -> int:
        """A 63-bit integer that depends on the whole path."""
        digest = hashlib.blake2b(repr(self.path).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def generator(self) -> torch.Generator:
        """A new CPU generator seeded by this key."""
        return torch.Generator().manual_seed(self.seed)


def fold_in(seed: int, *parts: int | str) -> Key:
    """The key for `parts` (purpose, round, exchange, client ...) of a run with this seed."""
    return Key((seed, *parts))


@contextmanager
def isolated(key: Key) -> Generator[None]:
    """Seed torch's global CPU generator from `key` inside the block and put its state back afterwards.

    Module initialisers and Dropout can draw only from the global generator; this makes them reproducible and leaves the
    caller's stream unchanged. Threads enter such a block one at a time.
    """
    with _turn:
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(key.seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


class Stream:
    """A stream of draws from torch's global generator that continues where it stopped, whatever is drawn in between."""

    def __init__(self, key: Key) -> None:
        self._state = key.generator().get_state()

    @contextmanager
    def flowing(self) -> Generator[None]:
        """Make this stream the global generator's inside the block; restore it afterwards. See `isolated`."""
        with _turn:
            before = torch.default_generator.get_state()
            torch.default_generator.set_state(self._state)
            try:
                yield
            finally:
                self._state = torch.default_generator.get_state()
                torch.default_generator.set_state(before)
