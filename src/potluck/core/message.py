"""Messages between server and clients, and their sizes."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from potluck.core.ground.errors import EntryError, WireError, nearest
from potluck.core.ground.tree import DEEPEST, can_be_written, pack, unpack

_NUMBER_BYTES = 8


class Message(Mapping[str, Any]):
    """Named entries: tensors, nested dicts of tensors, numbers, text. An entry set to None is absent.

    `message["weights"]` reads an entry that must be there; `message.get("features")` one that may be absent, such as
    features in the first round.
    """

    def __init__(self, /, **entries: Any) -> None:
        self._entries = {name: value for name, value in entries.items() if value is not None}
        for name, value in self._entries.items():
            _check(value, name, DEEPEST)

    def __getitem__(self, name: str) -> Any:
        if name in self._entries:
            return self._entries[name]
        near = ", ".join(map(repr, nearest(name, self._entries))) or "none, the message is empty"
        raise EntryError(f"message has no entry {name!r}; nearest: {near}; use .get for an entry that may be absent")

    def get(self, name: str, default: Any = None) -> Any:
        """The entry, or `default` if it is absent."""
        return self._entries.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Message({', '.join(f'{name}: {size} B' for name, size in self.sizes().items())})"

    def sizes(self) -> dict[str, int]:
        """Payload bytes of each entry: tensors as stored, 8 for a number, UTF-8 length for text; no framing."""
        return {name: _payload_bytes(value) for name, value in self._entries.items()}

    @property
    def nbytes(self) -> int:
        """Payload bytes of the whole message."""
        return sum(self.sizes().values())

    @property
    def identity(self) -> Hashable:
        """Equal for messages of the same names, plain values and tensor objects, which therefore have equal bytes."""
        return _identity(self._entries)

    def encode(self) -> bytes:
        """The message as bytes, which `decode` reads."""
        return pack(self._entries)

    @classmethod
    def decode(cls, data: bytes, *, views: bool = False) -> "Message":
        """The message encoded in `data`; shares no memory with the original.

        Args:
            data: the bytes.
            views: whether its tensors are to lie in `data`, see `potluck.core.ground.tree.unpack`.

        Raises:
            WireError: `data` is not an encoded message.
        """
        entries = unpack(data, views=views)
        if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
            raise WireError("not a Potluck message: expected named entries")
        return cls(**entries)


@dataclass
class Traffic:
    """Payload bytes counted by the engine, per entry name, in each direction."""

    down: Counter[str] = field(default_factory=lambda: Counter())
    up: Counter[str] = field(default_factory=lambda: Counter())

    @property
    def bytes_down(self) -> int:
        """Everything the server sent."""
        return sum(self.down.values())

    @property
    def bytes_up(self) -> int:
        """Everything the clients sent."""
        return sum(self.up.values())


def _check(value: Any, where: str, deeper: int) -> None:
    if isinstance(value, str) and not can_be_written(value):
        raise WireError(f"message entry {where} is text with half of a surrogate pair, which has no encoding")
    if isinstance(value, (Tensor, bool, int, float, str)):
        return
    if not isinstance(value, dict):
        raise WireError(f"message entry {where} is a {type(value).__name__}; expected tensors, numbers or text")
    if deeper == 0:
        raise WireError(f"message entry {where[:80]}... lies deeper than {DEEPEST} dicts")
    for key, child in value.items():
        if not isinstance(key, str) or not can_be_written(key):
            raise WireError(f"message entry {where} has the key {key!r}; expected text")
        if child is not None:
            _check(child, f"{where}.{key}", deeper - 1)


def _identity(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple((key, _identity(child)) for key, child in value.items())
    return id(value) if isinstance(value, Tensor) else (type(value), value)


def _payload_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_payload_bytes(child) for child in value.values())
    if isinstance(value, str):
        return len(value.encode())
    return 0 if value is None else _NUMBER_BYTES
