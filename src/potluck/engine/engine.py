"""The engine: runs a method on a federation, round by round; every message passes through serialisation."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any, Literal

from torch import nn

from potluck.core.federation import ClientId, Federation
from potluck.core.ground.errors import DivergenceError, PotluckError, place_in
from potluck.core.ground.machine import available_bytes
from potluck.core.ground.rng import fold_in
from potluck.core.ground.text import ON_SCREEN, one_line, quoted
from potluck.core.message import Message, Traffic
from potluck.core.method import Method, runs_on_client
from potluck.core.requests.examples import Examples
from potluck.core.roles import Arriving, ClientFailure, Failure, Replies, Server
from potluck.core.schema import LARGEST, Kind, Misfit
from potluck.core.tasks.task import Sums
from potluck.engine.answers.door import Door, expected_sums, most_bytes, refusal
from potluck.engine.answers.events import Attendance, ClientEnd
from potluck.engine.answers.inspection import check_inputs, not_finite
from potluck.engine.answers.ledger import Ledger
from potluck.engine.answers.outliers import MOST_OFTEN, Outliers
from potluck.engine.client.runtime import ClientRuntime, EvalRequest, EvalResult, EvaluatedPart, Job, Outcome
from potluck.engine.client.session import Answer, Call, ContractError
from potluck.engine.disk.store import ClientStore
from potluck.engine.executors import Executor, Pending
from potluck.engine.executors.sequential import Sequential
from potluck.engine.numerics.costs import forward_flops
from potluck.engine.numerics.numerics import PLAIN, Numerics

log = logging.getLogger(__name__)
OnDivergence = Literal["stop", "drop"]
_LARGE_SHARE = 0.5  # of the available memory; replies that may take more cause a warning


@dataclass
class RoundReport:
    """What the engine recorded of one round.

    Attributes:
        cohort: the clients drawn.
        replied: those that answered every exchange in which they took part.
        failures: by client, the failures of the others.
        losses: by client, the mean loss of each fit on its own training examples.
        seconds_local: time spent in client calls.
        lost: why the round was lost, that is, changed neither the server's state nor any client's; None if it was not.
        undone: the number of the round that was undone with it, if one was.
        outlier: the client whose reply everybody else diverged on, if one is named.
        server_notes: numbers that the server's half of the method reported; empty if the round was lost.
        client_notes: by client, those that its handlers reported.
    """

    cohort: list[ClientId]
    traffic: Traffic = field(default_factory=Traffic)
    failures: dict[ClientId, Failure] = field(default_factory=dict)
    losses: dict[ClientId, list[float]] = field(default_factory=dict)
    seconds_local: float = 0.0
    lost: str | None = None
    undone: int | None = None
    outlier: ClientId | None = None
    server_notes: dict[str, float] = field(default_factory=dict[str, float])
    client_notes: dict[ClientId, dict[str, float]] = field(default_factory=dict[ClientId, dict[str, float]])

    @property
    def replied(self) -> list[ClientId]:
        """The clients of the cohort that did not fail."""
        return [id for id in self.cohort if id not in self.failures]

    @property
    def loss_local(self) -> float | None:
        """Mean over clients of the mean loss of their fits."""
        return fmean(map(fmean, self.losses.values())) if self.losses else None

    @property
    def notes(self) -> dict[str, float]:
        """The server's notes, and as `clients/NAME` the mean of each note over the clients that made it."""
        by_name: dict[str, list[float]] = {}
        for _, notes in sorted(self.client_notes.items()):
            for name, value in notes.items():
                by_name.setdefault(f"clients/{name}", []).append(value)
        means = {name: fmean(values) for name, values in by_name.items()}
        return dict(sorted((self.server_notes | means).items()))


class Engine:
    """Runs a method on a federation, round by round.

    Args:
        tolerate_failures: continue without a client whose handler raises, or whose reply is refused; otherwise the
            round raises.
        on_divergence: what to do about a client whose loss or reply is not finite: "stop" the run, or "drop" the client
            as if it had failed; None means "drop" if failures are tolerated, else "stop".
        quorum: the least number of clients that must answer an exchange; of fewer that are asked, all.
        largest: the largest number that a reply may hold.
        outlier_factor: how many times the median the tensors of a reply may be, see
            `potluck.engine.answers.outliers`; None compares none.
        ledger: of private releases; kept in memory by default.

    Attributes:
        rounds_done: the number of the last round; set it when resuming from a saved state.
        on_client_end: called when a client has trained or its model was evaluated; what it raises ends the round.
        outliers: what compares replies, and remembers; None if nothing does.
    """

    def __init__(
        self,
        method: Method[Any],
        federation: Federation,
        *,
        seed: int = 0,
        store: ClientStore | None = None,
        executor: Executor | None = None,
        computing: Numerics = PLAIN,
        tolerate_failures: bool = False,
        on_divergence: OnDivergence | None = None,
        quorum: int = 1,
        largest: float = LARGEST,
        outlier_factor: float | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.method = method
        self.federation = federation
        self.seed = seed
        self.store = ClientStore() if store is None else store
        self.executor = Sequential() if executor is None else executor
        self.ledger = Ledger() if ledger is None else ledger
        self.evaluation_traffic = Traffic()
        self.rounds_done = 0
        self.on_client_end: Callable[[ClientEnd], None] = lambda event: None
        self._raised: Exception | None = None  # by `on_client_end`
        self._evaluations = 0
        self._tolerate_failures = tolerate_failures
        self._quorum = quorum
        self._drop_diverged = tolerate_failures if on_divergence is None else on_divergence == "drop"
        self._host = ClientRuntime(method, federation, seed, computing)
        self._door = Door(method, largest)
        examples = {client: member.examples for client, member in federation.roster.items()} if outlier_factor else {}
        self.outliers = Outliers(outlier_factor, examples) if outlier_factor else None
        self._known: dict[Hashable, Any] = {}
        self._room_checked: set[bool] = set()

    def start(self) -> Any:
        """Start the executor; return the method's state before the first round.

        Raises:
            DataError: a client's inputs hold NaN or infinity.
        """
        check_inputs(self.federation)
        if self.outliers is not None:
            self.outliers.forget()
        self.executor.start(self._host)
        return self.method.init(self.server(0))

    def close(self) -> None:
        """Close the executor; it starts again if needed."""
        self.executor.close()

    def server(self, round_number: int) -> Server:
        """The server's half for one round; 0 for work outside of rounds, which has its own draws."""
        key = fold_in(self.seed, "server", round_number)
        return Server(
            roster=self.federation.roster,
            rng=key.generator(),
            public=self.federation.public,
            num_classes=self.federation.num_classes,
            input_shape=self.federation.input_shape,
            criterion=self.federation.criterion,
            _build=self._host.build,
            _carry_out=self._host.carry_out,
            _key=key,
            _module=self._host.module,
            round=self.rounds_done if round_number == 0 else round_number,
            _known=self._known,
        )

    def round(self, number: int, state: Any, ids: Sequence[ClientId]) -> tuple[Any, RoundReport]:
        """Run round `number` (from 1) with these clients; return the next state and a report.

        If failures are tolerated, and fewer clients than the quorum or too few for the method answer, the round is
        lost: the server's and the clients' states are as before, and the report says why.

        Raises:
            ClientFailure: a client failed and failures are not tolerated.
            Deserted: fewer clients than the quorum could be reached; all states are as before.
            DivergenceError: a client's or the server's numbers are not finite, and the run stops on divergence.
            ContractError: the method broke its contract.
        """
        report, self.rounds_done = RoundReport(sorted(ids)), number
        self._leave_out(number, report)
        cohort = _Cohort(report.replied, self, number, report)
        before = self.store.mark() if self._may_lose_rounds else None
        try:
            if not cohort.ids:
                raise _Lost(f"nobody is left to ask; {next(iter(report.failures.values()))}")
            server = self.server(number)
            following = self.method.round(state, cohort, server)
            cohort.finish()
            self._check_state(number, following, state)
        except (ClientFailure, ContractError):
            raise
        except Exception as error:
            if error is self._raised:
                raise
            diverged = isinstance(error, (_StateDiverged, DivergenceError))
            if diverged and not self._drop_diverged:
                raise
            if not (self._may_lose_rounds and (report.failures or diverged)):
                raise
            report.client_notes.clear()
            self.store.roll_back(before)
            if isinstance(error, Deserted):
                raise
            report.lost = one_line(f"{type(error).__name__ + ': ' if not isinstance(error, _Lost) else ''}{error}")
            if diverged or isinstance(error, _Spoilt):
                state = self._undone(number, state, report)
            log.warning("round %d is lost: %s", number, report.lost, extra=ON_SCREEN)
            if not isinstance(error, _Lost):
                log.info("the round was lost because of this", exc_info=error)
            return state, report
        if self.outliers is not None:
            self.outliers.end(number, state, before)
        report.server_notes.update(server.notes)
        return following, report

    def _leave_out(self, number: int, report: RoundReport) -> None:
        """Begin a round without the clients that have spoilt others."""
        if self.outliers is None:
            return
        self.outliers.begin(number)
        for client in sorted(self.outliers.left_out & set(report.cohort)):
            why = f"it is left out, since everybody else diverged on its replies {MOST_OFTEN} times"
            report.failures[client] = Failure(client, self._host.full_name("round"), why, kind="misfit")

    def _undone(self, number: int, state: Any, report: RoundReport) -> Any:
        """The state to go on from after a round on whose way all diverged: that before the reply that caused it."""
        if self.outliers is None or (outlier := self.outliers.suspect) is None:
            return state
        before = self.outliers.undo()
        at = number if before is None else before.number
        for client, failure in report.failures.items():
            if failure.kind == "divergence" and client != outlier.client:
                why = f"it diverged on what client {outlier.client}'s reply of round {at} had spoilt"
                report.failures[client] = replace(failure, reason=why)
        report.outlier = outlier.client
        report.lost = one_line(f"all diverged on a reply of client {outlier.client}'s in round {at}: {outlier}")
        if before is not None:
            report.undone = at
            report.lost = one_line(f"{report.lost}; round {at} is undone")
            state = before.state
            self.store.roll_back(before.mark)
        if outlier.client in self.outliers.left_out:
            log.warning("client %d is left out of the rest of the run", outlier.client, extra=ON_SCREEN)
        return state

    def inference_model(self, state: Any, client: ClientId) -> nn.Module:
        """The model that this client would deploy now; its message is counted as evaluation traffic."""
        message = self._inference_message(state, client)
        self.evaluation_traffic.down.update(message.sizes())
        record = self.store.read(client)
        return self._host.inference_model(client, Message.decode(message.encode()), record, self.rounds_done)

    def evaluate(
        self, state: Any, parts: Mapping[ClientId, tuple[EvaluatedPart, ...]], book: bool = True
    ) -> list[EvalResult]:
        """Evaluate these clients' inference models on some of their examples; results in order of client id.

        If failures are tolerated, a client that fails or returns an impossible result is left out.

        Args:
            state: the method's, after the last round.
            parts: by client, the parts to evaluate on.
            book: whether to count the messages as evaluation traffic; False if they were sent before.

        Raises:
            ClientFailure: a client failed and failures are not tolerated.
            Deserted: fewer clients than the quorum could be reached; nothing is counted as traffic.
        """
        self._evaluations += 1
        sent = self.evaluation_traffic.down.copy()
        attendance = Attendance(self._tell, self.rounds_done, "evaluation", self._evaluations, "evaluation", len(parts))
        tasks: list[Pending] = []
        for client, wanted in sorted(parts.items()):
            make, sizes = partial(self._eval_request, state, client, wanted, book), self._sizes(client)
            most = most_bytes(expected_sums({part: sizes[part] for part in wanted}, self.federation))
            tasks.append(self._task(make, client, wanted, most, attendance))
        results: list[EvalResult] = []
        failures: dict[ClientId, Failure] = {}
        for outcome in self.executor.run(self._host, tasks):
            attendance.note(outcome)
            outcome = self._believed(outcome, parts[outcome.client])
            if isinstance(outcome, Failure):
                self._note(outcome)
                failures[outcome.client] = outcome
            else:
                results.append(outcome)
        try:
            self._check_attended(len(parts), failures)
        except Deserted:
            self.evaluation_traffic.down = sent
            raise
        return results

    def needed(self, clients: int) -> int:
        """How many of so many clients must be there: the quorum, or all if failures are not tolerated."""
        return min(self._quorum, clients) if self._tolerate_failures else clients

    def sums(self, model: nn.Module, examples: Examples) -> Sums:
        """The task's sums over a model's predictions for the examples, computed in this process."""
        return self._host.sums(model, examples)

    def global_model(self, state: Any) -> nn.Module | None:
        """The server's model, if the method has one."""
        return self.method.global_model(state, self.server(0))

    def exchange(self, handler: Callable[..., Any], messages: Mapping[ClientId, Message], place: "_Place") -> Arriving:
        """Send messages, run the handlers, commit the clients' states, and yield the replies one at a time."""
        failures: dict[ClientId, Failure] = {}
        expected = {
            client: self._door.expected(handler.__name__, self.federation.roster[client], message, place.server)
            for client, message in sorted(messages.items())
        }
        pairs = self._replies(handler, messages, expected, failures, place)
        return Arriving(pairs, failures, lambda: self._check_room(expected, together=True))

    def _replies(
        self,
        handler: Callable[..., Any],
        messages: Mapping[ClientId, Message],
        expected: Mapping[ClientId, Kind],
        failures: dict[ClientId, Failure],
        place: "_Place",
    ) -> Iterator[tuple[ClientId, Message]]:
        """The replies that fit, each released before the next is awaited; the others go to `failures`."""
        report, answered, started = place.report, list[ClientId](), time.perf_counter()
        self._check_room(expected, together=False)
        for outcome, reply in self._admissions(handler, messages, expected, place):
            client = outcome.client
            if isinstance(reply, Failure):
                self._note(reply, place.round)
                failures[client] = reply
                continue
            assert isinstance(outcome, Answer)
            if outcome.record is not None:
                self.store.write(client, outcome.record)
            report.traffic.up.update(reply.sizes())
            if outcome.losses:
                report.losses.setdefault(client, []).extend(outcome.losses)
            if outcome.notes:
                report.client_notes.setdefault(client, {}).update(outcome.notes)
            answered.append(client)
            report.seconds_local += time.perf_counter() - started
            del outcome
            yield client, reply
            del reply
            started = time.perf_counter()
        report.seconds_local += time.perf_counter() - started
        report.failures.update(failures)
        place.unread = None
        self._check_attended(len(messages), failures)
        diverged = [client for client, failure in failures.items() if failure.kind == "divergence"]
        if self.outliers is not None and (outlier := self.outliers.blamed(answered, diverged)):
            raise _Spoilt(f"all clients but {outlier.client} diverged")
        if len(answered) < (least := min(self._quorum, len(messages))):
            few = f"{len(answered)} of {len(messages)} clients answered, and {least} must"
            raise _Lost(f"{few if answered else 'no client answered'}; {next(iter(failures.values()))}")

    def _check_attended(self, asked: int, failures: Mapping[ClientId, Failure]) -> None:
        """Check that a quorum of the clients asked was there, whatever it answered.

        Raises:
            Deserted: it was not.
        """
        absent = [failure for failure in failures.values() if failure.kind == "absence"]
        if (here := asked - len(absent)) < (least := min(self._quorum, asked)):
            raise Deserted(f"{here} of {asked} clients were there to the end, and {least} are needed; {absent[0]}")

    def _admissions(
        self,
        handler: Callable[..., Any],
        messages: Mapping[ClientId, Message],
        expected: Mapping[ClientId, Kind],
        place: "_Place",
    ) -> Iterator[tuple[Outcome, Message | Failure]]:
        """The outcomes of an exchange, with the replies that fit and do not stand out, or failures."""

        def refused(client: ClientId, misfit: Misfit) -> Failure:
            return refusal(client, self._host.full_name(handler.__name__), misfit)

        def admitted() -> Iterator[tuple[Outcome, Message | Failure]]:
            for outcome in self._outcomes(handler, messages, expected, place):
                yield outcome, self._admitted(outcome, handler, expected[outcome.client])
                del outcome

        if self.outliers is None:
            return admitted()
        return self.outliers.sifted(admitted(), messages, expected, refused)

    def _admitted(self, outcome: Outcome, handler: Callable[..., Any], expected: Kind) -> Message | Failure:
        """The reply, if it fits and the client's state can be stored."""
        if isinstance(outcome, Failure):
            return outcome
        try:
            if not isinstance(outcome, Answer):
                raise Misfit("it was asked for a reply and evaluated a model")
            if outcome.record is not None:
                self.store.check(outcome.record)
            return self._door.admit(outcome, expected)
        except Misfit as misfit:
            return refusal(outcome.client, self._host.full_name(handler.__name__), misfit)

    def _believed(self, outcome: Outcome, parts: Sequence[EvaluatedPart]) -> EvalResult | Failure:
        """The client's evaluation result, if it is possible."""
        if isinstance(outcome, Failure):
            return outcome
        sizes = self._sizes(outcome.client)
        try:
            if not isinstance(outcome, EvalResult):
                raise Misfit("it was asked to evaluate a model and sent a reply")
            self._door.check_evaluation(outcome, {part: sizes[part] for part in parts}, self.federation)
        except Misfit as misfit:
            return refusal(outcome.client, "evaluation", misfit)
        return outcome

    def _check_state(self, number: int, state: Any, before: Any) -> None:
        """Check that the server's state has not diverged, though every reply was finite.

        Raises:
            DivergenceError: it has; `_StateDiverged`, which loses the round, if the run is to continue.
        """
        if (where := not_finite(state, before)) is None:
            return
        found = f"the server's state diverged: {where}"
        if self._drop_diverged:
            raise _StateDiverged(found)
        raise DivergenceError(f"round {number}: {found}; the last checkpoint stands; train more gently")

    def _check_room(self, expected: Mapping[ClientId, Kind], *, together: bool) -> None:
        """Warn before the first exchange of its kind if the replies held in memory may not fit."""
        if together in self._room_checked or True in self._room_checked:  # together takes more than singly
            return
        self._room_checked.add(together)
        sizes, available = [kind.nbytes for kind in expected.values()], available_bytes()
        held = sum(sizes) if together else 2 * max(sizes, default=0)
        if available is None or held <= _LARGE_SHARE * available:
            return
        if together:
            what, advice = f"the replies of {len(sizes)} clients are", "run.cohort_fraction makes cohorts smaller"
        else:
            what, advice = "a reply and the running sums of all replies are", "smaller models have smaller replies"
        log.warning(
            "%s in memory together and may take %.1f GiB of the %.1f GiB available; %s",
            what,
            held / 2**30,
            available / 2**30,
            advice,
            extra=ON_SCREEN,
        )

    def _outcomes(
        self,
        handler: Callable[..., Any],
        messages: Mapping[ClientId, Message],
        expected: Mapping[ClientId, Kind],
        place: "_Place",
    ) -> Iterator[Outcome]:
        """The executor's outcomes as they arrive; their private releases are recorded first."""
        asked = messages if self.method.releases_privately else ()
        attendance = Attendance(self._tell, place.round, "training", place.exchange, handler.__name__, len(messages))
        tasks = self._tasks(handler, messages, expected, place, attendance)
        with self.ledger.exchange(asked) as note:
            for outcome in self.executor.run(self._host, tasks):
                outcome = self._counted(outcome, handler) if asked else outcome
                note(outcome)
                attendance.note(outcome)
                yield outcome
                del outcome

    def _counted(self, outcome: Outcome, handler: Callable[..., Any]) -> Outcome:
        """The outcome, if what it claims of private releases can be; else a failure, after which one may have been."""
        try:
            if isinstance(outcome, Answer):
                self.ledger.check(outcome)
        except Misfit as misfit:
            return replace(refusal(outcome.client, self._host.full_name(handler.__name__), misfit), unheard=True)
        return outcome

    def _tasks(
        self,
        handler: Callable[..., Any],
        messages: Mapping[ClientId, Message],
        expected: Mapping[ClientId, Kind],
        place: "_Place",
        attendance: Attendance,
    ) -> list[Pending]:
        """One call for each client, its message encoded when its turn comes."""
        encoded = _Encoded(messages.values())

        def call(client: ClientId, message: Message) -> Call:
            key = fold_in(self.seed, "client", place.round, place.exchange, client)
            return Call(handler.__name__, client, encoded.payload(message), self.store.read(client), key, place.round)

        tasks: list[Pending] = []
        for client, message in sorted(messages.items()):
            place.report.traffic.down.update(message.sizes())
            make, most = partial(call, client, message), most_bytes(expected[client])
            tasks.append(self._task(make, client, ("train",), most, attendance))
        return tasks

    def _eval_request(self, state: Any, client: ClientId, parts: tuple[EvaluatedPart, ...], book: bool) -> EvalRequest:
        message = self._inference_message(state, client)
        if book:
            self.evaluation_traffic.down.update(message.sizes())
        return EvalRequest(client, message.encode(), self.store.read(client), parts, self.rounds_done)

    def _task(
        self,
        make: Callable[[], Job],
        client: ClientId,
        parts: tuple[str, ...],
        most_bytes: int,
        attendance: Attendance,
    ) -> Pending:
        architecture = self.federation.sites[client].architecture
        return Pending(make, partial(self._cost, client, parts), architecture, most_bytes, attendance.note)

    def _cost(self, client: ClientId, parts: tuple[str, ...]) -> int:
        """Floating-point operations of the client's network on these parts of its examples."""
        sizes = self._sizes(client)
        flops = self._flops_by_architecture[self.federation.sites[client].architecture]
        return flops * (1 + sum(sizes[part] for part in parts))

    def _sizes(self, client: ClientId) -> dict[str, int]:
        """The number of examples of each part."""
        site, test = self.federation.sites[client], self.federation.test
        sizes = {"train": len(site.train), "validation": len(site.validation), "own": len(site.test)}
        return {**sizes, "common": 0 if test is None else len(test)}

    @cached_property
    def _flops_by_architecture(self) -> dict[str, int]:
        named = {site.architecture for site in self.federation.sites.values()}
        return {name: forward_flops(self._host.build(name), self.federation.input_shape) for name in sorted(named)}

    def _tell(self, event: ClientEnd) -> None:
        try:
            self.on_client_end(event)
        except Exception as error:
            self._raised = error
            raise

    def _inference_message(self, state: Any, client: ClientId) -> Message:
        return self.method.inference_message(state, client, self.server(0))

    @property
    def _may_lose_rounds(self) -> bool:
        return self._tolerate_failures or self._drop_diverged

    def _note(self, failure: Failure, number: int | None = None) -> None:
        """Log a failure of this round or of an evaluation, and raise if it is not tolerated."""
        diverged = failure.kind == "divergence" and number is not None
        log.warning("%s%s", failure, quoted(failure.trace))
        if diverged and not self._drop_diverged:
            raise DivergenceError(
                f"round {number}: client {failure.client} diverged in {failure.handler}: {failure.reason}; the last"
                " checkpoint stands; train more gently, or continue without such clients: run.on_divergence = 'drop'"
            )
        if diverged:
            log.warning("round %d continues without client %d, which diverged", number, failure.client, extra=ON_SCREEN)
        elif not self._tolerate_failures:
            place = place_in(failure.trace)
            found = f"{failure}; {place}" if place else str(failure)
            raise ClientFailure(f"{found}; run.tolerate_failures = true continues without it")


class _Lost(PotluckError):
    """Fewer clients than the quorum answered."""


class Deserted(_Lost):
    """Fewer clients than the quorum were there to the end, which says nothing against those that were."""


class _Spoilt(_Lost):
    """Everybody diverged but the client whose reply had stood out."""


class _StateDiverged(_Lost):
    """The server's half of a round diverged, and the run continues."""


class _Encoded:
    """Encodes messages on demand, those of equal content once, and keeps no more than is needed."""

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
    """The place of an exchange in the run, and the handler whose replies are still to be read."""

    round: int
    exchange: int
    report: RoundReport
    server: Server
    unread: str | None = None


class _Cohort:
    """The engine's cohort: sends messages to this round's clients."""

    def __init__(self, ids: Sequence[ClientId], engine: Engine, round_number: int, report: RoundReport) -> None:
        self._ids = tuple(ids)
        self._engine = engine
        self._place = _Place(round_number, 0, report, engine.server(round_number))

    @property
    def ids(self) -> Sequence[ClientId]:
        return self._ids

    def ask(self, handler: Callable[..., Any], messages: Message | Mapping[ClientId, Message]) -> Replies:
        """See `potluck.core.roles.Cohort.ask`."""
        return self.stream(handler, messages).all()

    def stream(self, handler: Callable[..., Any], messages: Message | Mapping[ClientId, Message]) -> Arriving:
        """See `potluck.core.roles.Cohort.stream`."""
        if not runs_on_client(handler):
            raise ContractError(f"{handler.__qualname__} is not marked @on_client, so it cannot be sent to clients")
        if getattr(handler, "__self__", None) is not self._engine.method:
            raise ContractError(f"{handler.__qualname__} is not a handler of the running method; pass self.<handler>")
        addressed = dict.fromkeys(self._ids, messages) if isinstance(messages, Message) else messages
        strangers = sorted(set(addressed) - set(self._ids))
        if strangers:
            raise ContractError(f"{handler.__qualname__} was sent to {strangers}, who are not in this round's cohort")
        self.finish()
        self._place.exchange += 1
        self._place.unread = handler.__qualname__
        return self._engine.exchange(handler, addressed, self._place)

    def finish(self) -> None:
        """Check that no replies are left unread.

        Raises:
            ContractError: some are.
        """
        if (unread := self._place.unread) is not None:
            raise ContractError(f"not all replies of {unread} were read; read what cohort.stream gives to its end")
