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

_WORDS, _PAYLOAD, _KIND = "potluck", "payload", "packed"
_VERSION = 1


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
        WireError: something else made the records.
    """
    try:
        head = records.config_records[_WORDS]
        if head["version"] != _VERSION:
            raise WireError(f"the other side speaks version {head['version']} of the wire, this one {_VERSION}")
        words = json.loads(str(head["words"]))
        payload = records.array_records[_PAYLOAD][_KIND].data if _PAYLOAD in records else b""
    except (LookupError, ValueError) as error:
        raise WireError(f"not a message of Potluck's: {error!r}") from error
    if not isinstance(words, dict):
        raise WireError("not a message of Potluck's: its words have no names")
    return words, payload
