"""Randomness by key: every draw is named by what it is for, so order and parallelism never change a result."""

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
"""Of the thread that torch's global generator belongs to for now; others wait for it, or they would share draws."""


def _new_turn() -> None:
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):  # the thread whose turn it was may not be in the new process
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
        # Other kinds of whole numbers and text must not change the draw: how they print would.
        plain = tuple(str.__str__(part) if isinstance(part, str) else index(part) for part in self.path)
        object.__setattr__(self, "path", plain)

    def fold(self, *parts: int | str) -> "Key":
        """The key below this one that `parts` name."""
        return Key(self.path + parts)

    @property
    def seed(self) -> int:
        """A 63-bit integer that depends on the whole path."""
        digest = hashlib.blake2b(repr(self.path).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def generator(self) -> torch.Generator:
        """A fresh CPU generator seeded by this key."""
        return torch.Generator().manual_seed(self.seed)


def fold_in(seed: int, *parts: int | str) -> Key:
    """The key for `parts` (purpose, round, exchange, client ...) of a run with this seed."""
    return Key((seed, *parts))


@contextmanager
def isolated(key: Key) -> Generator[None]:
    """Seed torch's global CPU generator from `key` inside the block and put its state back afterwards.

    Module initialisers and Dropout can draw only from the global generator; this keeps them reproducible
    and keeps the caller's own stream where it was. Threads are in such a block one after the other.
    """
    with _turn:
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(key.seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


class Stream:
    """Draws from torch's global generator that go on where they stopped, whatever is drawn in between."""

    def __init__(self, key: Key) -> None:
        self._state = key.generator().get_state()

    @contextmanager
    def flowing(self) -> Generator[None]:
        """Inside the block the global generator is this stream; afterwards it is what it was. See `isolated`."""
        with _turn:
            before = torch.default_generator.get_state()
            torch.default_generator.set_state(self._state)
            try:
                yield
            finally:
                self._state = torch.default_generator.get_state()
                torch.default_generator.set_state(before)
