"""Jobs, and what came of them, as words and a payload: what crosses between processes, for machines."""

from collections.abc import Mapping
from typing import Any

from potluck.core.errors import WireError
from potluck.core.rng import Key
from potluck.core.roles import Failure, FailureKind
from potluck.engines.host import Job, Outcome, Question, Verdict
from potluck.engines.session import Answer, Call
from potluck.flower import Parcel

_MALFORMED = (LookupError, TypeError, ValueError, AttributeError)


def from_job(job: Job, setting: Mapping[str, Any]) -> Parcel:
    """A job for a node; its `record` is the name of what the node keeps. The setting is what it is a job of."""
    words = {**setting, "client": job.client, "record": _text(job.record)}
    if isinstance(job, Call):
        return {**words, "handler": job.handler, "key": list(job.key.path)}, job.payload
    return {**words, "parts": list(job.parts)}, job.payload


def to_job(parcel: Parcel) -> Job:
    """The job that `from_job` wrote.

    Raises:
        WireError: something else wrote it.
    """
    words, payload = parcel
    try:
        client, record = int(words["client"]), _bytes(words["record"])
        if "handler" in words:
            return Call(str(words["handler"]), client, payload, record, Key(tuple(words["key"])))
        return Question(client, payload, record, tuple(words["parts"]))
    except _MALFORMED as error:
        raise WireError(f"not a job of Potluck's: {error!r}") from error


def from_outcome(outcome: Outcome) -> Parcel:
    """What came of a job; as before, `record` is the name of what the node keeps."""
    if isinstance(outcome, Answer):
        words = {"losses": list(outcome.losses), "record": _text(outcome.record)}
        words |= {"releases": outcome.releases, "released": outcome.released}
        return {"client": outcome.client, "answer": words}, outcome.payload
    if isinstance(outcome, Failure):
        words = {name: getattr(outcome, name) for name in ("handler", "reason", "trace", "kind")}
        return {"client": outcome.client, "failure": words}, b""
    words = {"model": outcome.model, "shares": dict(outcome.shares)}
    return {"client": outcome.client, "verdict": words}, outcome.payload


def to_outcome(parcel: Parcel) -> Outcome:
    """What `from_outcome` wrote.

    Raises:
        WireError: something else wrote it.
    """
    words, payload = parcel
    try:
        client = int(words["client"])
        if (failure := words.get("failure")) is not None:
            kind: FailureKind = "divergence" if failure.get("kind") == "divergence" else "error"
            return Failure(client, failure["handler"], failure["reason"], failure["trace"], kind=kind)
        if (verdict := words.get("verdict")) is not None:
            return Verdict(client, verdict["model"], verdict["shares"], payload)
        answer = words["answer"]
        made, released = _count(answer["releases"]), answer["released"]
        released = None if released is None else _count(released)
        return Answer(client, payload, _bytes(answer["record"]), tuple(map(float, answer["losses"])), made, released)
    except _MALFORMED as error:
        raise WireError(f"not an outcome of Potluck's: {error!r}") from error


def round_of(call: Call) -> int:
    """The round of a call, by the key of its draws: (seed, "client", round, exchange, client)."""
    return int(call.key.path[2])


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 2**31:
        raise ValueError(f"{found!r} is no count of releases")
    return found


def _text(record: bytes | None) -> str | None:
    return None if record is None else record.decode("ascii")


def _bytes(record: str | None) -> bytes | None:
    return None if record is None else record.encode("ascii")
