"""One call of a handler on one client: it runs from request to request, which the session's owner carries out."""

import math
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from potluck.core.federation import ClientId
from potluck.core.ground.errors import DivergenceError, EntryError, WireError
from potluck.core.ground.rng import Key, Stream
from potluck.core.ground.tree import pack
from potluck.core.message import Message
from potluck.core.method import Method, runs_on_client
from potluck.core.nets.weights import frozen_names, weights_of
from potluck.core.requests.fit import Fit, FitReport, Request, watching
from potluck.core.roles import Client, Failure
from potluck.core.summed import Withheld
from potluck.engine.numerics.costs import Cost


class ContractError(TypeError):
    """A method broke its contract: a bug in its file, not a client's failure."""


@dataclass(frozen=True)
class Call:
    """A request to run one handler on one client: names and bytes, no shared objects.

    Attributes:
        payload: the encoded message.
        record: the client's state; None if it has none.
        key: of all draws in the call.
        round: the round that it belongs to, from 1.
    """

    handler: str
    client: ClientId
    payload: bytes
    record: bytes | None
    key: Key
    round: int = 0


@dataclass(frozen=True)
class Answer:
    """The result of a call.

    Attributes:
        payload: the encoded reply.
        record: the client's new state; None if it has none.
        losses: mean loss of each fit on the client's own training examples; if none was on all of them, of each on a
            part of them, or on what was computed from them.
        releases: private releases made in this call.
        released: all private releases of the client in the run, by its own count; None if it keeps none.
        notes: numbers that the handler reported, by name.
        cost: of the requests of this call; None if the client's machine does not say.
        withheld: tensors that the client has kept back of its reply, since it adds them to secure sums.
    """

    client: ClientId
    payload: bytes
    record: bytes | None
    losses: tuple[float, ...]
    releases: int = 0
    released: int | None = None
    notes: Mapping[str, float] = field(default_factory=dict[str, float])
    cost: Cost | None = None
    withheld: tuple[Withheld, ...] = ()


class Session:
    """A call in progress.

    Args:
        method: the method whose handler runs.
        call: the request.
        client: the client, with its state.
        give_back: called when the answer is encoded and the client's model is no longer needed.
        leaving: called with what the handler returned; what it gives is what leaves the client.

    Attributes:
        call: the request.
        cost: of the handler's requests, which whoever carries them out adds up here.

    Raises:
        ContractError: the handler is not marked `@on_client`.
    """

    def __init__(
        self,
        method: Method[Any],
        call: Call,
        client: Client,
        give_back: Callable[[], None],
        leaving: Callable[[Message], Message],
    ) -> None:
        self.call = call
        self.cost = Cost()
        self._name = full_name(method, call.handler)
        self._handler = getattr(method, call.handler)
        self._frozen = frozen_names(client.model) if method.keeps_model else frozenset[str]()
        self._client = client
        self._give_back = give_back
        self._leaving = leaving
        self._work: Any = None
        self._request: Request | None = None
        self._losses: list[float] = []
        self._losses_on_part: list[float] = []
        self._answered = Counter[str]()
        self._built: list[Request] = []
        self._has_unnamed = False
        self._stream = Stream(call.key.fold("handler"))
        if not runs_on_client(self._handler):
            raise ContractError(f"{self._name} is not marked @on_client, so it cannot be sent to clients")

    @property
    def request_key(self) -> Key:
        """The key of the current request's draws."""
        assert self._request is not None
        return self.call.key.fold(self._request.kind, self._answered[self._request.kind])

    def advance(self, answer: Any = None) -> Request | Answer | Failure:
        """Run the handler to its next request or to its end.

        Args:
            answer: the result of its last request; None at the start.

        Raises:
            ContractError: the handler forgot to yield a request, named no fit where it has several, or returned no
                Message.
            EntryError: it read an entry that its message lacks.
            WireError: what it returned or keeps cannot be serialised.
        """
        if isinstance(answer, FitReport) and not math.isfinite(answer.loss):
            return Failure(self.call.client, self._name, f"its loss is {answer.loss}", kind="divergence")
        try:
            return self._advance(answer)
        except (ContractError, EntryError, WireError):  # bugs in the method's file, not the client's failures
            raise
        except Exception as error:
            return self.failed(error)

    def failed(self, error: Exception) -> Failure:
        """End the session with an error in the client's work."""
        return failure(self.call.client, self._name, error)

    def _advance(self, answer: Any) -> Request | Answer:
        if isinstance(self._request, Fit):
            if self._request.moments is not None:
                self._client._moments[self._name_of(self._request)] = self._request.moments
            data, own = self._request.data, self._client.train
            if data.same_rows(own):
                self._losses.append(answer.loss)
            elif data.part_of(own):
                self._losses_on_part.append(answer.loss)
        if self._request is not None:
            self._answered[self._request.kind] += 1
        with watching() as built, self._stream.flowing():
            if self._work is None:
                self._work = self._handler(self._client, Message.decode(self.call.payload))
            found = self._next(answer)
        self._built += built
        if isinstance(found, Request):
            self._request = found
            if isinstance(found, Fit):
                self._check_named(found)
                found.in_round(self.call.round)
                found.moments = self._client._moments.get(self._name_of(found)) if found.lasts else None
            return found
        if forgotten := [type(request).__name__ for request in self._built if not request.done]:
            raise ContractError(
                f"{self._name} built a {forgotten[0]} on client {self.call.client} but never yielded it:"
                f" write `yield {forgotten[0]}(...)`"
            )
        found = self._leaving(found)
        made, notes = self._client.releases, dict(self._client.notes)
        if made > 1:  # the run's account of privacy allows each request one
            raise ContractError(f"{self._name} made {made} private releases in one call; expected at most one")
        losses = tuple(self._losses or self._losses_on_part)
        reply = Answer(self.call.client, found.encode(), self._record(), losses, made, notes=notes, cost=self.cost)
        self._give_back()
        return reply

    def _name_of(self, fit: Fit) -> str:
        """The name under which a fit's optimiser state is kept."""
        return self.call.handler if fit.name is None else fit.name

    def _check_named(self, fit: Fit) -> None:
        """Check that no two fits of this call have the handler's name, and so one optimiser, without saying so.

        Raises:
            ContractError: this is the second.
        """
        if fit.name is None and self._has_unnamed:
            raise ContractError(
                f"{self._name} yielded two Fits without a name, whose optimisers could not be told apart under persist:"
                ' name the training that each is a part of: Fit(..., name="train")'
            )
        self._has_unnamed |= fit.name is None

    def _next(self, answer: Any) -> Request | Message:
        """The handler's next request, or what it returned."""
        found: Any = self._work
        if isinstance(self._work, Generator):
            try:
                found = next(self._work) if self._request is None else self._work.send(answer)
            except StopIteration as stop:
                found = stop.value
            else:
                if not isinstance(found, Request):
                    raise ContractError(
                        f"{self._name} yielded {type(found).__name__}; expected a Fit, Predict, Gradient or"
                        " NormStatistics"
                    )
                return found
        if not isinstance(found, Message):
            client = self.call.client
            raise ContractError(f"{self._name} returned {type(found).__name__} on client {client}; expected a Message")
        return found

    def _record(self) -> bytes | None:
        """The client's state, encoded."""
        client = self._client
        extra = {"modules": client.kept_modules, "moments": client._moments}  # unchanged
        extra = {name: kept for name, kept in extra.items() if kept}
        if not (client.keeps_model or client.state or extra or self.call.record is not None):
            return None
        record: dict[str, Any] = {"state": client.state, **extra}
        if client.keeps_model:
            weights = weights_of(client.model)
            record["model"] = {name: tensor for name, tensor in weights.items() if name not in self._frozen}
        return pack(record)


def full_name(method: Method[Any], handler: str) -> str:
    """A handler's name with its method's."""
    return f"{type(method).__name__}.{handler}"


def failure(client: ClientId, handler: str, error: Exception) -> Failure:
    """A client's error as the outcome of its call."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, DivergenceError):
        return Failure(client, handler, str(error), trace, kind="divergence")
    return Failure(client, handler, f"{type(error).__name__}: {error}", trace)
