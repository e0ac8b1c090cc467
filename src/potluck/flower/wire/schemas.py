"""Jobs, and what came of them, as words and a payload: what crosses between processes, for machines.

Both directions are read with a schema: nothing is converted, and what is not in the schema is a WireError.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from potluck.core.errors import WireError
from potluck.core.notes import MOST_NOTES, NOTE_NAME
from potluck.core.rng import Key
from potluck.core.roles import Failure, FailureKind
from potluck.core.text import one_line
from potluck.engine.client.runtime import EvalRequest, EvalResult, Job, Outcome, Part
from potluck.engine.client.session import Answer, Call
from potluck.flower import Parcel

MOST_CLIENTS = 10**6
"""Clients of one federation; a client's number is below."""

MOST_FITS = 10_000
"""Fits of one call, each of which has a loss. Methods train once or twice a call, by pieces some dozen times."""

LONGEST_NAME = 200
"""Characters of a handler's or a model's name."""

MOST_RELEASES = 10**9
"""Private releases of one client in a run."""

MOST_ROUNDS = 10**9
"""Of a run."""

_Round = Annotated[int, Field(ge=0, le=MOST_ROUNDS)]
_Releases = Annotated[int, Field(ge=0, le=MOST_RELEASES)]
_NoteName = Annotated[str, Field(pattern=rf"\A{NOTE_NAME}\z")]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
Client = Annotated[int, Field(ge=0, lt=MOST_CLIENTS)]
Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]
Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class Words(BaseModel):
    """Words by a schema: strictly of its types, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Asked(BaseModel):
    """What every job says; the run's setting is beside it."""

    model_config = ConfigDict(extra="ignore", strict=True)
    client: Client
    record: Digest | None
    round: _Round


class _CallWords(_Asked):
    handler: Name
    key: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)] | Name], Field(min_length=5, max_length=5)]


class _QuestionWords(_Asked):
    parts: Annotated[list[Part], Field(max_length=3)]


class _AnswerWords(Words):
    losses: Annotated[list[float], Field(max_length=MOST_FITS)]
    record: Digest | None
    releases: _Releases = 0
    released: _Releases | None = None
    notes: Annotated[dict[_NoteName, _Finite], Field(max_length=MOST_NOTES)] = {}


class _FailureWords(Words):
    handler: str
    reason: str
    trace: str
    kind: FailureKind


class _ResultWords(Words):
    model: Name


class _Answered(Words):
    client: Client
    answer: _AnswerWords


class _Failed(Words):
    client: Client
    failure: _FailureWords


class _Evaluated(Words):
    client: Client
    result: _ResultWords


_OUTCOMES: dict[str, type[Words]] = {"failure": _Failed, "result": _Evaluated, "answer": _Answered}
Schema = TypeVar("Schema", bound=BaseModel)


def read(schema: type[Schema], words: Mapping[str, Any], what: str) -> Schema:
    """Words by a schema.

    Raises:
        WireError: they do not fit; its text says first `what` they are.
    """
    try:
        return schema.model_validate(dict(words))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        found = one_line(repr(problem["input"]), 80)
        raise WireError(f"{what}: {one_line(place, 80)}: {problem['msg'].lower()}, found {found}") from error


def from_job(job: Job, setting: Mapping[str, Any]) -> Parcel:
    """A job for a node; its `record` is the name of what the node keeps. The setting is what it is a job of."""
    words = {**setting, "client": job.client, "record": _text(job.record), "round": job.round}
    if isinstance(job, Call):
        return {**words, "handler": job.handler, "key": list(job.key.path)}, job.payload
    return {**words, "parts": list(job.parts)}, job.payload


def to_job(parcel: Parcel) -> Job:
    """The job that `from_job` wrote.

    Raises:
        WireError: something else wrote it.
    """
    words, payload = parcel
    if "handler" not in words:
        asked = read(_QuestionWords, words, "not a job of Potluck's")
        return EvalRequest(asked.client, payload, _bytes(asked.record), tuple(asked.parts), asked.round)
    called = read(_CallWords, words, "not a job of Potluck's")
    key = Key(tuple(called.key))
    return Call(called.handler, called.client, payload, _bytes(called.record), key, called.round)


def from_outcome(outcome: Outcome) -> Parcel:
    """What came of a job; as before, `record` is the name of what the node keeps."""
    if isinstance(outcome, Answer):
        words = {"losses": list(outcome.losses), "record": _text(outcome.record)}
        words |= {"releases": outcome.releases, "released": outcome.released, "notes": dict(outcome.notes)}
        return {"client": outcome.client, "answer": words}, outcome.payload
    if isinstance(outcome, Failure):
        words = {"handler": outcome.handler, "reason": outcome.reason, "trace": outcome.trace, "kind": outcome.kind}
        return {"client": outcome.client, "failure": words}, b""
    return {"client": outcome.client, "result": {"model": outcome.model}}, outcome.payload


def to_outcome(parcel: Parcel) -> Outcome:
    """What `from_outcome` wrote.

    Raises:
        WireError: something else wrote it.
    """
    words, payload = parcel
    schema = next((schema for name, schema in _OUTCOMES.items() if name in words), _Answered)
    found = read(schema, words, "not an outcome of Potluck's")
    if isinstance(found, _Failed):
        said = found.failure
        # Whether something fits is not the node's to say.
        kind: FailureKind = "divergence" if said.kind == "divergence" else "error"
        return Failure(found.client, said.handler, said.reason, said.trace, kind=kind)
    if isinstance(found, _Evaluated):
        return EvalResult(found.client, found.result.model, payload)
    assert isinstance(found, _Answered)
    answer = found.answer
    record, losses = _bytes(answer.record), tuple(answer.losses)
    return Answer(found.client, payload, record, losses, answer.releases, answer.released, answer.notes)


def _text(record: bytes | None) -> str | None:
    return None if record is None else record.decode("ascii")


def _bytes(record: str | None) -> bytes | None:
    return None if record is None else record.encode("ascii")
