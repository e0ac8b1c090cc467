"""One exchange of a round: messages go out, handlers run, and the replies that fit come back one at a time."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from potluck.core.federation import ClientId
from potluck.core.ground.machine import available_bytes
from potluck.core.ground.rng import fold_in
from potluck.core.ground.text import ON_SCREEN
from potluck.core.message import Message
from potluck.core.roles import Arriving, Failure
from potluck.core.schema import Kind, Misfit
from potluck.engine.answers.door import Door, most_bytes, refusal
from potluck.engine.answers.events import Attendance, ClientEnd
from potluck.engine.answers.ledger import Ledger
from potluck.engine.answers.outliers import Outliers
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Answer, Call
from potluck.engine.disk.store import ClientStore
from potluck.engine.executors import Executor, Pending
from potluck.engine.rounds.clock import Clock
from potluck.engine.rounds.dispatch import Dispatch, Encoded
from potluck.engine.rounds.lost import Lost, Spoilt, check_attended
from potluck.engine.rounds.report import ExchangePlace, SumsReport, WorkDone
from potluck.engine.rounds.sums import SECURE_SUMS, Disclosed, Exchanged, SumsReplies

log = logging.getLogger(__name__)
_LARGE_SHARE = 0.5  # of the available memory; replies that may take more cause a warning

ClientHandler = Callable[..., Any]
Admission = tuple[Outcome, Message | Failure]


@dataclass(frozen=True)
class Lent:
    """What an engine lends its exchanges.

    Attributes:
        private: whether what clients answer counts as a private release.
        note: called with every failure and its round; raises where the run ends with it.
        warned: about which replies, those held together (True) or one by one, a warning was considered already.
    """

    seed: int
    quorum: int
    private: bool
    runtime: ClientRuntime
    dispatch: Dispatch
    executor: Executor
    clock: Clock
    store: ClientStore
    ledger: Ledger
    door: Door
    outliers: Outliers | None
    sums: SumsReplies | None
    tell: Callable[[ClientEnd], None]
    note: Callable[[Failure, int], None]
    warned: set[bool]


class Exchange:
    """One exchange of a round."""

    def __init__(
        self, lent: Lent, handler: ClientHandler, messages: Mapping[ClientId, Message], place: ExchangePlace
    ) -> None:
        self._lent, self._handler, self._messages, self._place = lent, handler, messages, place
        self._runtime, roster = lent.runtime, lent.dispatch.federation.roster
        self._failures: dict[ClientId, Failure] = {}
        self._sent: dict[ClientId, int] = {}  # bytes
        self._told: dict[ClientId, Mapping[str, int]] = {}  # bytes by entry, of those who sent other than their reply
        self._noted = set[ClientId]()  # whose failures were told
        self._unsummed = ""  # why nothing was summed, where that was to be
        self._recorded = ExitStack()  # of private releases, while somebody may still answer
        self._begun: Iterator[Outcome] | None = None
        self._expected: dict[ClientId, Kind] = {
            client: lent.door.expected(handler.__name__, roster[client], message, place.server)
            for client, message in sorted(messages.items())
        }

    def begin(self) -> None:
        """Send the messages now; without it they are sent when the first reply is read."""
        self._begun = self._asked()

    def abandon(self) -> None:
        """Listen to nobody any more: whoever has not answered may have released what it was asked for."""
        self._recorded.close()

    def arriving(self) -> Arriving:
        """Send messages, run the handlers, commit the clients' states, and yield the replies one at a time."""
        return Arriving(self._replies(), self._failures, lambda: self._check_room(together=True))

    def _replies(self) -> Iterator[tuple[ClientId, Message]]:
        """The replies that fit, each released before the next is awaited; the others go to the failures."""
        report, answered, started = self._place.report, list[ClientId](), time.perf_counter()
        self._check_room(together=self._lent.sums is not None)
        for outcome, reply in self._admissions():
            client = outcome.client
            if isinstance(reply, Failure):
                self._note(reply)
                self._failures[client] = reply
                report.traffic.up.update(self._told.get(client, {}))
                report.work.append(WorkDone(self._place.exchange, client, None, None, self._sent.get(client, 0)))
                continue
            assert isinstance(outcome, Answer)
            self._keep(outcome, up := self._told.get(client) or reply.sizes())
            report.traffic.up.update(up)
            answered.append(client)
            report.seconds_local += time.perf_counter() - started
            del outcome
            yield client, reply
            del reply
            started = time.perf_counter()
        report.seconds_local += time.perf_counter() - started
        report.failures.update(self._failures)
        self._place.unread = None
        self._check_answered(answered)

    def _note(self, failure: Failure) -> None:
        """Tell of a failure, once; raises where the run ends with it."""
        if failure.client not in self._noted:
            self._noted.add(failure.client)
            self._lent.note(failure, self._place.round)

    def _keep(self, answer: Answer, up: Mapping[str, int]) -> None:
        """Commit the client's state, and what else its answer, whose reply has such entries, says of its work."""
        report, client, cost = self._place.report, answer.client, answer.cost
        told = (cost.flops, cost.memory) if cost else (None, None)
        report.work.append(WorkDone(self._place.exchange, client, *told, self._sent[client], sum(up.values())))
        if answer.record is not None:
            self._lent.store.write(client, answer.record)
        if answer.losses:
            report.losses.setdefault(client, []).extend(answer.losses)
        if answer.notes:
            report.client_notes.setdefault(client, {}).update(answer.notes)

    def _check_answered(self, answered: list[ClientId]) -> None:
        """Check that enough clients answered.

        Raises:
            Deserted: fewer than the quorum were there.
            Spoilt: everybody diverged but a client whose reply had stood out.
            Lost: fewer than the quorum gave a reply that counts.
        """
        asked, outliers = len(self._messages), self._lent.outliers
        check_attended(asked, self._lent.quorum, self._failures.values())
        diverged = [client for client, failure in self._failures.items() if failure.kind == "divergence"]
        if outliers is not None and (outlier := outliers.blamed(answered, diverged)):
            raise Spoilt(f"all clients but {outlier.client} diverged")
        if self._unsummed:
            why = [self._unsummed, *(str(failure) for failure in self._failures.values())][:2]
            raise Lost("; ".join(why))
        if len(answered) < (least := min(self._lent.quorum, asked)):
            few = f"{len(answered)} of {asked} clients answered, and {least} must"
            raise Lost(f"{few if answered else 'no client answered'}; {next(iter(self._failures.values()))}")

    def _admissions(self) -> Iterator[Admission]:
        """The outcomes, with what the server gets of the replies that fit and do not stand out, or failures."""
        if self._lent.sums is None:
            return self._sifted()
        return self._disclosed(self._lent.sums)

    def _disclosed(self, sums: SumsReplies) -> Iterator[Admission]:
        """The same, once all are there, with sums alone of what shall be summed.

        What checks replies before is what clients check by themselves where a server sees none. Nothing is summed of a
        round that is undone, since it is tried again, and clients take part in no sums twice.
        """
        place, answers = self._place, dict[ClientId, Outcome]()
        replies, failures = dict[ClientId, Message](), dict[ClientId, tuple[Outcome, Failure]]()
        for outcome, reply in self._sifted():
            if isinstance(reply, Failure):
                failures[outcome.client] = outcome, reply
            else:
                assert isinstance(outcome, Answer)
                answers[outcome.client], replies[outcome.client] = replace(outcome, payload=b""), reply
        for _, failure in failures.values():
            self._note(failure)
        check_attended(len(self._messages), self._lent.quorum, (failure for _, failure in failures.values()))
        place.report.secure = place.report.secure or SumsReport()
        asked = self._messages, self._expected
        told = sums(Exchanged(self._handler.__name__, replies, failures.keys(), *asked, place))
        self._book(told)
        yield from failures.values()
        for client, outcome in answers.items():
            refused = self._refused(client, Misfit(told.refusal)) if told.refusal else told.left.get(client)
            yield outcome, refused or told.replies[client]

    def _book(self, told: Disclosed) -> None:
        """Note what sums took, and whether there are any."""
        self._unsummed = told.refusal
        self._told.update(told.bytes_up)
        for client, count in told.bytes_down.items():
            self._place.report.traffic.down[SECURE_SUMS] += count
            self._sent[client] = self._sent.get(client, 0) + count

    def _sifted(self) -> Iterator[Admission]:
        """The outcomes, with the replies that fit and do not stand out, or failures."""

        def admitted() -> Iterator[Admission]:
            for outcome in self._begun or self._asked():
                yield outcome, self._admitted(outcome)
                del outcome

        if self._lent.outliers is None:
            return admitted()
        return self._lent.outliers.sifted(admitted(), self._messages, self._expected, self._refused)

    def _admitted(self, outcome: Outcome) -> Message | Failure:
        """The reply, if it fits and the client's state can be stored."""
        if isinstance(outcome, Failure):
            return outcome
        try:
            if not isinstance(outcome, Answer):
                raise Misfit("it was asked for a reply and evaluated a model")
            if outcome.record is not None:
                self._lent.store.check(outcome.record)
            return self._lent.door.admit(outcome, self._expected[outcome.client])
        except Misfit as misfit:
            return self._refused(outcome.client, misfit)

    def _refused(self, client: ClientId, misfit: Misfit) -> Failure:
        return refusal(client, self._runtime.full_name(self._handler.__name__), misfit)

    def _asked(self) -> Iterator[Outcome]:
        """Ask the clients; their private releases are recorded first. The outcomes follow as they arrive."""
        lent, place, name = self._lent, self._place, self._handler.__name__
        asked = self._messages if lent.private else ()
        attendance = Attendance(lent.tell, place.round, "training", place.exchange, name, len(self._messages))
        with ExitStack() as recorded:
            note = recorded.enter_context(lent.ledger.exchange(asked))
            away = lent.clock.away(self._messages)
            handler, pending = self._runtime.full_name(name), self._pending(attendance, away)
            outcomes = lent.clock.outcomes(lent.executor, self._runtime, pending, away, handler, self._sent)
            self._recorded = recorded.pop_all()

        def heard() -> Iterator[Outcome]:
            with self._recorded:
                for outcome in outcomes:
                    outcome = self._counted(outcome) if asked else outcome
                    note(outcome)
                    attendance.note(outcome)
                    yield outcome
                    del outcome

        return heard()

    def _counted(self, outcome: Outcome) -> Outcome:
        """The outcome, if what it claims of private releases can be; else a failure, after which one may have been."""
        try:
            if isinstance(outcome, Answer):
                self._lent.ledger.check(outcome)
        except Misfit as misfit:
            return replace(self._refused(outcome.client, misfit), unheard=True)
        return outcome

    def _pending(self, attendance: Attendance, away: Collection[ClientId]) -> dict[ClientId, Pending]:
        """One call for each client that is asked, its message encoded when its turn comes."""
        lent, place = self._lent, self._place
        messages = {client: self._messages[client] for client in sorted(self._messages) if client not in away}
        encoded = Encoded(messages.values())

        def call(client: ClientId, message: Message) -> Call:
            key = fold_in(lent.seed, "client", place.round, place.exchange, client)
            record = lent.store.read(client)
            return Call(self._handler.__name__, client, encoded.payload(message), record, key, place.round)

        found: dict[ClientId, Pending] = {}
        for client, message in messages.items():
            place.report.traffic.down.update(sizes := message.sizes())
            self._sent[client] = sum(sizes.values())
            make, most = partial(call, client, message), most_bytes(self._expected[client])
            found[client] = lent.dispatch.pending(make, client, ("train",), most, attendance)
        return found

    def _check_room(self, *, together: bool) -> None:
        """Warn before the first exchange of its kind if the replies held in memory may not fit."""
        warned = self._lent.warned
        if together in warned or True in warned:  # together takes more than singly
            return
        warned.add(together)
        sizes, available = [kind.nbytes for kind in self._expected.values()], available_bytes()
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
