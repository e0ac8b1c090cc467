"""Observers: those who look at a run while it goes on, such as a progress bar, a tracker or your own function.

    class Losses(Observer):
        def on_client_end(self, event):
            print(event.round, event.client, event.loss)

    run.run(Losses(), Observer.of(on_round_end=print))

Observers run in the process of the run, never in its workers, and change no bit of its records. Every event is one
object, and every method of `Observer` does nothing, so that neither new events nor new facts break an observer.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from potluck.core.federation import ClientId
from potluck.core.ground.text import ON_SCREEN, one_line
from potluck.core.tasks.metric import Metric
from potluck.engine.answers.events import ClientEnd
from potluck.experiment.results.evaluate import Evaluation
from potluck.experiment.results.records import rounds_of
from potluck.experiment.results.result import Result
from potluck.records import RoundRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStart:
    """A run begins, or goes on after its last checkpoint.

    Attributes:
        method: the method's name.
        rounds: how many rounds it has in all.
        rounds_done: how many of them were done before.
        clients: how many clients the federation has.
        cohort_size: how many of them are drawn each round.
        metric: the task's primary metric.
        settings: the configuration as tables in JSON's types; None for what is not set.
        folder: the run's folder; None if it has none.
    """

    method: str
    rounds: int
    rounds_done: int
    clients: int
    cohort_size: int
    metric: Metric
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    folder: Path | None = None

    def earlier(self) -> list[RoundRecord]:
        """The records of the rounds that were done before, read from the run's folder."""
        return rounds_of(self.folder, self.rounds_done) if self.folder else []


@dataclass(frozen=True)
class RoundStart:
    """A round begins; for the second time if it was undone since its clients had gone.

    Attributes:
        round: its number, from 1.
        cohort: the clients drawn, ascending; none of an asynchronous round, which draws them one by one.
    """

    round: int
    cohort: tuple[ClientId, ...]


@dataclass(frozen=True)
class Waiting:
    """A round, or the evaluation after it, waits for clients; told again and again while it does.

    Attributes:
        round: its number.
        clients: how many clients it concerns.
        here: how many of them can be reached.
        needed: how many must be.
        missing: the names of the others' machines, by client.
    """

    round: int
    clients: int
    here: int
    needed: int
    missing: Mapping[ClientId, str]


@dataclass(frozen=True)
class EvaluationStart:
    """An evaluation of all clients' models begins.

    Attributes:
        round: the number of the round after which it takes place.
        clients: how many models are evaluated.
    """

    round: int
    clients: int


@dataclass(frozen=True)
class RunEnd:
    """A run has ended.

    Attributes:
        status: "finished", "interrupted" by a signal, or "failed".
        rounds_done: how many rounds are done, earlier ones included.
        result: the result; None if it did not finish.
        error: why it did not finish; None if it did.
    """

    status: Literal["finished", "interrupted", "failed"]
    rounds_done: int
    result: Result | None = None
    error: BaseException | None = None


class Observer:
    """Looks at a run; override what is of interest.

    An exception in one of its methods ends the run, as an error of the run itself does: in order, after the last
    checkpoint, from which it can be resumed. So does `KeyboardInterrupt`.

    Attributes:
        may_fail: whether the run shall go on without the observer if it raises: then a warning says so once, and the
            observer hears of nothing but the end. For observers that a run can do without, such as trackers.
    """

    may_fail: ClassVar[bool] = False

    def on_run_start(self, event: RunStart) -> None:
        """Look at a run that begins."""

    def on_round_start(self, event: RoundStart) -> None:
        """Look at a round's cohort."""

    def on_waiting(self, event: Waiting) -> None:
        """Look at a run that waits for clients."""

    def on_client_end(self, event: ClientEnd) -> None:
        """Look at a client that has trained, or whose model was evaluated."""

    def on_evaluation_start(self, event: EvaluationStart) -> None:
        """Look at an evaluation that begins."""

    def on_evaluation_end(self, event: Evaluation) -> None:
        """Look at every client's scores."""

    def on_round_end(self, event: RoundRecord) -> None:
        """Look at a round's record, which with its checkpoint is already in the run's folder."""

    def on_run_end(self, event: RunEnd) -> None:
        """Look at the end, which comes once to every observer that saw the start, however the run ends."""

    @staticmethod
    def of(
        *,
        on_round_end: Callable[[RoundRecord], object] | None = None,
        on_client_end: Callable[[ClientEnd], object] | None = None,
    ) -> "Observer":
        """An observer that calls functions."""
        return _Calling(on_round_end, on_client_end)


class _Calling(Observer):
    """Calls functions."""

    def __init__(
        self,
        round_end: Callable[[RoundRecord], object] | None,
        client_end: Callable[[ClientEnd], object] | None,
    ) -> None:
        self._round_end, self._client_end = round_end, client_end

    def on_client_end(self, event: ClientEnd) -> None:
        if self._client_end:
            self._client_end(event)

    def on_round_end(self, event: RoundRecord) -> None:
        if self._round_end:
            self._round_end(event)


class Audience(Observer):
    """All observers of one run, as one; those that may fail are dropped when they do."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)
        self._started: list[Observer] = []

    def on_run_start(self, event: RunStart) -> None:
        """Tell each; one that raises hears of the end nevertheless, so that it can let go of what it holds."""
        for observer in list(self._observers):
            self._started.append(observer)
            with self._guarded(observer):
                observer.on_run_start(event)

    def on_round_start(self, event: RoundStart) -> None:
        """Tell each."""
        self._tell(lambda observer: observer.on_round_start(event))

    def on_waiting(self, event: Waiting) -> None:
        """Tell each."""
        self._tell(lambda observer: observer.on_waiting(event))

    def on_client_end(self, event: ClientEnd) -> None:
        """Tell each."""
        self._tell(lambda observer: observer.on_client_end(event))

    def on_evaluation_start(self, event: EvaluationStart) -> None:
        """Tell each."""
        self._tell(lambda observer: observer.on_evaluation_start(event))

    def on_evaluation_end(self, event: Evaluation) -> None:
        """Tell each."""
        self._tell(lambda observer: observer.on_evaluation_end(event))

    def on_round_end(self, event: RoundRecord) -> None:
        """Tell each."""
        self._tell(lambda observer: observer.on_round_end(event))

    def on_run_end(self, event: RunEnd) -> None:
        """Tell each that saw the start; the first error is raised after all were told, unless the run has one."""
        raised: BaseException | None = None
        for observer in self._started:
            try:
                with self._guarded(observer):
                    observer.on_run_end(event)
            except BaseException as error:
                log.exception("%s failed at the end of the run", type(observer).__name__)
                raised = raised or error
        self._started = []
        if raised and event.error is None:
            raise raised

    def _tell(self, call: Callable[[Observer], None]) -> None:
        for observer in list(self._observers):
            with self._guarded(observer):
                call(observer)

    @contextmanager
    def _guarded(self, observer: Observer) -> Generator[None]:
        """Go on without an observer that may fail."""
        try:
            yield
        except Exception as error:
            if not observer.may_fail:
                raise
            if observer in self._observers:
                self._observers.remove(observer)
                name, why = type(observer).__name__, one_line(f"{type(error).__name__}: {error}")
                log.warning("%s failed and is left out from here on; the run goes on: %s", name, why, extra=ON_SCREEN)
            log.info("%s failed because of this", type(observer).__name__, exc_info=error)
