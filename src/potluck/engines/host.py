"""One client's side of an exchange: decode, open its store, run the handler, train, commit, encode.

Every executor and the distributed engine run clients through here, so that a client behaves the same wherever
it is.
"""

import traceback
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import nn

from potluck.core.errors import WireError
from potluck.core.examples import Examples
from potluck.core.federation import ClientId, Federation
from potluck.core.fit import Fit, FitReport, watching
from potluck.core.message import Message
from potluck.core.method import ClientWork, Method, runs_on_client
from potluck.core.rng import Key, fold_in, isolated
from potluck.core.roles import Client, Failure
from potluck.core.tree import pack, unpack
from potluck.core.weights import load, weights_of
from potluck.engines.stores import ClientStore
from potluck.engines.training import train


class ContractError(TypeError):
    """A method broke the contract of methods; a bug in its file, never a client's failure."""


@dataclass(frozen=True)
class Call:
    """A request to run one handler on one client: names and bytes, nothing shared."""

    handler: str
    client: ClientId
    payload: bytes
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
class _Played:
    """What a handler returned, and the data and mean loss of each of its fits."""

    reply: Any
    fits: list[tuple[Examples, float]]


class ClientHost:
    """Runs handlers of one method for the clients of one federation."""

    def __init__(self, method: Method[Any], federation: Federation, store: ClientStore, seed: int) -> None:
        self._method = method
        self._federation = federation
        self._store = store
        self._seed = seed

    def run(self, call: Call) -> Answer | Failure:
        """Carry out a call. The client's store is not changed; that is for whoever accepts the answer.

        Raises:
            ContractError: the handler is not one, forgot to yield a Fit, or returned no Message.
            WireError: what it returned or keeps cannot be written down.
        """
        handler = f"{type(self._method).__name__}.{call.handler}"
        try:
            return self._answer(call, handler)
        except (ContractError, WireError):  # bugs in the method's file, not the client's failures
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Failure(call.client, handler, reason, traceback.format_exc())

    def inference_model(self, client_id: ClientId, message: Message) -> nn.Module:
        """The model that a client would use now; whatever the handler changes is forgotten."""
        key = fold_in(self._seed, "inference", client_id)
        client = self._open(client_id, key)
        with isolated(key.fold("handler")):
            return self._method.inference_model(client, message)

    def _answer(self, call: Call, handler: str) -> Answer:
        work = getattr(self._method, call.handler)
        if not runs_on_client(work):
            raise ContractError(f"{handler} is not marked @on_client, so it cannot be sent to clients")
        client = self._open(call.client, call.key)
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
        return Answer(call.client, reply.encode(), self._record(client), tuple(losses))

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

    def _open(self, client_id: ClientId, key: Key) -> Client:
        site = self._federation.sites[client_id]
        model = self._federation.build(site.architecture, fold_in(self._seed, "client model", client_id))
        stored = self._store.read(client_id)
        record = {"state": {}} if stored is None else unpack(stored)
        if "model" in record:
            load(model, record["model"])
        return Client(
            id=client_id,
            model=model,
            state=record["state"],
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

    def _record(self, client: Client) -> bytes | None:
        if not self._method.keeps_model and not client.state and self._store.read(client.id) is None:
            return None
        record: dict[str, Any] = {"state": client.state}
        if self._method.keeps_model:
            record["model"] = weights_of(client.model)
        return pack(record)
