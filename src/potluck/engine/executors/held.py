"""Outcomes that arrived before their turn: in memory up to a cap, beyond it in temporary files."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from potluck.engine.client.runtime import Outcome

MOST_BYTES = 2**25
"""The cap. Outcomes of small networks never reach it; a single one of a large network does."""

_LONG = ("payload", "record")
"""Attributes of outcomes that hold large byte strings."""


class Held(MutableMapping[int, Outcome]):
    """Outcomes by index; they are read in this order but arrive in another.

    Args:
        arrived: called with the index and the outcome when one arrives.
        most_bytes: the cap on memory, `MOST_BYTES` if None; outcomes beyond it go to a file until they are read.
    """

    def __init__(
        self, arrived: Callable[[int, Outcome], None] = lambda place, outcome: None, most_bytes: int | None = None
    ) -> None:
        self._arrived = arrived
        self._most_bytes = MOST_BYTES if most_bytes is None else most_bytes
        self._bytes = 0
        self._outcomes: dict[int, Outcome] = {}
        self._files: dict[int, dict[str, Path]] = {}
        self._folder: Path | None = None

    def __setitem__(self, place: int, outcome: Outcome) -> None:
        long = _long(outcome)
        size = sum(map(len, long.values()))
        if self._bytes + size <= self._most_bytes:
            self._bytes += size
        else:
            self._files[place] = {name: self._written(f"{place}-{name}", value) for name, value in long.items()}
            outcome = _with(outcome, dict.fromkeys(long, b""))
        self._outcomes[place] = outcome
        self._arrived(place, outcome)

    def __getitem__(self, place: int) -> Outcome:
        files = self._files.get(place, {})
        return _with(self._outcomes[place], {name: path.read_bytes() for name, path in files.items()})

    def __delitem__(self, place: int) -> None:
        for path in (files := self._files.pop(place, {})).values():
            path.unlink()
        outcome = self._outcomes.pop(place)
        if not files:
            self._bytes -= sum(map(len, _long(outcome).values()))

    def __contains__(self, place: object) -> bool:
        return place in self._outcomes

    def __iter__(self) -> Iterator[int]:
        return iter(self._outcomes)

    def __len__(self) -> int:
        return len(self._outcomes)

    def _written(self, name: str, content: bytes) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="potluck-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = self._folder / name
        path.write_bytes(content)
        return path


def _long(outcome: Outcome) -> dict[str, bytes]:
    return {name: value for name in _LONG if (value := getattr(outcome, name, None)) is not None}


def _with(outcome: Any, long: Mapping[str, bytes]) -> Any:
    return replace(outcome, **long) if long else outcome
