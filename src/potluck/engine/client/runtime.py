"""The clients' side of an exchange: restore a client's state, run its handler, or evaluate its model.

Every executor and every node runs clients through here, so that a client behaves the same everywhere.
"""

from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any, Literal

import torch
from torch import nn

from potluck.core.federation import ClientId, Federation, Roster, Site, SitesOnDemand
from potluck.core.ground.digest import digest
from potluck.core.ground.rng import Key, fold_in, isolated
from potluck.core.ground.tree import pack, unpack
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.nets.batchnorm import measure_statistics, unlearnt
from potluck.core.nets.classes import own_classes_of
from potluck.core.nets.modes import to_training
from potluck.core.nets.scale import FULL, Scale
from potluck.core.nets.slicing import lies_in, part
from potluck.core.nets.weights import frozen_of, load, tensors_of, weights_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, Request
from potluck.core.requests.inference import predictions
from potluck.core.roles import Client, Failure, Server
from potluck.core.summed import ToSum
from potluck.core.tasks.task import Sums, added
from potluck.engine.client.clipping import Clipping
from potluck.engine.client.costs import Costs
from potluck.engine.client.modules import ModulePool
from potluck.engine.client.requests import carry_out
from potluck.engine.client.session import Answer, Call, ContractError, Session, failure, full_name
from potluck.engine.client.sound import check_site
from potluck.engine.numerics.device import CPU, resident
from potluck.engine.numerics.numerics import PLAIN, Numerics

EvaluatedPart = Literal["validation", "own", "common"]
"""Examples to evaluate a model on: the client's validation part, its test part, the common test set."""


@dataclass(frozen=True)
class EvalRequest:
    """A request to evaluate the client's inference model; payload and record are as in a `Call`.

    Attributes:
        round: the last completed round; 0 before the first.
    """

    client: ClientId
    payload: bytes
    record: bytes | None
    parts: tuple[EvaluatedPart, ...]
    round: int = 0


@dataclass(frozen=True)
class EvalResult:
    """The result of an evaluation. Of a client's private data it contains only the task's sums.

    Attributes:
        model: a fingerprint, the same only for equal models.
        payload: packed, the task's sums over each requested part that has examples.
    """

    client: ClientId
    model: str
    payload: bytes

    @cached_property
    def sums(self) -> Mapping[EvaluatedPart, Sums]:
        """The decoded payload."""
        return unpack(self.payload)


Job = Call | EvalRequest
Outcome = Answer | Failure | EvalResult


class ClientRuntime:
    """Runs handlers of one method for the clients of one federation.

    Attributes:
        computing: device, precision and layout.
        clipping: how clients clip what they send; None if they do not.
        costs: of the requests that handlers and the server have.
    """

    def __init__(
        self,
        method: Method[Any],
        federation: Federation,
        seed: int,
        computing: Numerics = PLAIN,
        clipping: Clipping | None = None,
    ) -> None:
        self._method = method
        self._federation = federation
        self._seed = seed
        computing.make_ready()
        self.computing = computing
        self.clipping = clipping
        self.costs = Costs(computing)
        self._modules = ModulePool(self.build)
        self._known: dict[Hashable, Any] = {}

    def execute(self, job: Job) -> Outcome:
        """Carry out a call or an evaluation."""
        if isinstance(job, Call):
            return self.run(job)
        try:
            return self.evaluate(job)
        except Exception as error:
            return failure(job.client, "evaluation", error)

    def run(self, call: Call) -> Answer | Failure:
        """Carry out a call. The client's state is returned in the answer; the caller that accepts it stores it.

        Raises:
            ContractError: the method broke its contract.
            WireError: what the handler returned or keeps cannot be serialised.
        """
        session = self.open(call)
        if isinstance(session, Failure):
            return session
        found = session.advance()
        while isinstance(found, Request):
            try:
                session.cost += self.costs.of(found)
                answer = self.carry_out(found, session.request_key)
            except Exception as error:
                return session.failed(error)
            found = session.advance(answer)
        return found

    def open(self, call: Call) -> Session | Failure:
        """A session ready to run; a failure if the client's state cannot be restored.

        Raises:
            ContractError: the handler is not marked `@on_client`.
        """
        try:
            client = self._open(call.client, call.record, call.key, call.round)
        except Exception as error:
            return failure(call.client, self.full_name(call.handler), error)
        give_back = partial(self._modules.give_back, client.architecture, client.model)
        return Session(self._method, call, client, give_back, partial(self._leaving, call, client))

    def full_name(self, handler: str) -> str:
        """A handler's name with its method's."""
        return full_name(self._method, handler)

    def server(
        self,
        roster: Roster,
        key: Key,
        round_number: int,
        carry_out: Callable[[Request, Key], Any] | None = None,
    ) -> Server:
        """The server's half that knows these members.

        Args:
            roster: the members, by id in ascending order.
            key: of its draws.
            round_number: of the round that it says it is.
            carry_out: carries out its requests; `carry_out` of this runtime if None.
        """
        return Server(
            roster=roster,
            rng=key.generator(),
            public=self._federation.public,
            num_classes=self._federation.num_classes,
            input_shape=self._federation.input_shape,
            criterion=self._federation.criterion,
            _build=self.build,
            _carry_out=carry_out or self.carry_out,
            _key=key,
            _module=self.module,
            round=round_number,
            _known=self._known,
        )

    def summed(self, call: Call, reply: Message) -> ToSum:
        """What of a reply to a call the server needs sums of alone, by what the client knows."""
        member = self._federation.roster[call.client]
        server = self.server({call.client: member}, fold_in(self._seed, "summed", call.round), call.round)
        return self._method.summed(call.handler, member, Message.decode(call.payload), reply, server)

    def _leaving(self, call: Call, client: Client, reply: Message) -> Message:
        """A reply as it leaves its client: the one door for all of them, wherever clients are."""
        if self.clipping is None:
            return reply
        of = self.summed(call, reply)
        reply, notes = self.clipping.applied(reply, of)
        client.notes.add(notes)
        client.releases += self.clipping.private and bool(of.tensors)
        return reply

    def evaluate(self, request: EvalRequest) -> EvalResult:
        """Evaluate the client's inference model."""
        site = self._site(request.client)
        examples = {
            "validation": site.validation,
            "own": site.test,
            "common": self._federation.common_test(request.client),
        }
        message = Message.decode(request.payload)
        model = self.inference_model(request.client, message, request.record, request.round)
        chosen = {part: found for part in request.parts if (found := examples[part]) is not None and len(found)}
        sums = {part: self.sums(model, found) for part, found in chosen.items()}
        return EvalResult(request.client, name_of(model), pack(sums))

    def carry_out(self, request: Request, key: Key) -> Any:
        """Carry out a request of a handler or the server."""
        return carry_out(request, key, self.computing)

    def sums(self, model: nn.Module, examples: Examples) -> Sums:
        """The task's sums over a model's predictions for the examples, of which there is at least one."""
        task, computing = self._federation.task, self.computing
        with torch.no_grad(), computing.applied(model), computing.cast():
            found = predictions(model, resident(examples, computing.place), computing.to_layout)
            total = reduce(added, (task.sums(outputs, targets) for outputs, targets in found))
        return {name: tensor.to(CPU) for name, tensor in total.items()}

    def inference_model(
        self, client_id: ClientId, message: Message, record: bytes | None, round_number: int
    ) -> nn.Module:
        """The model that a client would deploy after a round; changes that the handler makes are discarded."""
        key = fold_in(self._seed, "inference", client_id)
        client = self._open(client_id, record, key, round_number)
        with isolated(key.fold("handler")):
            found = self._method.inference_model(client, message)
            net = self._inferred(found, key) if isinstance(found, Generator) else found
            if self._method.keeps_model:
                self._complete(net, client)
            return net

    def _complete(self, net: nn.Module, client: Client) -> None:
        """Measure the BatchNorm statistics that a client's own net lacks, because the client has never trained it."""
        if not (layers := unlearnt(net)):  # without moving it to the run's device
            return
        computing = self.computing
        with computing.applied(net), computing.cast():
            inputs = (computing.to_layout(batch.inputs) for batch in client.train.batches(64, client.rng))
            measure_statistics(net, inputs, layers)

    def _inferred(self, work: Generator[Request, Any, nn.Module], key: Key) -> nn.Module:
        """The model that the handler returns after its requests.

        Raises:
            ContractError: it yielded anything but `Predict`, `Gradient` or `NormStatistics`.
        """
        answer, number = None, 0
        try:
            while True:
                request = work.send(answer)
                if not isinstance(request, Request) or isinstance(request, Fit):
                    raise ContractError(
                        f"{self.full_name('inference_model')} yielded {type(request).__name__};"
                        " expected a Predict, Gradient or NormStatistics"
                    )
                answer = self.carry_out(request, key.fold("request", number))
                number += 1
        except StopIteration as stop:
            return stop.value

    def _site(self, client: ClientId) -> Site:
        """A client's site; one that is made on demand is checked now.

        Raises:
            DataError: its data cannot be trained on.
        """
        site = self._federation.sites[client]
        if isinstance(self._federation.sites, SitesOnDemand):
            check_site(self._federation, site)
        return site

    def _open(self, client_id: ClientId, record: bytes | None, key: Key, round_number: int) -> Client:
        site = self._site(client_id)
        kept = {"state": {}} if record is None else unpack(record)
        return Client(
            id=client_id,
            model=self._modules.take(site.architecture, kept.get("model")),
            state=kept["state"],
            train=site.train,
            validation=site.validation,
            capacity=site.capacity,
            rng=key.fold("client").generator(),
            public=self._federation.public,
            criterion=self._federation.criterion,
            num_classes=self._federation.num_classes,
            architecture=site.architecture,
            round=round_number,
            keeps_model=self._method.keeps_model,
            classes=self._federation.classes_of(client_id),
            _build=self.build,
            _module=self.module,
            _stored=kept.get("modules", {}),
            _moments=kept.get("moments", {}),
        )

    def build(self, architecture: str | None = None, scale: Scale = FULL, draw: str = "") -> nn.Module:
        """A module with the run's initial weights for this architecture, or those of another draw by its name.

        They depend on nothing else: whatever the method, the server and all clients of an architecture start alike.
        Frozen tensors are those of the run's full net whatever the draw; those of a narrower or shallower net are parts
        of them, as are all of a net with classes of its own of that with all classes.
        """
        name = architecture or self._federation.server_architecture
        head = self._federation.head_of(name)
        key = fold_in(self._seed, "common model", name if head is None else head.base)
        drawn = key.fold(draw) if draw else key
        net = self._federation.build(name, drawn, scale)
        if head is not None:
            load(net, head.part_of(tensors_of(self._federation.build(head.base, drawn, scale))))
        if (scale != FULL or draw) and (frozen := frozen_of(net)):
            places, full = lies_in(net), frozen_of(self._federation.build(name, key))
            load(net, {name: part(full[name], places[name]) for name in frozen if name in full}, partial=True)
        return net

    def module(self, name: str, build: Callable[[], nn.Module]) -> nn.Module:
        """A module of the method's own, with initial weights determined by the run's seed and the module's name."""
        with isolated(fold_in(self._seed, "module", name)):
            return to_training(build())


def name_of(model: nn.Module) -> str:
    """A fingerprint, the same only for models of equal layers, equal weights and outputs for the same classes."""
    own = own_classes_of(model)
    return digest(pack([repr(model), weights_of(model), *([] if own is None else [list(own.numbers)])]))
