"""Jobs and outcomes as a header and a payload, for sending between machines.

Both are read by a schema: nothing is converted, and anything that is not in the schema is a WireError.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from potluck.core.federation import ClientId
from potluck.core.ground.errors import WireError
from potluck.core.ground.notes import MOST_NOTES, NOTE_NAME
from potluck.core.ground.rng import Key
from potluck.core.ground.text import one_line
from potluck.core.roles import Failure, FailureKind
from potluck.core.summed import Withheld
from potluck.engine.client.runtime import EvalRequest, EvalResult, EvaluatedPart, Job, Outcome
from potluck.engine.client.session import Answer, Call
from potluck.engine.numerics.costs import Cost
from potluck.flower import Envelope
from potluck.secure import ANSWERS

MOST_CLIENTS = 10**6
"""The most clients of one federation; a client's id is below."""

MOST_FITS = 10_000
"""The most fits of one call, each of which has a loss. Methods train once or twice a call, piece by piece some dozen
times."""

LONGEST_NAME = 200
"""The most characters of a handler's or a model's name."""

MOST_RELEASES = 10**9
"""The most private releases of one client in a run."""

MOST_FLOPS = 10**21
"""The most floating-point operations of one call, by the node's own account: ten days of a thousand million million a
second."""

MOST_MEMORY = 2**50
"""The most bytes of tensors of one call, by the node's own account: a pebibyte."""

MOST_WITHHELD, MOST_NAMES = 50_000, 8
"""The most tensors that a client keeps back of a reply, as many as a network may have; the most names that lead to one,
and the most dimensions that it has."""

MOST_EXCHANGES = 2**10
"""The most exchanges of a round, whose numbers are below."""

MOST_ROUNDS = 10**9
"""The most rounds of a run."""

_Round = Annotated[int, Field(ge=0, le=MOST_ROUNDS)]
_Releases = Annotated[int, Field(ge=0, le=MOST_RELEASES)]
_NoteName = Annotated[str, Field(pattern=rf"\A{NOTE_NAME}\z")]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
ClientNumber = Annotated[int, Field(ge=0, lt=MOST_CLIENTS)]
Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]
Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class Header(BaseModel):
    """A header with a schema: exactly these entries, strictly typed."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Asked(BaseModel):
    """The entries of every job, besides the run's."""

    model_config = ConfigDict(extra="ignore", strict=True)
    client: ClientNumber
    record: Digest | None
    round: _Round


class _CallHeader(_Asked):
    handler: Name
    key: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)] | Name], Field(min_length=5, max_length=5)]


class _SumsStepHeader(_Asked):
    exchange: Annotated[int, Field(ge=0, lt=MOST_EXCHANGES)]
    step: Annotated[int, Field(ge=0, lt=len(ANSWERS))]


class _EvalRequestHeader(_Asked):
    parts: Annotated[list[EvaluatedPart], Field(max_length=3)]


class _CostEntries(Header):
    flops: Annotated[int, Field(ge=0, le=MOST_FLOPS)]
    memory: Annotated[int, Field(ge=0, le=MOST_MEMORY)]


class _WithheldEntries(Header):
    path: Annotated[list[Name], Field(min_length=1, max_length=MOST_NAMES)]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(max_length=MOST_NAMES)]


class _AnswerEntries(Header):
    losses: Annotated[list[float], Field(max_length=MOST_FITS)]
    record: Digest | None
    releases: _Releases = 0
    released: _Releases | None = None
    notes: Annotated[dict[_NoteName, _Finite], Field(max_length=MOST_NOTES)] = {}
    cost: _CostEntries | None = None
    withheld: Annotated[list[_WithheldEntries], Field(max_length=MOST_WITHHELD)] = []


class _FailureEntries(Header):
    handler: str
    reason: str
    trace: str
    kind: FailureKind


class _EvalResultEntries(Header):
    model: Name


class _Answered(Header):
    client: ClientNumber
    answer: _AnswerEntries


class _Failed(Header):
    client: ClientNumber
    failure: _FailureEntries


class _Evaluated(Header):
    client: ClientNumber
    result: _EvalResultEntries


_OUTCOMES: dict[str, type[Header]] = {"failure": _Failed, "result": _Evaluated, "answer": _Answered}
HeaderModel = TypeVar("HeaderModel", bound=BaseModel)


def read(schema: type[HeaderModel], header: Mapping[str, Any], what: str) -> HeaderModel:
    """Read a header by a schema.

    Raises:
        WireError: it does not fit; the message begins with `what`.
    """
    try:
        return schema.model_validate(dict(header))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        found = one_line(repr(problem["input"]), 80)
        raise WireError(f"{what}: {one_line(place, 80)}: {problem['msg'].lower()}, found {found}") from error


@dataclass(frozen=True)
class SumsStep:
    """What a client is asked at a step of the secure sums of an exchange; it is answered by an `Answer`'s payload.

    Attributes:
        payload: the request, see `potluck.secure.steps`.
        record: none; a step changes no state.
        round: of the exchange.
        exchange: its number within the round.
        step: from 0, see `potluck.secure.ANSWERS`.
    """

    client: ClientId
    payload: bytes
    round: int
    exchange: int
    step: int
    record: bytes | None = None


NodeJob = Job | SumsStep
"""What a node is asked to do."""


def sums_number(round_number: int, exchange: int) -> int:
    """The number of an exchange's sums, which grows from exchange to exchange of a run."""
    return round_number * MOST_EXCHANGES + exchange


def from_job(job: NodeJob, setting: Mapping[str, Any]) -> Envelope:
    """A job for a node; its `record` is the name of the state that the node keeps. `setting` describes the run."""
    header = {**setting, "client": job.client, "record": _text(job.record), "round": job.round}
    if isinstance(job, Call):
        return {**header, "handler": job.handler, "key": list(job.key.path)}, job.payload
    if isinstance(job, SumsStep):
        return {**header, "exchange": job.exchange, "step": job.step}, job.payload
    return {**header, "parts": list(job.parts)}, job.payload


def to_job(envelope: Envelope) -> NodeJob:
    """The job that `from_job` wrote.

    Raises:
        WireError: `from_job` did not write it.
    """
    header, payload = envelope
    if "step" in header:
        step = read(_SumsStepHeader, header, "not a job of Potluck's")
        return SumsStep(step.client, payload, step.round, step.exchange, step.step)
    if "handler" not in header:
        asked = read(_EvalRequestHeader, header, "not a job of Potluck's")
        return EvalRequest(asked.client, payload, _bytes(asked.record), tuple(asked.parts), asked.round)
    called = read(_CallHeader, header, "not a job of Potluck's")
    key = Key(tuple(called.key))
    return Call(called.handler, called.client, payload, _bytes(called.record), key, called.round)


def from_outcome(outcome: Outcome) -> Envelope:
    """An outcome; as above, `record` is the name of the state that the node keeps."""
    if isinstance(outcome, Answer):
        header = {"losses": list(outcome.losses), "record": _text(outcome.record)}
        header |= {"releases": outcome.releases, "released": outcome.released, "notes": dict(outcome.notes)}
        header |= {} if outcome.cost is None else {"cost": asdict(outcome.cost)}
        withheld = [{"path": list(one.path), "shape": list(one.shape)} for one in outcome.withheld]
        header |= {"withheld": withheld} if withheld else {}
        return {"client": outcome.client, "answer": header}, outcome.payload
    if isinstance(outcome, Failure):
        header = {"handler": outcome.handler, "reason": outcome.reason, "trace": outcome.trace, "kind": outcome.kind}
        return {"client": outcome.client, "failure": header}, b""
    return {"client": outcome.client, "result": {"model": outcome.model}}, outcome.payload


def to_outcome(envelope: Envelope) -> Outcome:
    """The outcome that `from_outcome` wrote.

    Raises:
        WireError: `from_outcome` did not write it.
    """
    header, payload = envelope
    schema = next((schema for name, schema in _OUTCOMES.items() if name in header), _Answered)
    found = read(schema, header, "not an outcome of Potluck's")
    if isinstance(found, _Failed):
        said = found.failure
        # A misfit is for the server to determine.
        kind: FailureKind = "divergence" if said.kind == "divergence" else "error"
        return Failure(found.client, said.handler, said.reason, said.trace, kind=kind)
    if isinstance(found, _Evaluated):
        return EvalResult(found.client, found.result.model, payload)
    assert isinstance(found, _Answered)
    answer = found.answer
    record, losses = _bytes(answer.record), tuple(answer.losses)
    cost = None if answer.cost is None else Cost(answer.cost.flops, answer.cost.memory)
    withheld = tuple(Withheld(tuple(one.path), tuple(one.shape)) for one in answer.withheld)
    numbers = answer.releases, answer.released, answer.notes, cost
    return Answer(found.client, payload, record, losses, *numbers, withheld)


def _text(record: bytes | None) -> str | None:
    return None if record is None else record.decode("ascii")


def _bytes(record: str | None) -> bytes | None:
    return None if record is None else record.encode("ascii")
