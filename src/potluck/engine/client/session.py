"""One handler at work on one client: it runs from `Fit` to `Fit`, and whoever holds the session trains in between."""

import math
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from potluck.core.errors import EntryError, WireError
from potluck.core.federation import ClientId
from potluck.core.fit import Fit, FitReport, watching
from potluck.core.message import Message
from potluck.core.method import Method, runs_on_client
from potluck.core.rng import Key, Stream
from potluck.core.roles import Client, Failure
from potluck.core.tree import pack
from potluck.core.weights import frozen_names, weights_of


class ContractError(TypeError):
    """A method broke the contract of methods; a bug in its file, never a client's failure."""


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
        releases: private releases that were made for it.
        released: all that the client has made in the run, by a count of its own; None if it keeps none.
    """

    client: ClientId
    payload: bytes
    record: bytes | None
    losses: tuple[float, ...]
    releases: int = 0
    released: int | None = None


class Session:
    """A call on its way.

    Args:
        method: whose handler it is.
        call: the request.
        client: the client, with what it kept.
        give_back: called when the client's answer is written down and its model is not needed any more.

    Raises:
        ContractError: the handler is none that runs on clients.
    """

    def __init__(self, method: Method[Any], call: Call, client: Client, give_back: Callable[[], None]) -> None:
        self.call = call
        self._name = full_name(method, call.handler)
        self._handler = getattr(method, call.handler)
        self._frozen = frozen_names(client.model) if method.keeps_model else frozenset[str]()
        self._client = client
        self._give_back = give_back
        self._work: Any = None
        self._fit: Fit | None = None
        self._losses: list[float] = []
        self._fits = 0
        self._built: list[Fit] = []
        self._stream = Stream(call.key.fold("handler"))
        if not runs_on_client(self._handler):
            raise ContractError(f"{self._name} is not marked @on_client, so it cannot be sent to clients")

    @property
    def fit_key(self) -> Key:
        """Of the draws of the fit that is asked for."""
        return self.call.key.fold("fit", self._fits)

    def advance(self, report: FitReport | None = None) -> Fit | Answer | Failure:
        """Run the handler to its next `Fit`, or to its end.

        Args:
            report: of the fit that it asked for the last time; None at the start.

        Raises:
            ContractError: the handler forgot to yield a Fit, or returned no Message.
            EntryError: it read an entry that its message has not.
            WireError: what it returned or keeps cannot be written down.
        """
        if report is not None and not math.isfinite(report.loss):
            return Failure(self.call.client, self._name, f"its loss is {report.loss}", kind="divergence")
        try:
            return self._advance(report)
        except (ContractError, EntryError, WireError):  # bugs in the method's file, not the client's failures
            raise
        except Exception as error:
            return self.failed(error)

    def failed(self, error: Exception) -> Failure:
        """The end of a session over an error in the client's work."""
        return failure(self.call.client, self._name, error)

    def _advance(self, report: FitReport | None) -> Fit | Answer:
        if report is not None and self._fit is not None:
            self._fits += 1
            if self._fit.data is self._client.train:
                self._losses.append(report.loss)
        with watching() as built, self._stream.flowing():
            if self._work is None:
                self._work = self._handler(self._client, Message.decode(self.call.payload))
            found = self._next(report)
        self._built += built
        if isinstance(found, Fit):
            self._fit = found
            return found
        if any(not fit.done for fit in self._built):
            raise ContractError(
                f"{self._name} built a Fit on client {self.call.client} but never yielded it: write `yield Fit(...)`"
            )
        made = self._client.releases
        answer = Answer(self.call.client, found.encode(), self._record(), tuple(self._losses), made)
        self._give_back()
        return answer

    def _next(self, report: FitReport | None) -> Fit | Message:
        """What the handler asks for, or what it returned."""
        found: Any = self._work
        if isinstance(self._work, Generator):
            try:
                found = next(self._work) if report is None else self._work.send(report)
            except StopIteration as stop:
                found = stop.value
            else:
                if not isinstance(found, Fit):
                    raise ContractError(f"{self._name} yielded {type(found).__name__}; expected a Fit")
                return found
        if not isinstance(found, Message):
            client = self.call.client
            raise ContractError(f"{self._name} returned {type(found).__name__} on client {client}; expected a Message")
        return found

    def _record(self) -> bytes | None:
        """What the client keeps."""
        if not self._client.keeps_model and not self._client.state and self.call.record is None:
            return None
        record: dict[str, Any] = {"state": self._client.state}
        if self._client.keeps_model:
            weights = weights_of(self._client.model)
            record["model"] = {name: tensor for name, tensor in weights.items() if name not in self._frozen}
        return pack(record)


def full_name(method: Method[Any], handler: str) -> str:
    """A handler's name with its method's."""
    return f"{type(method).__name__}.{handler}"


def failure(client: ClientId, handler: str, error: Exception) -> Failure:
    """A client's error as the outcome of its call."""
    return Failure(client, handler, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
