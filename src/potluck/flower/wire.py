"""Jobs, and what came of them, as Flower's records: all tensors in one array of bytes, a few words beside it.

Flower moves every array as an object of its own, so a message of many small ones takes minutes. The payload is what
crosses between processes too: safetensors, nothing that could run code on arrival.
"""

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from potluck.core.errors import WireError
from potluck.core.rng import Key
from potluck.core.roles import Failure
from potluck.engines.host import Job, Outcome, Question, Verdict
from potluck.engines.session import Answer, Call

_WORDS, _PAYLOAD, _KIND = "potluck", "payload", "packed"
_VERSION = 1


def from_job(job: Job, extras: Mapping[str, Any]) -> RecordDict:
    """A job for a node; its `record` is the name of what the node keeps. Extras are words for the node itself."""
    common = {**extras, "client": job.client, "record": _text(job.record)}
    if isinstance(job, Call):
        return _records({**common, "handler": job.handler, "key": list(job.key.path)}, job.payload)
    return _records({**common, "parts": list(job.parts)}, job.payload)


def to_job(records: RecordDict) -> tuple[Job, dict[str, Any]]:
    """What `from_job` wrote: the job and the words.

    Raises:
        WireError: something else wrote it.
    """
    words, payload = _read(records)
    try:
        client, record = int(words["client"]), _bytes(words["record"])
        if "handler" in words:
            return Call(str(words["handler"]), client, payload, record, Key(tuple(words["key"]))), words
        return Question(client, payload, record, tuple(words["parts"])), words
    except (LookupError, TypeError, ValueError) as error:
        raise WireError(f"not a job of Potluck's: {error!r}") from error


def from_outcome(outcome: Outcome) -> RecordDict:
    """What came of a job; as before, `record` is the name of what the node keeps."""
    if isinstance(outcome, Answer):
        words = {"losses": list(outcome.losses), "record": _text(outcome.record)}
        return _records({"client": outcome.client, "answer": words}, outcome.payload)
    if isinstance(outcome, Failure):
        words = {"handler": outcome.handler, "reason": outcome.reason, "trace": outcome.trace}
        return _records({"client": outcome.client, "failure": words}, b"")
    words = {"model": outcome.model, "shares": dict(outcome.shares)}
    return _records({"client": outcome.client, "verdict": words}, outcome.payload)


def to_outcome(records: RecordDict) -> Outcome:
    """What `from_outcome` wrote.

    Raises:
        WireError: something else wrote it.
    """
    words, payload = _read(records)
    try:
        client = int(words["client"])
        if (failure := words.get("failure")) is not None:
            return Failure(client, failure["handler"], failure["reason"], failure["trace"])
        if (verdict := words.get("verdict")) is not None:
            return Verdict(client, verdict["model"], verdict["shares"], payload)
        answer = words["answer"]
        return Answer(client, payload, _bytes(answer["record"]), tuple(map(float, answer["losses"])))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"not an outcome of Potluck's: {error!r}") from error


def from_words(words: Mapping[str, Any]) -> RecordDict:
    """A message of words alone."""
    return _records(words, b"")


def to_words(records: RecordDict) -> dict[str, Any]:
    """What `from_words` wrote."""
    return _read(records)[0]


def _records(words: Mapping[str, Any], payload: bytes) -> RecordDict:
    records = RecordDict({_WORDS: ConfigRecord({"version": _VERSION, "words": json.dumps(words)})})
    if payload:
        array = Array(dtype="uint8", shape=(len(payload),), stype="potluck.packed", data=payload)
        records[_PAYLOAD] = ArrayRecord({_KIND: array})
    return records


def _read(records: RecordDict) -> tuple[dict[str, Any], bytes]:
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


def _text(record: bytes | None) -> str | None:
    return None if record is None else record.decode("ascii")


def _bytes(record: str | None) -> bytes | None:
    return None if record is None else record.encode("ascii")
