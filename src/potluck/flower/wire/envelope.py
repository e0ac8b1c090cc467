"""Words and bytes as Flower's records: all tensors in one array of bytes, a few words beside it.

Flower moves every array as an object of its own, so a message of many small ones takes minutes. Imports nothing heavy:
every message to a node starts a process that imports this.
"""

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from potluck.core.errors import WireError
from potluck.flower import Parcel

LONGEST_WORDS = 2**23
"""Bytes of the words beside a payload: 8 MiB. The longest are introductions, some 120 bytes for each tensor of a
network: this is enough for fifty thousand tensors."""

DEEPEST_WORDS = 16
"""Lists and tables within one another; an experiment's tables, which go to every node, are five deep."""

MOST_WORDS = 2**20
"""Values, lists and tables; as Python objects they take several hundred bytes each."""

_WORDS, _PAYLOAD, _KIND = "potluck", "payload", "packed"
_VERSION = 3


def packed(payload: bytes) -> ArrayRecord:
    """A payload as Flower sends it; what several messages share is packed, and checked, once."""
    array = Array(dtype="uint8", shape=(len(payload),), stype="potluck.packed", data=payload)
    return ArrayRecord({_KIND: array})


def wrap(words: Mapping[str, Any], payload: bytes | ArrayRecord = b"") -> RecordDict:
    """A parcel as records; its payload may be packed already."""
    records = RecordDict({_WORDS: ConfigRecord({"version": _VERSION, "words": json.dumps(dict(words))})})
    if payload:
        records[_PAYLOAD] = packed(payload) if isinstance(payload, bytes) else payload
    return records


def unwrap(records: RecordDict) -> Parcel:
    """What `wrap` was given.

    Raises:
        WireError: something else made the records, or their words are longer than the limits allow.
    """
    try:
        head = records.config_records[_WORDS]
        if head["version"] != _VERSION:
            theirs = str(head["version"])[:20]
            raise WireError(f"the other side speaks version {theirs} of the wire, this one {_VERSION}")
        words = read_words(head["words"])
        payload = records.array_records[_PAYLOAD][_KIND].data if _PAYLOAD in records else b""
    except (LookupError, TypeError, AttributeError) as error:
        raise WireError(f"not a message of Potluck's: {str(error)[:200]}") from error
    if not isinstance(payload, bytes):
        raise WireError("not a message of Potluck's: its payload is not bytes")
    return words, payload


def read_words(text: object) -> dict[str, Any]:
    """A table of plain values, from JSON.

    Raises:
        WireError: it is none, or larger than the limits allow.
    """
    if not isinstance(text, str | bytes) or len(text) > LONGEST_WORDS:
        size = f"{len(text)} long" if isinstance(text, str | bytes) else f"a {type(text).__name__}"
        raise WireError(f"not a message of Potluck's: its words are {size}; at most {LONGEST_WORDS} bytes are read")
    try:
        words = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a message of Potluck's: {str(error)[:200]}") from error
    if not isinstance(words, dict):
        raise WireError("not a message of Potluck's: its words have no names")
    _check(words)
    return words


def _check(words: dict[str, Any]) -> None:
    """Whether words are as large, as deep and as readable as Potluck's are.

    Raises:
        WireError: they are not.
    """
    level: list[Any] = [words]
    seen = 0
    for _ in range(DEEPEST_WORDS):
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below += [*node.keys(), *node.values()]
            elif isinstance(node, list):
                below += node
            elif isinstance(node, str) and not node.isascii():
                _check_text(node)
        seen += len(below)
        if seen > MOST_WORDS:
            raise WireError(f"not a message of Potluck's: more than {MOST_WORDS} values")
        if not below:
            return
        level = below
    raise WireError(f"not a message of Potluck's: more than {DEEPEST_WORDS} lists and tables within one another")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WireError("not a message of Potluck's: text with half of a surrogate pair") from error
