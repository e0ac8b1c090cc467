"""The clients' side of an exchange: take up what a client kept, run its handler and train, or evaluate its model.

Every executor and the distributed engine run clients through here, so that a client behaves the same wherever
it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from potluck.core.digest import digest
from potluck.core.examples import Examples
from potluck.core.federation import ClientId, Federation
from potluck.core.fit import Fit, FitReport
from potluck.core.inference import predict
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.rng import Key, fold_in, isolated
from potluck.core.roles import Client, Failure
from potluck.core.tree import pack, unpack
from potluck.core.weights import Weights, cut, frozen_names, frozen_of, load, weights_of
from potluck.engine.client.modules import ModulePool
from potluck.engine.client.session import Answer, Call, Session, failure, full_name
from potluck.engine.client.training import train
from potluck.engine.numerics.numerics import PLAIN, Numerics

Part = Literal["validation", "own", "common"]
"""Examples to evaluate a model on: the client's validation part, its test part, the common test set."""


@dataclass(frozen=True)
class EvalRequest:
    """What would the client's inference model say? Its payload and record are as in a `Call`."""

    client: ClientId
    payload: bytes
    record: bytes | None
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class EvalResult:
    """What it says. Of a client's own examples no more is told than how often it is right.

    Attributes:
        model: a name that only equal models share.
        shares: by part, the share of its examples whose class is predicted; a part without examples has none.
        payload: packed, the class (n,) predicted for each example of the common test set, int64, if that was asked.
    """

    client: ClientId
    model: str
    shares: Mapping[Part, float]
    payload: bytes

    @property
    def common(self) -> Tensor | None:
        """The class (n,) predicted for each example of the common test set, int64; None if that was not asked."""
        return unpack(self.payload)


Job = Call | EvalRequest
Outcome = Answer | Failure | EvalResult


class ClientRuntime:
    """Runs handlers of one method for the clients of one federation."""

    def __init__(self, method: Method[Any], federation: Federation, seed: int, computing: Numerics = PLAIN) -> None:
        self._method = method
        self._federation = federation
        self._seed = seed
        self.computing = computing
        self._modules = ModulePool(self.build)

    def execute(self, job: Job) -> Outcome:
        """Run a call, or answer a question."""
        if isinstance(job, Call):
            return self.run(job)
        try:
            return self.evaluate(job)
        except Exception as error:
            return failure(job.client, "evaluation", error)

    def run(self, call: Call) -> Answer | Failure:
        """Carry out a call. What the client keeps is returned; storing it is for whoever accepts the answer.

        Raises:
            ContractError: the method broke its contract.
            WireError: what the handler returned or keeps cannot be written down.
        """
        session = self.open(call)
        if isinstance(session, Failure):
            return session
        found = session.advance()
        while isinstance(found, Fit):
            try:
                report = self.train(found, session.fit_key)
            except Exception as error:
                return session.failed(error)
            found = session.advance(report)
        return found

    def open(self, call: Call) -> Session | Failure:
        """A call ready to go; a failure if the client cannot take up what it kept.

        Raises:
            ContractError: the handler is none that runs on clients.
        """
        try:
            client = self._open(call.client, call.record, call.key)
        except Exception as error:
            return failure(call.client, self.full_name(call.handler), error)
        give_back = partial(self._modules.give_back, self._federation.sites[call.client].architecture, client.model)
        return Session(self._method, call, client, give_back)

    def full_name(self, handler: str) -> str:
        """A handler's name with its method's."""
        return full_name(self._method, handler)

    def evaluate(self, request: EvalRequest) -> EvalResult:
        """Let the client's inference model predict."""
        site = self._federation.sites[request.client]
        examples = {"validation": site.validation, "own": site.test, "common": self._federation.test}
        model = self.inference_model(request.client, Message.decode(request.payload), request.record)
        shares: dict[Part, float] = {}
        classes: Tensor | None = None
        for part in request.parts:
            if (chosen := examples[part]) is not None and len(chosen):
                found = self.classes(model, chosen)
                shares[part] = share_right(found, chosen)
                classes = found if part == "common" else classes
        return EvalResult(request.client, name_of(model), shares, pack(classes))

    def train(self, fit: Fit, key: Key) -> FitReport:
        """Carry out a fit as the run computes."""
        return train(fit, key, self.computing)

    def classes(self, model: nn.Module, examples: Examples) -> Tensor:
        """The class (n,) that a model predicts for each example."""
        with torch.inference_mode(), self.computing.arranged(model), self.computing.cast():
            return predict(model, examples).argmax(1)

    def inference_model(self, client_id: ClientId, message: Message, record: bytes | None) -> nn.Module:
        """The model that a client would use now; whatever the handler changes is forgotten."""
        key = fold_in(self._seed, "inference", client_id)
        client = self._open(client_id, record, key)
        with isolated(key.fold("handler")):
            return self._method.inference_model(client, message)

    def _open(self, client_id: ClientId, record: bytes | None, key: Key) -> Client:
        site = self._federation.sites[client_id]
        kept = {"state": {}} if record is None else unpack(record)
        return Client(
            id=client_id,
            model=self._model(client_id, site.architecture, kept.get("model")),
            state=kept["state"],
            train=site.train,
            validation=site.validation,
            capacity=site.capacity,
            rng=key.fold("client").generator(),
            public=self._federation.public,
            criterion=self._federation.criterion,
            num_classes=self._federation.num_classes,
            keeps_model=self._method.keeps_model,
            _build=self.build,
        )

    def _model(self, client_id: ClientId, architecture: str, kept: Weights | None) -> nn.Module:
        """The client's own network: as it was kept, or with the client's or the run's initial weights.

        What is frozen is equal at all clients, also where it was drawn.
        """
        if kept is None and self._method.keeps_model:
            net = self._federation.build(architecture, fold_in(self._seed, "client model", client_id))
            return load(net, frozen_of(self.build(architecture)), partial=True) if frozen_names(net) else net
        return self._modules.take(architecture, kept)

    def build(self, architecture: str | None = None, *, rate: float = 1.0) -> nn.Module:
        """A module with the run's initial weights for this architecture, the same on server and clients.

        What is frozen in a narrower net is a leading slice of the full one's.
        """
        name = architecture or self._federation.server_architecture
        key = fold_in(self._seed, "common model", name)
        net = self._federation.build(name, key, rate)
        if rate != 1.0 and (frozen := frozen_of(net)):
            shapes = {name: tensor.shape for name, tensor in frozen.items()}
            load(net, cut(frozen_of(self._federation.build(name, key)), shapes), partial=True)
        return net


def name_of(model: nn.Module) -> str:
    """A name that only models of equal layers and equal weights share."""
    return digest(pack([repr(model), weights_of(model)]))


def share_right(classes: Tensor, examples: Examples) -> float:
    """Share of the examples whose class was predicted."""
    return float(torch.eq(classes, examples.labels).double().mean())
