"""One client's side of an exchange: decode, take up what it kept, run the handler, train, encode.

Every executor and the distributed engine run clients through here, so that a client behaves the same wherever
it is.
"""

import traceback
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from potluck.core.digest import digest
from potluck.core.errors import WireError
from potluck.core.examples import Examples
from potluck.core.federation import ClientId, Federation
from potluck.core.fit import Fit, FitReport, watching
from potluck.core.inference import predict
from potluck.core.message import Message
from potluck.core.method import ClientWork, Method, runs_on_client
from potluck.core.rng import Key, fold_in, isolated
from potluck.core.roles import Client, Failure
from potluck.core.tree import pack, unpack
from potluck.core.weights import load, weights_of
from potluck.engines.training import train


class ContractError(TypeError):
    """A method broke the contract of methods; a bug in its file, never a client's failure."""


Part = Literal["validation", "own", "common"]
"""Examples to judge a model on: the client's validation part, its test part, the common test set."""


@dataclass(frozen=True)
class Call:
    """A request to run one handler on one client: names and bytes, nothing shared.

    Attributes:
        payload: the encoded message.
        record: what the client kept; None if that is nothing.
        key: of all the call's draws.
    """

    handler: str
    client: ClientId
    payload: bytes
    record: bytes | None
    key: Key


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        payload: the encoded reply.
        record: what the client keeps; None if there is nothing.
        losses: mean loss of each fit on the client's own training examples.
    """

    client: ClientId
    payload: bytes
    record: bytes | None
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Question:
    """What would the client's inference model say? Its payload and record are as in a `Call`."""

    client: ClientId
    payload: bytes
    record: bytes | None
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Verdict:
    """What it says.

    Attributes:
        model: a name that only equal models share.
        payload: packed, by part the predicted class of every example, int64.
    """

    client: ClientId
    model: str
    payload: bytes

    @property
    def classes(self) -> dict[Part, Tensor]:
        """By part, the predicted class of every example; int64."""
        return unpack(self.payload)


Job = Call | Question
Outcome = Answer | Failure | Verdict


@dataclass(frozen=True)
class _Played:
    """What a handler returned, and the data and mean loss of each of its fits."""

    reply: Any
    fits: list[tuple[Examples, float]]


class ClientHost:
    """Runs handlers of one method for the clients of one federation."""

    def __init__(self, method: Method[Any], federation: Federation, seed: int) -> None:
        self._method = method
        self._federation = federation
        self._seed = seed

    def carry_out(self, job: Job) -> Outcome:
        """Run a call, or answer a question."""
        return self.run(job) if isinstance(job, Call) else self.judge(job)

    def run(self, call: Call) -> Answer | Failure:
        """Carry out a call. What the client keeps is returned; storing it is for whoever accepts the answer.

        Raises:
            ContractError: the handler is not one, forgot to yield a Fit, or returned no Message.
            WireError: what it returned or keeps cannot be written down.
        """
        handler = self.full_name(call.handler)
        try:
            return self._answer(call, handler)
        except (ContractError, WireError):  # bugs in the method's file, not the client's failures
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Failure(call.client, handler, reason, traceback.format_exc())

    def full_name(self, handler: str) -> str:
        """A handler's name with its method's."""
        return f"{type(self._method).__name__}.{handler}"

    def judge(self, question: Question) -> Verdict:
        """Let the client's inference model predict."""
        site = self._federation.sites[question.client]
        examples = {"validation": site.validation, "own": site.test, "common": self._federation.test}
        model = self.inference_model(question.client, Message.decode(question.payload), question.record)
        classes: dict[Part, Tensor] = {}
        for part in question.parts:
            if (chosen := examples[part]) is not None:
                classes[part] = predict(model, chosen).argmax(1)
        return Verdict(question.client, name_of(model), pack(classes))

    def inference_model(self, client_id: ClientId, message: Message, record: bytes | None) -> nn.Module:
        """The model that a client would use now; whatever the handler changes is forgotten."""
        key = fold_in(self._seed, "inference", client_id)
        client = self._open(client_id, record, key)
        with isolated(key.fold("handler")):
            return self._method.inference_model(client, message)

    def _answer(self, call: Call, handler: str) -> Answer:
        work = getattr(self._method, call.handler)
        if not runs_on_client(work):
            raise ContractError(f"{handler} is not marked @on_client, so it cannot be sent to clients")
        client = self._open(call.client, call.record, call.key)
        with watching() as built, isolated(call.key.fold("handler")):
            played = self._drive(work(client, Message.decode(call.payload)), call.key, handler)
            reply, losses = played.reply, [loss for data, loss in played.fits if data is client.train]
        if any(not fit.done for fit in built):
            raise ContractError(
                f"{handler} built a Fit on client {call.client} but never yielded it: write `yield Fit(...)`"
            )
        if not isinstance(reply, Message):
            raise ContractError(
                f"{handler} returned {type(reply).__name__} on client {call.client}; expected a Message"
            )
        return Answer(call.client, reply.encode(), self._record(client, call.record), tuple(losses))

    def _drive(self, work: ClientWork, key: Key, handler: str) -> "_Played":
        """Play a handler to its end, carrying out each Fit that it yields."""
        if not isinstance(work, Generator):
            return _Played(work, [])
        report: FitReport | None = None
        fits: list[tuple[Examples, float]] = []
        while True:
            try:
                fit = next(work) if report is None else work.send(report)
            except StopIteration as stop:
                return _Played(stop.value, fits)
            if not isinstance(fit, Fit):
                raise ContractError(f"{handler} yielded {type(fit).__name__}; expected a Fit")
            report = train(fit, key.fold("fit", len(fits)))
            fits.append((fit.data, report.loss))

    def _open(self, client_id: ClientId, record: bytes | None, key: Key) -> Client:
        site = self._federation.sites[client_id]
        kept = {"state": {}} if record is None else unpack(record)
        model = self._federation.build(site.architecture, fold_in(self._seed, "client model", client_id))
        if "model" in kept:
            load(model, kept["model"])
        return Client(
            id=client_id,
            model=model,
            state=kept["state"],
            train=site.train,
            validation=site.validation,
            capacity=site.capacity,
            rng=key.fold("client").generator(),
            public=self._federation.public,
            criterion=self._federation.criterion,
            num_classes=self._federation.num_classes,
            _build=self.build,
        )

    def build(self, architecture: str | None = None, *, rate: float = 1.0) -> nn.Module:
        """A module with the run's initial weights for this architecture, the same on server and clients."""
        name = architecture or self._federation.server_architecture
        return self._federation.build(name, fold_in(self._seed, "common model", name), rate)

    def _record(self, client: Client, before: bytes | None) -> bytes | None:
        if not self._method.keeps_model and not client.state and before is None:
            return None
        record: dict[str, Any] = {"state": client.state}
        if self._method.keeps_model:
            record["model"] = weights_of(client.model)
        return pack(record)


def name_of(model: nn.Module) -> str:
    """A name that only models of equal layers and equal weights share."""
    return digest(pack([repr(model), weights_of(model)]))
