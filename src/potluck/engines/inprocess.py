"""The engine that plays a federation in this process; every message really passes through serialisation."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from potluck.core.examples import Examples
from potluck.core.federation import ClientId, Federation
from potluck.core.message import Message, Traffic
from potluck.core.method import Method, runs_on_client
from potluck.core.rng import fold_in
from potluck.core.roles import ClientFailure, Failure, Replies, Server
from potluck.engines.computing import PLAIN, Computing
from potluck.engines.costs import forward_flops
from potluck.engines.executors import Executor, Task
from potluck.engines.executors.sequential import Sequential
from potluck.engines.host import ClientHost, Job, Outcome, Part, Question, Verdict
from potluck.engines.ledger import Ledger
from potluck.engines.session import Answer, Call, ContractError
from potluck.engines.stores import ClientStore

log = logging.getLogger(__name__)


@dataclass
class RoundReport:
    """What the engine saw of one round.

    Attributes:
        cohort: the clients asked.
        replied: those who answered every exchange they took part in.
        failures: by client, the others.
        losses: by client, the mean loss of each fit on its own training examples.
        seconds_local: time inside client calls.
    """

    cohort: list[ClientId]
    traffic: Traffic = field(default_factory=Traffic)
    failures: dict[ClientId, Failure] = field(default_factory=dict)
    losses: dict[ClientId, list[float]] = field(default_factory=dict)
    seconds_local: float = 0.0

    @property
    def replied(self) -> list[ClientId]:
        """The clients of the cohort that did not fail."""
        return [id for id in self.cohort if id not in self.failures]

    @property
    def loss_local(self) -> float | None:
        """Mean over clients of the mean loss of their fits."""
        return fmean(map(fmean, self.losses.values())) if self.losses else None


class InProcessEngine:
    """Runs a method on a federation, round by round.

    Args:
        tolerate_failures: go on without a client whose handler raises; otherwise the round raises.
        ledger: of private releases; one in memory without.
    """

    def __init__(
        self,
        method: Method[Any],
        federation: Federation,
        *,
        seed: int = 0,
        store: ClientStore | None = None,
        executor: Executor | None = None,
        computing: Computing = PLAIN,
        tolerate_failures: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        self.method = method
        self.federation = federation
        self.seed = seed
        self.store = ClientStore() if store is None else store
        self.executor = Sequential() if executor is None else executor
        self.ledger = Ledger() if ledger is None else ledger
        self.evaluation_traffic = Traffic()
        self._tolerate_failures = tolerate_failures
        self._host = ClientHost(method, federation, seed, computing)

    def start(self) -> Any:
        """The method's state before the first round; the executor makes ready too."""
        self.executor.start(self._host)
        return self.method.init(self.server(0))

    def close(self) -> None:
        """Let the executor go; it comes back if it is needed again."""
        self.executor.close()

    def server(self, round_number: int) -> Server:
        """The server's half for one round (0 before the first)."""
        key = fold_in(self.seed, "server", round_number)
        return Server(
            roster=self.federation.roster,
            rng=key.generator(),
            public=self.federation.public,
            num_classes=self.federation.num_classes,
            input_shape=self.federation.input_shape,
            _build=self._host.build,
            _train=self._host.train,
            _key=key,
        )

    def round(self, number: int, state: Any, ids: Sequence[ClientId]) -> tuple[Any, RoundReport]:
        """Play round `number` (from 1) with these clients: the next state, and what was seen.

        Raises:
            ClientFailure: a client failed and failures are not tolerated, or all of them failed.
            ContractError: the method broke its contract.
        """
        report = RoundReport(sorted(ids))
        cohort = _Cohort(report.cohort, self, number, report)
        return self.method.round(state, cohort, self.server(number)), report

    def inference_model(self, state: Any, client: ClientId) -> nn.Module:
        """The model that this client would use after the last round; its message is booked as evaluation."""
        message = self._inference_message(state, client)
        self.evaluation_traffic.down.update(message.sizes())
        return self._host.inference_model(client, Message.decode(message.encode()), self.store.read(client))

    def judge(self, state: Any, parts: Mapping[ClientId, tuple[Part, ...]], book: bool = True) -> list[Verdict]:
        """What these clients' inference models say of some of their examples, in order of client id.

        Args:
            state: the method's, after the last round.
            parts: by client, the examples.
            book: whether the messages count as evaluation's; not if they were sent before.

        Raises:
            ClientFailure: a client could not be asked and failures are not tolerated.
        """
        tasks = [
            self._task(partial(self._question, state, client, wanted, book), client, wanted)
            for client, wanted in sorted(parts.items())
        ]
        verdicts: list[Verdict] = []
        for outcome in self.executor.run(self._host, tasks):
            if isinstance(outcome, Failure):  # it is on another machine, which may be away
                self._refuse_or_note(outcome)
            elif isinstance(outcome, Verdict):
                verdicts.append(outcome)
        return verdicts

    def classes(self, model: nn.Module, examples: Examples) -> Tensor:
        """The class (n,) that a model predicts for each example, computed in this process."""
        return self._host.classes(model, examples)

    def global_model(self, state: Any) -> nn.Module | None:
        """The server's model, if the method has one."""
        return self.method.global_model(state, self.server(0))

    def exchange(self, handler: Callable[..., Any], messages: Mapping[ClientId, Message], place: "_Place") -> Replies:
        """Send messages, run the handlers, commit what finished, and return the replies."""
        report = place.report
        started = time.perf_counter()
        answers: dict[ClientId, Message] = {}
        failures: dict[ClientId, Failure] = {}
        for outcome in self._outcomes(handler, messages, place):
            if isinstance(outcome, Failure):
                self._refuse_or_note(outcome)
                failures[outcome.client] = outcome
                continue
            assert isinstance(outcome, Answer)
            if outcome.record is not None:
                self.store.write(outcome.client, outcome.record)
            answers[outcome.client] = Message.decode(outcome.payload)
            report.traffic.up.update(answers[outcome.client].sizes())
            report.losses.setdefault(outcome.client, []).extend(outcome.losses)
        report.losses = {client: losses for client, losses in report.losses.items() if losses}
        report.seconds_local += time.perf_counter() - started
        report.failures.update(failures)
        if messages and not answers:
            raise ClientFailure(f"no client answered; {next(iter(failures.values()))}")
        return Replies(answers, failures)

    def _outcomes(
        self, handler: Callable[..., Any], messages: Mapping[ClientId, Message], place: "_Place"
    ) -> Iterator[Outcome]:
        """The executor's outcomes as they come; what they say of private releases is noted first."""
        asked = messages if self.method.releases_privately else ()
        with self.ledger.exchange(asked) as note:
            for outcome in self.executor.run(self._host, self._tasks(handler, messages, place)):
                note(outcome)
                yield outcome

    def _tasks(self, handler: Callable[..., Any], messages: Mapping[ClientId, Message], place: "_Place") -> list[Task]:
        """One call a client, its message encoded when it is its turn."""
        encoded = _Encoded(messages.values())

        def call(client: ClientId, message: Message) -> Call:
            key = fold_in(self.seed, "client", place.round, place.exchange, client)
            return Call(handler.__name__, client, encoded.payload(message), self.store.read(client), key)

        tasks: list[Task] = []
        for client, message in sorted(messages.items()):
            place.report.traffic.down.update(message.sizes())
            tasks.append(self._task(partial(call, client, message), client, ("train",)))
        return tasks

    def _question(self, state: Any, client: ClientId, parts: tuple[Part, ...], book: bool) -> Question:
        message = self._inference_message(state, client)
        if book:
            self.evaluation_traffic.down.update(message.sizes())
        return Question(client, message.encode(), self.store.read(client), parts)

    def _task(self, make: Callable[[], Job], client: ClientId, parts: tuple[str, ...]) -> Task:
        return Task(make, partial(self._cost, client, parts), self.federation.sites[client].architecture)

    def _cost(self, client: ClientId, parts: tuple[str, ...]) -> int:
        """Operations of the client's network on these of its examples."""
        site, test = self.federation.sites[client], self.federation.test
        sizes = {"train": len(site.train), "validation": len(site.validation), "own": len(site.test)}
        sizes["common"] = 0 if test is None else len(test)
        return self._flops_by_architecture[site.architecture] * (1 + sum(sizes[part] for part in parts))

    @cached_property
    def _flops_by_architecture(self) -> dict[str, int]:
        named = {site.architecture for site in self.federation.sites.values()}
        return {name: forward_flops(self._host.build(name), self.federation.input_shape) for name in sorted(named)}

    def _inference_message(self, state: Any, client: ClientId) -> Message:
        return self.method.inference_message(state, client, self.server(0))

    def _refuse_or_note(self, failure: Failure) -> None:
        log.warning("%s\n%s", failure, failure.trace)
        if not self._tolerate_failures:
            raise ClientFailure(f"{failure}; run.tolerate_failures = true goes on without it")


class _Encoded:
    """Encodes messages when they are asked for, those of equal content once, and keeps no more than is needed."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self._left = Counter(message.identity for message in messages)
        self._payloads: dict[object, bytes] = {}

    def payload(self, message: Message) -> bytes:
        """The message as bytes."""
        name = message.identity
        payload = self._payloads.pop(name, None) or message.encode()
        self._left[name] -= 1
        if self._left[name] > 0:
            self._payloads[name] = payload
        return payload


@dataclass
class _Place:
    """Where in the run an exchange happens."""

    round: int
    exchange: int
    report: RoundReport


class _Cohort:
    """The door to this round's clients."""

    def __init__(
        self, ids: Sequence[ClientId], engine: InProcessEngine, round_number: int, report: RoundReport
    ) -> None:
        self._ids = tuple(ids)
        self._engine = engine
        self._place = _Place(round_number, 0, report)

    @property
    def ids(self) -> Sequence[ClientId]:
        return self._ids

    def ask(self, handler: Callable[..., Any], messages: Message | Mapping[ClientId, Message]) -> Replies:
        """See `potluck.core.roles.Cohort.ask`."""
        if not runs_on_client(handler):
            raise ContractError(f"{handler.__qualname__} is not marked @on_client, so it cannot be sent to clients")
        if getattr(handler, "__self__", None) is not self._engine.method:
            raise ContractError(f"{handler.__qualname__} is no handler of the running method; ask with self.<handler>")
        addressed = dict.fromkeys(self._ids, messages) if isinstance(messages, Message) else messages
        strangers = sorted(set(addressed) - set(self._ids))
        if strangers:
            raise ContractError(f"{handler.__qualname__} was sent to {strangers}, who are not in this round's cohort")
        self._place.exchange += 1
        return self._engine.exchange(handler, addressed, self._place)
