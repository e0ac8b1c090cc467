"""Envelopes as Flower's records: a small JSON header, and all tensors packed in one array of bytes.

Flower transfers every array as a separate object, so a message of many small ones takes minutes. Imports nothing heavy,
since every message to a node starts a process that imports this.
"""

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from potluck.core.ground.errors import WireError
from potluck.core.ground.text import one_line
from potluck.flower import Envelope

LONGEST_ENVELOPE_HEADER = 2**23
"""The most bytes of a header: 8 MiB. The longest are introductions, some 120 bytes for each tensor of a network: this
is enough for fifty thousand tensors."""

DEEPEST_HEADER = 16
"""The deepest nesting of lists and tables; an experiment's tables, which go to every node, are five deep."""

MOST_HEADER_VALUES = 2**20
"""The most values, lists and tables of a header; as Python objects they take several hundred bytes each."""

PART = 5 * 2**20
"""The most bytes of the parts in which Flower sends an array."""

MOST_BESIDE_PARTS = 16
"""The most objects of a message beside the parts of its payload: its records, its header, itself."""

_HEADER, _PAYLOAD, _KIND = "potluck", "payload", "packed"
VERSION = 5
"""Of the header and of what a job and its outcome hold; sides of different versions refuse each other."""


def packed_payload(payload: bytes) -> ArrayRecord:
    """A payload in Flower's format; one that several messages share needs to be packed only once."""
    array = Array(dtype="uint8", shape=(len(payload),), stype="potluck.packed", data=payload)
    return ArrayRecord({_KIND: array})


def wrap(header: Mapping[str, Any], payload: bytes | ArrayRecord = b"") -> RecordDict:
    """An envelope as records; its payload may already be packed."""
    records = RecordDict({_HEADER: ConfigRecord({"version": VERSION, "words": json.dumps(dict(header))})})
    if payload:
        records[_PAYLOAD] = packed_payload(payload) if isinstance(payload, bytes) else payload
    return records


def unwrap(records: RecordDict) -> Envelope:
    """The envelope that `wrap` made into records.

    Raises:
        WireError: `wrap` did not make these records, or the header exceeds the limits.
    """
    try:
        head = records.config_records[_HEADER]
        if head["version"] != VERSION:
            theirs = str(head["version"])[:20]
            raise WireError(f"the other side speaks version {theirs} of the wire, this one {VERSION}")
        header = read_header(head["words"])
        payload = records.array_records[_PAYLOAD][_KIND].data if _PAYLOAD in records else b""
        _check_nothing_else(records)
    except (LookupError, TypeError, AttributeError) as error:
        raise WireError(f"not a message of Potluck's: {str(error)[:200]}") from error
    if not isinstance(payload, bytes):
        raise WireError("not a message of Potluck's: its payload is not bytes")
    return header, payload


def _check_nothing_else(records: RecordDict) -> None:
    """Check that there is no more than the envelope; whoever read it would keep the rest too.

    Raises:
        WireError: there is.
    """
    expected = {_HEADER: {"version", "words"}, _PAYLOAD: {_KIND}}
    for name, record in records.items():
        if more := set(record) - expected.get(name, set()) or {name} - expected.keys():
            raise WireError(f"not a message of Potluck's: it holds {one_line(repr(min(more)), 80)} beside its envelope")


def read_header(text: object) -> dict[str, Any]:
    """Parse a header, a JSON table of plain values.

    Raises:
        WireError: it is not a table, or exceeds the limits.
    """
    if not isinstance(text, str | bytes) or len(text) > LONGEST_ENVELOPE_HEADER:
        size = f"{len(text)} long" if isinstance(text, str | bytes) else f"a {type(text).__name__}"
        raise WireError(
            f"not a message of Potluck's: its header is {size}; at most {LONGEST_ENVELOPE_HEADER} bytes are read"
        )
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a message of Potluck's: {str(error)[:200]}") from error
    if not isinstance(header, dict):
        raise WireError("not a message of Potluck's: its header is not a table")
    _check(header)
    return header


def _check(header: dict[str, Any]) -> None:
    """Check that a header is within the limits and can be encoded.

    Raises:
        WireError: it is not.
    """
    level: list[Any] = [header]
    seen = 0
    for _ in range(DEEPEST_HEADER):
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below += [*node.keys(), *node.values()]
            elif isinstance(node, list):
                below += node
            elif isinstance(node, str) and not node.isascii():
                _check_text(node)
        seen += len(below)
        if seen > MOST_HEADER_VALUES:
            raise WireError(f"not a message of Potluck's: more than {MOST_HEADER_VALUES} values")
        if not below:
            return
        level = below
    raise WireError(f"not a message of Potluck's: more than {DEEPEST_HEADER} lists and tables within one another")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WireError("not a message of Potluck's: text with half of a surrogate pair") from error
