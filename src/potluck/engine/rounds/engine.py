"""The engine: runs a method on a federation, round by round; every message passes through serialisation."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, cast

from torch import nn

from potluck.core.federation import ClientId, Federation
from potluck.core.ground.errors import DivergenceError, place_in
from potluck.core.ground.rng import Key, fold_in
from potluck.core.ground.text import ON_SCREEN, one_line, quoted
from potluck.core.message import Message, Traffic
from potluck.core.method import Method
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Request
from potluck.core.roles import Arriving, ClientFailure, Failure, Server
from potluck.core.schema import LARGEST, Misfit
from potluck.core.tasks.task import Sums
from potluck.engine.answers.door import Door, expected_sums, most_bytes, refusal
from potluck.engine.answers.events import Attendance, ClientEnd
from potluck.engine.answers.inspection import check_inputs, not_finite
from potluck.engine.answers.ledger import Ledger
from potluck.engine.answers.outliers import MOST_OFTEN, Outliers
from potluck.engine.client.clipping import Clipping
from potluck.engine.client.runtime import ClientRuntime, EvalRequest, EvalResult, EvaluatedPart, Outcome
from potluck.engine.client.session import ContractError
from potluck.engine.disk.store import ClientStore
from potluck.engine.executors import Executor, Pending
from potluck.engine.executors.sequential import Sequential
from potluck.engine.numerics.costs import Cost
from potluck.engine.numerics.numerics import PLAIN, Numerics
from potluck.engine.rounds.asynchrony.rounds import AsynchronousRounds, ClockOfDepartures
from potluck.engine.rounds.asynchrony.rules import Asynchrony
from potluck.engine.rounds.clock import Clock, MachineClock
from potluck.engine.rounds.cohort import RoundCohort
from potluck.engine.rounds.dispatch import Dispatch
from potluck.engine.rounds.exchange import Exchange, Lent
from potluck.engine.rounds.lost import Deserted, Lost, Spoilt, StateDiverged, check_attended
from potluck.engine.rounds.report import ExchangePlace, RoundReport, WorkDone
from potluck.engine.rounds.sums import SumsReplies

log = logging.getLogger(__name__)
OnDivergence = Literal["stop", "drop"]


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
        clock: by which exchanges close; this machine's by default.
        asynchrony: the rule by which rounds close without waiting for everybody, by such a clock; None has none.
        at_once: how many clients are then under way at once.
        sums: what makes sums of clients' replies, so that the server gets no single ones; None hands them on.
        clipping: how clients clip what they send; None if they do not.

    Attributes:
        rounds_done: the number of the last round; set it when resuming from a saved state.
        on_client_end: called when a client has trained or its model was evaluated; what it raises ends the round.
        outliers: what compares replies, and remembers; None if nothing does.
        releases_privately: whether clients release anything privately, by the method or in sums with noise.
        asynchronous: what runs rounds by an asynchronous rule; None if all wait for their clients.
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
        clock: Clock | None = None,
        asynchrony: Asynchrony | None = None,
        at_once: int = 1,
        sums: SumsReplies | None = None,
        clipping: Clipping | None = None,
    ) -> None:
        self.method = method
        self.federation = federation
        self.seed = seed
        self.store = ClientStore() if store is None else store
        self.executor = Sequential() if executor is None else executor
        self.ledger = Ledger() if ledger is None else ledger
        self.clock = MachineClock() if clock is None else clock
        self.evaluation_traffic = Traffic()
        self.rounds_done = 0
        self.on_client_end: Callable[[ClientEnd], None] = lambda event: None
        self._raised: Exception | None = None  # by `on_client_end`
        self._evaluations = 0
        self._here = Cost()  # of the server's work in this round
        self._tolerate_failures = tolerate_failures
        self._quorum = quorum
        self._drop_diverged = tolerate_failures if on_divergence is None else on_divergence == "drop"
        self._host = ClientRuntime(method, federation, seed, computing, clipping)
        self.releases_privately = bool(method.releases_privately or (clipping and clipping.private))
        self._dispatch = Dispatch(federation, self._host)
        self._door = Door(method, largest)
        examples = {client: federation.outline(client).train for client in federation.sites} if outlier_factor else {}
        self.outliers = Outliers(outlier_factor, examples) if outlier_factor else None
        self._sums = sums
        self._warned: set[bool] = set()
        self.asynchronous: AsynchronousRounds | None = None
        if asynchrony is not None:
            own_clock = cast(ClockOfDepartures, self.clock)
            self.asynchronous = AsynchronousRounds(
                method, asynchrony, at_once, own_clock, self.store, self._lent, self.server
            )

    def start(self) -> Any:
        """Start the executor; return the method's state before the first round.

        Raises:
            DataError: a client's inputs hold NaN or infinity.
        """
        check_inputs(self.federation)
        if self.outliers is not None:
            self.outliers.forget()
        if self.asynchronous is not None:
            self.asynchronous.begin()
        self.executor.start(self._host)
        return self.method.init(self.server(0))

    @property
    def runtime(self) -> ClientRuntime:
        """What runs the clients' half in this process."""
        return self._host

    def close(self) -> None:
        """Close the executor, which starts again if needed; whoever has not answered yet is not heard any more."""
        try:
            if self.asynchronous is not None:
                self.asynchronous.abandon()
        finally:
            self.executor.close()

    def server(self, round_number: int) -> Server:
        """The server's half for one round; 0 for work outside of rounds, which has its own draws."""
        key = fold_in(self.seed, "server", round_number)
        said = self.rounds_done if round_number == 0 else round_number
        return self._host.server(self.federation.roster, key, said, self._carry_out)

    def round(self, number: int, state: Any, ids: Sequence[ClientId]) -> tuple[Any, RoundReport]:
        """Run round `number` (from 1) with these clients; return the next state and a report.

        By an asynchronous rule they are all clients, those first that are preferred, and the report says whose replies
        the round was made of.

        If failures are tolerated, and fewer clients than the quorum or too few for the method answer, the round is
        lost: the server's and the clients' states are as before, and the report says why.

        Raises:
            ClientFailure: a client failed and failures are not tolerated.
            Deserted: fewer clients than the quorum could be reached; all states are as before.
            DivergenceError: a client's or the server's numbers are not finite, and the run stops on divergence.
            ContractError: the method broke its contract.
        """
        asynchronous = self.asynchronous
        report = RoundReport([] if asynchronous else sorted(ids))
        self.rounds_done, self._here = number, Cost()
        self._leave_out(number, report)
        server = self.server(number)
        before = self.store.mark() if self._may_lose_rounds else None
        try:
            if asynchronous:
                following = asynchronous.close(state, ids, server, report)
            else:
                following = self._asked(state, server, report)
            report.work.append(WorkDone(0, None, self._here.flops, self._here.memory))
            self.clock.serve(self._here.flops)
            self._check_state(number, following, state)
        except (ClientFailure, ContractError):
            raise
        except Exception as error:
            if error is self._raised:
                raise
            diverged = isinstance(error, (StateDiverged, DivergenceError))
            if diverged and not self._drop_diverged:
                raise
            if not (self._may_lose_rounds and (report.failures or diverged)):
                raise
            report.client_notes.clear()
            self.store.roll_back(before)
            if isinstance(error, Deserted):
                raise
            report.lost = one_line(f"{type(error).__name__ + ': ' if not isinstance(error, Lost) else ''}{error}")
            if diverged or isinstance(error, Spoilt):
                state = self._undone(number, state, report)
            log.warning("round %d is lost: %s", number, report.lost, extra=ON_SCREEN)
            if not isinstance(error, Lost):
                log.info("the round was lost because of this", exc_info=error)
            return state, report
        if self.outliers is not None:
            self.outliers.end(number, state, before)
        report.server_notes.update(server.notes)
        return following, report

    def _asked(self, state: Any, server: Server, report: RoundReport) -> Any:
        """The state after a round in which all clients are waited for."""
        place = ExchangePlace(server.round, 0, report, self.server(server.round))
        cohort = RoundCohort(report.replied, self.method, self.exchange, place)
        if not cohort.ids:
            raise Lost(f"nobody is left to ask; {next(iter(report.failures.values()))}")
        following = self.method.round(state, cohort, server)
        cohort.finish()
        return following

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
            make, sizes = partial(self._eval_request, state, client, wanted, book), self._dispatch.sizes(client)
            most = most_bytes(expected_sums({part: sizes[part] for part in wanted}, self.federation))
            tasks.append(self._dispatch.pending(make, client, wanted, most, attendance))
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
            check_attended(len(parts), self._quorum, failures.values())
        except Deserted:
            self.evaluation_traffic.down = sent
            raise
        return results

    def absent(self, clients: Collection[ClientId]) -> Mapping[ClientId, str]:
        """Those of the clients that cannot be reached now, with the names of their machines."""
        return self.clock.absent(self.executor, clients)

    def needed(self, clients: int) -> int:
        """How many of so many clients must be there: the quorum, or all if failures are not tolerated."""
        return min(self._quorum, clients) if self._tolerate_failures else clients

    def sums(self, model: nn.Module, examples: Examples) -> Sums:
        """The task's sums over a model's predictions for the examples, computed in this process."""
        return self._host.sums(model, examples)

    def global_model(self, state: Any) -> nn.Module | None:
        """The server's model, if the method has one."""
        return self.method.global_model(state, self.server(0))

    def exchange(
        self, handler: Callable[..., Any], messages: Mapping[ClientId, Message], place: ExchangePlace
    ) -> Arriving:
        """Send messages, run the handlers, commit the clients' states, and yield the replies one at a time."""
        return Exchange(self._lent(self.store), handler, messages, place).arriving()

    def _lent(self, store: ClientStore) -> Lent:
        """What an exchange needs, with this store of clients' states."""
        return Lent(
            seed=self.seed,
            quorum=self._quorum,
            private=self.releases_privately,
            runtime=self._host,
            dispatch=self._dispatch,
            executor=self.executor,
            clock=self.clock,
            store=store,
            ledger=self.ledger,
            door=self._door,
            outliers=self.outliers,
            sums=self._sums,
            tell=self._tell,
            note=self._note,
            warned=self._warned,
        )

    def _carry_out(self, request: Request, key: Key) -> Any:
        """Carry out a request of the server's, and count it."""
        self._here += self._host.costs.of(request)
        return self._host.carry_out(request, key)

    def _believed(self, outcome: Outcome, parts: Sequence[EvaluatedPart]) -> EvalResult | Failure:
        """The client's evaluation result, if it is possible."""
        if isinstance(outcome, Failure):
            return outcome
        sizes = self._dispatch.sizes(outcome.client)
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
            DivergenceError: it has; `StateDiverged`, which loses the round, if the run is to continue.
        """
        if (where := not_finite(state, before, lacking=self._lacking)) is None:
            return
        found = f"the server's state diverged: {where}"
        if self._drop_diverged:
            raise StateDiverged(found)
        raise DivergenceError(f"round {number}: {found}; the last checkpoint stands; train more gently")

    def _eval_request(self, state: Any, client: ClientId, parts: tuple[EvaluatedPart, ...], book: bool) -> EvalRequest:
        message = self._inference_message(state, client)
        if book:
            self.evaluation_traffic.down.update(message.sizes())
        return EvalRequest(client, message.encode(), self.store.read(client), parts, self.rounds_done)

    def _tell(self, event: ClientEnd) -> None:
        try:
            self.on_client_end(event)
        except Exception as error:
            self._raised = error
            raise

    def _inference_message(self, state: Any, client: ClientId) -> Message:
        return self.method.inference_message(state, client, self.server(0))

    @cached_property
    def _lacking(self) -> bool:
        """Whether there are clients that have no outputs for some classes."""
        return any(member.head for member in self.federation.roster.values())

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
