"""One run: rounds, evaluations, records and checkpoints, from the start or from the last checkpoint."""

import importlib.util
import logging
import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from potluck.attackers.executor import Misled
from potluck.core.federation import ClientId, Federation
from potluck.core.ground.errors import CheckpointError, ConfigError
from potluck.core.ground.rng import Key
from potluck.core.ground.text import ON_SCREEN
from potluck.core.method import Method, Releases
from potluck.core.needs import Offer
from potluck.core.nets.modes import threads
from potluck.core.roles import ClientFailure
from potluck.engine.answers.inspection import check_targets
from potluck.engine.answers.ledger import Ledger
from potluck.engine.answers.outliers import Before, Outlier
from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.disk.files import append, make_folder
from potluck.engine.disk.store import ClientStore, Layout
from potluck.engine.executors import Executor, OneByOne
from potluck.engine.executors.choice import ChosenExecutor, choose_executor
from potluck.engine.rounds.asynchrony.arrivals import ArrivalClock
from potluck.engine.rounds.engine import Engine
from potluck.engine.rounds.lost import Deserted
from potluck.engine.rounds.report import RoundReport, WorkDone
from potluck.experiment.budgets.watch import BudgetWatch
from potluck.experiment.federation.needs import cautions, check_needs, needs_of
from potluck.experiment.federation.rehearsal import rehearse
from potluck.experiment.folder.checkpoint import Checkpoints
from potluck.experiment.folder.trained import Trained
from potluck.experiment.results.evaluate import Evaluation, evaluate
from potluck.experiment.results.records import (
    Records,
    lines_of,
    lost_in_a_row,
    record_line,
    round_record,
    rounds_of,
    twin_record,
    write_by_class,
)
from potluck.experiment.results.result import Result
from potluck.experiment.running.aside import SetAside
from potluck.experiment.running.asynchrony import check_asynchronous
from potluck.experiment.running.clips import check_clips, check_has_updates
from potluck.experiment.settings.schema import RunConfig
from potluck.experiment.settings.secure import SecureRule
from potluck.experiment.settings.tables import Tree
from potluck.experiment.watching.energy import EnergyMeter
from potluck.experiment.watching.observers import (
    Audience,
    EvaluationStart,
    Observer,
    RoundStart,
    RunEnd,
    RunStart,
    Waiting,
)
from potluck.experiment.watching.trackers.names import check_installed
from potluck.experiment.watching.trackers.tracker import trackers
from potluck.records import CHECKPOINT, CLIENTS, LAST, RELEASES, ROUNDS, TIMINGS, TITLES, Checkpoint, RoundRecord, Undo
from potluck.seals import check_continues, in_json, what_matters
from potluck.twin.clock import AsynchronousTwinClock, TwinClock
from potluck.twin.devices import Fleet

if TYPE_CHECKING:
    from potluck.experiment.running.secure_sums import Adding, ReplySums

_REMIND_EVERY = 600.0  # seconds, in the log

log = logging.getLogger(__name__)
T = TypeVar("T")


class Run:
    """Runs a method on a federation.

    Args:
        method: the method.
        federation: the federation.
        config: rounds, cohorts, seed, evaluation.
        folder: the folder for records and checkpoints; None writes nothing. A folder with a checkpoint is resumed.
        choice: the executor; by default chosen by the configuration.
        store: for clients' states; by default in the folder.
        settings: the tables that the above was resolved from, for the checkpoint; by default those of method and run.
        adding: carries out secure sums, if the run has any; by default in this process.

    Attributes:
        notes: after `load`, notes for the user on the folder's checkpoint and on this machine.

    Raises:
        ConfigError: a client's model, or the server's, cannot be trained on its data, there are no clients, or a
            tracker is not installed.
        DataError: a client's targets do not suit the task.
    """

    def __init__(
        self,
        method: Method[Any],
        federation: Federation,
        config: RunConfig,
        folder: Path | None = None,
        choice: ChosenExecutor | None = None,
        store: ClientStore | None = None,
        settings: Tree | None = None,
        adding: "Adding | None" = None,
    ) -> None:
        check_installed(config.track)
        if config.track and folder is None:
            raise ConfigError("run.track: expected a run with a folder, by which its tracked run is found again")
        if config.keep_every and folder is None:
            raise ConfigError(f"run.keep_every: found {config.keep_every}; expected a run with a folder to keep it in")
        if not federation.sites:
            raise ConfigError("the federation has no clients; expected at least one site")
        choice = _chosen(config, federation) if choice is None else choice
        self._watch = BudgetWatch(config.budgets, federation) if config.budgets else None
        if self._watch is not None:
            fresh = partial(ClientRuntime, method, federation, config.seed, config.computing, config.clipping)
            choice = self._watch.watched(choice, fresh)
        self._liars: tuple[ClientId, ...] = ()
        if config.attackers is not None:
            self._liars = config.attackers.among(sorted(federation.sites), config.seed)
            choice = replace(choice, executor=Misled(choice.executor, config.attackers, self._liars))
        check_targets(federation)
        rehearse(federation, common_test=config.common_test)
        if config.clip_update is not None:
            check_has_updates(method)
        self._sums = _sums(method, federation, config, adding)
        self._alone = adding is None
        self._config = config
        self._folder = folder
        self._all_settings = in_json(_settings(method, config) if settings is None else settings)
        self._settings = what_matters(self._all_settings)
        self._audience = Audience()
        self.notes: list[str] = []
        if folder:
            make_folder(folder)
        cap_bytes = int(config.memory_gib * 2**30)
        store = ClientStore(folder / CHECKPOINT if folder else None, cap_bytes) if store is None else store
        self.choice = choice
        self._twin = twin_clock(config, sorted(federation.sites)) if config.twin else None
        rule = config.rounds_close.asynchronous
        self._engine = Engine(
            method,
            federation,
            seed=config.seed,
            store=store,
            executor=self.choice.executor,
            computing=config.computing,
            tolerate_failures=config.tolerate_failures,
            on_divergence=config.on_divergence,
            quorum=config.rounds_close.quorum,
            largest=config.largest_value,
            outlier_factor=config.outlier_factor,
            ledger=Ledger(folder / RELEASES if folder else None),
            clock=self._twin or (rule and _arrivals(config, choice.executor, sorted(federation.sites))),
            asynchrony=rule and rule.among(len(federation.sites)),
            at_once=config.cohort_size(len(federation.sites)),
            sums=self._sums,
            clipping=config.clipping,
        )
        weakref.finalize(self, _close, self._engine, os.getpid())  # so workers end even if nobody closed the run
        self._store = store
        self._records = Records(folder) if folder else None
        self._checkpoints = Checkpoints(folder / CHECKPOINT, store) if folder else None
        self._last = Checkpoint.read(folder / CHECKPOINT / LAST) if folder else None
        self._state: Any = None
        self._aside = SetAside(config, len(federation.sites))
        self._lost = 0  # how many rounds in a row were lost
        self._waited = 0.0  # seconds, in this round
        self._meter = EnergyMeter()
        self._undefined: set[str] = set()  # metrics of which it was said that they have no value

    @property
    def rounds_done(self) -> int:
        """The number of rounds in the folder's checkpoint."""
        return self._last.round if self._last else 0

    @property
    def releases(self) -> dict[ClientId, Releases]:
        """Each client's private releases, including those of rounds that were run again."""
        return self._engine.ledger.releases

    @property
    def privacy(self) -> str | None:
        """The statement of the privacy that it has spent; None if nothing claims any."""
        if (of_sums := self._config.private_weights) is not None:
            return of_sums.statement(self.releases, self._alone)
        return self._engine.method.privacy_statement(self.releases)

    @property
    def releases_privately(self) -> bool:
        """Whether clients release anything under a privacy mechanism."""
        return self._engine.releases_privately

    def trained(self, classes: tuple[str, ...] = ()) -> Trained:
        """The models after the last round that this object has run; `classes` are their outputs' names."""
        return Trained(self._engine, self._state, self._engine.rounds_done, self._config.threads, classes)

    def load(self) -> None:
        """Load the folder's checkpoint, or the method's initial state; nothing is written.

        Raises:
            ConfigError: the federation does not offer what the method needs.
            DataError: its data hold NaN.
            CheckpointError: the folder's checkpoint or the records before it are damaged, or it is another run's.
        """
        method = self._engine.method
        name, offer = type(method).__name__, Offer.of(self._engine.federation)
        check_needs(needs_of(method), name, offer)
        if self._folder and self._last:
            check_continues(self._folder, self._last, self._settings, self._config.rounds)
        if self._engine.releases_privately and self._folder and self._last and not (self._folder / RELEASES).is_file():
            raise CheckpointError(f"{self._folder / RELEASES} is missing; what clients have released is not known")
        self.notes = self._records.check(self._last) if self._records else []
        self.notes += cautions(needs_of(method), name, offer)
        if self._config.attackers is not None:
            self.notes.append(self._config.attackers.told(sorted(self._engine.federation.sites), self._config.seed))
        self.notes += self._config.computing.notes()
        self.notes += filter(None, [self._watch and self._watch.problem])
        self._aside = SetAside(self._config, len(self._engine.federation.sites))
        if self._folder and self._config.rounds_close.set_aside:
            self._aside.remember(rounds_of(self._folder, self.rounds_done))
        try:
            if self._engine.asynchronous and self._engine.clock.virtual and not self._last:
                check_asynchronous(method, self._engine.federation, self._config)
            self._state = self._engine.start()
            if (clipping := self._config.clipping) is not None:
                check_clips(self._engine, self._state, self._config, clipping)
            if self._sums:
                self._sums.check(self._engine, self._state, self._config)
            if self._twin:
                self._twin.go_on(twin_record(self._folder, self.rounds_done) if self._folder else None)
            if self._checkpoints:
                self.notes += filter(None, [self._checkpoints.complaint(self._last)])
                if self._last:
                    initial, self._state = self._state, self._checkpoints.restore(self._last, self._state)
                    self._remember(self._checkpoints, self._last, initial)
                    self._engine.rounds_done = self._last.round
                    if self._engine.asynchronous:
                        kind, under_way = type(self._state), self._checkpoints.under_way(self._last)
                        self._engine.asynchronous.go_on(under_way, kind)
            else:  # without a folder every call starts over
                self._store.restore(Layout())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes that `load` started; `run` does so itself, and starts them again."""
        self._engine.close()

    def run(self, *observers: Observer) -> Result:
        """Run the remaining rounds (all if there is no folder), and tell the observers how it goes.

        Raises:
            ClientFailure: a client failed and failures are not tolerated, too many rounds in a row were lost or one was
                undone as often, or a quorum did not come in time; the last checkpoint stands.
            DivergenceError: numbers became NaN or infinite, and the run stops on divergence.
            CheckpointError: the folder's checkpoint is damaged.
            Exception: whatever an observer raised; the last checkpoint stands.
        """
        with threads(self._config.threads):
            try:
                self.load()
                return self._observed(observers)
            finally:
                self._engine.close()

    def _observed(self, observers: Sequence[Observer]) -> Result:
        """Run, and tell the observers the end too, whatever it is."""
        watch: list[Observer] = [self._watch] if self._watch is not None else []
        watch += [self._meter] if self._meter.counts else []
        self._audience = Audience([*trackers(self._config.track), *watch, *observers])
        self._engine.on_client_end = self._audience.on_client_end
        try:
            self._audience.on_run_start(self._start())
            result = self._run()
        except BaseException as error:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self._audience.on_run_end(RunEnd(status, self.rounds_done, error=error))
            raise
        self._audience.on_run_end(RunEnd("finished", self._config.rounds, result))
        return result

    def _start(self) -> RunStart:
        federation = self._engine.federation
        return RunStart(
            method=self._all_settings["method"]["name"],
            rounds=self._config.rounds,
            rounds_done=self.rounds_done,
            clients=len(federation.sites),
            cohort_size=self._config.cohort_size(len(federation.sites)),
            metric=federation.task.primary,
            settings=self._all_settings,
            folder=self._folder,
        )

    def _run(self) -> Result:
        for note in (*self.notes, *_one_class(self._engine.federation)):
            log.warning("%s", note)
        if self._sums:
            log.warning("%s", self._sums.warning, extra=ON_SCREEN)
        if self._records and self._checkpoints:
            self._checkpoints.prepare()
            self._records.drop_excess()
        self._lost = lost_in_a_row(self._folder / ROUNDS) if self._folder else 0
        records: list[RoundRecord] = []
        evaluation: Evaluation | None = None
        for number in range(self.rounds_done + 1, self._config.rounds + 1):
            evaluation, record = self._round(number)
            records.append(record)
            self._audience.on_round_end(record)
            self._check_not_stalled(record)
        if evaluation is None:  # no rounds were left
            evaluation = self._evaluate(self.rounds_done)
        return Result(records, evaluation, self._last)

    def _round(self, number: int) -> tuple[Evaluation | None, RoundRecord]:
        self._meter.take()  # what was taken before does not count
        started, last, self._waited = time.perf_counter(), self._last, 0.0
        self._state, report = self._closed(number)
        waited = self._waited
        computed, joules = time.perf_counter(), self._meter.take()
        due = number % self._config.evaluate_every == 0 or number == self._config.rounds
        before = self._engine.evaluation_traffic.bytes_down
        evaluation = self._evaluate(number) if due else None
        evaluation_bytes = self._engine.evaluation_traffic.bytes_down - before
        record = self._judged(round_record(number, report, evaluation, evaluation_bytes))
        self._tell_undefined(record)
        evaluated = time.perf_counter()
        self._write(record, evaluation, report.work, self._undo(number, last))
        if self._folder:
            local = report.seconds_local
            timing = {
                "round": number,
                "seconds_local": local,
                "seconds_server": computed - started - waited - local,
                "seconds_evaluation": evaluated - computed,
                "seconds_total": time.perf_counter() - started,
                **({} if joules is None else {"joules": joules}),
            }
            append(self._folder / TIMINGS, lines_of([timing]))
        metric = self._engine.federation.task.primary
        reached = record.value("personal", metric.name)
        loss = "no training loss" if record.loss_local is None else f"loss {record.loss_local}"
        log.info("round %d: %s, %s %s on %s", number, loss, metric.label, reached, TITLES["personal"])
        return evaluation, record

    def _closed(self, number: int) -> tuple[Any, RoundReport]:
        """The round, once enough of its clients are there."""
        ids = sorted(self._engine.federation.sites)
        if (asynchronous := self._engine.asynchronous) is None:
            cohort = self._config.cohort(ids, number, self._aside.at(number))
            return self._attended(number, cohort, lambda: self._once(number, cohort, cohort))
        once = partial(self._once, number, self._config.order(ids, number))
        if self._engine.clock.virtual:
            return once()
        return self._attended(number, [client for client in ids if client not in asynchronous.waiting], once)

    def _once(self, number: int, clients: list[ClientId], cohort: Sequence[ClientId] = ()) -> tuple[Any, RoundReport]:
        self._audience.on_round_start(RoundStart(number, tuple(cohort)))
        return self._engine.round(number, self._state, clients)

    def _attended(self, number: int, clients: Collection[ClientId], work: Callable[[], T]) -> T:
        """Do work of a round once a quorum of its clients is there; if they leave in the middle, wait and do it again.

        Raises:
            ClientFailure: a quorum did not come in time, or they left too often.
        """
        undone = 0
        while True:
            self._await_quorum(number, clients)
            try:
                return work()
            except Deserted as error:
                undone += 1
                if undone == self._config.lost_rounds:
                    raise ClientFailure(
                        f"round {number} was undone {undone} times in a row, the last time because: {error};"
                        " run.lost_rounds sets how often it may be"
                    ) from error
                log.warning("round %d is undone and tried again: %s", number, error, extra=ON_SCREEN)

    def _await_quorum(self, number: int, clients: Collection[ClientId]) -> None:
        """Wait until so many of the clients can be reached as must be."""
        patience, needed = self._config.rounds_close.patience_s, self._engine.needed(len(clients))
        engine, started = self._engine, time.monotonic()
        level, extra = (logging.INFO, None) if engine.clock.virtual else (logging.WARNING, ON_SCREEN)
        began, told = engine.clock.now(), -math.inf
        while (here := len(clients) - len(missing := engine.absent(clients))) < needed:
            now = engine.clock.now()
            who = ", ".join(f"{name} (client {client})" for client, name in sorted(missing.items()))
            standing = f"{here} of {len(clients)} clients are there, and {needed} are needed; missing: {who}"
            if patience is not None and now - began >= patience:
                raise ClientFailure(
                    f"round {number} waited for {patience:g} s: {standing}; run.rounds_close.patience_s sets how long"
                )
            if now - told >= _REMIND_EVERY:
                log.log(level, "round %d waits: %s", number, standing, extra=extra)
                told = now
            self._audience.on_waiting(Waiting(number, len(clients), here, needed, missing))
            engine.clock.wait(clients)
        if told > 0:
            log.log(level, "round %d goes on", number, extra=extra)
        self._waited += time.monotonic() - started

    def _judged(self, record: RoundRecord) -> RoundRecord:
        """The record of a round, with those whom it sets aside."""
        if (rule := self._config.rounds_close.set_aside) is None:
            return record
        found = self._aside.after(record.round, record.cohort, record.late or ())
        for client, until in found.items():
            rounds = f"{record.round + 1} to {until}"
            log.warning("client %d is set aside for rounds %s: %s", client, rounds, rule.words, extra=ON_SCREEN)
        return replace(record, set_aside={str(client): until for client, until in found.items()} or None)

    def _tell_undefined(self, record: RoundRecord) -> None:
        """Say once of a metric that it has no value on any examples on which others have one."""
        measured = {name for values in (record.metrics or {}).values() for name, v in values.items() if v is not None}
        wanted = {metric.name for metric in self._engine.federation.task.metrics} if measured else set[str]()
        for name in sorted(wanted - measured - self._undefined):
            self._undefined.add(name)
            log.warning("%s has no value after round %d: it is NaN or undefined on all examples", name, record.round)

    def _check_not_stalled(self, record: RoundRecord) -> None:
        self._lost = self._lost + 1 if record.lost is not None else 0
        if self._lost >= self._config.lost_rounds:
            raise ClientFailure(
                f"{self._lost} rounds in a row were lost, the last one, {record.round}, because: {record.lost};"
                " run.lost_rounds sets how many may be"
            )

    def _evaluate(self, number: int) -> Evaluation:
        without = {*self._liars, *(() if self._engine.clock.virtual else self._aside.at(number))}
        heard = [client for client in self._engine.federation.sites if client not in without]
        clients, common = self._config.evaluated(heard, number), self._config.common_test
        free = self._free_alone(number)

        def once() -> Evaluation:
            gone = self._away(free)
            there = [client for client in clients if client not in gone]
            self._audience.on_evaluation_start(EvaluationStart(number, len(there)))
            return evaluate(self._engine, self._state, round_number=number, common_test=common, clients=there)

        found = once() if self._engine.clock.virtual else self._attended(number, () if free else clients, once)
        self._audience.on_evaluation_end(found)
        return found

    def _free_alone(self, number: int) -> bool:
        """Whether only clients are evaluated that have nothing else to do; after the last round all are."""
        return bool(self._engine.asynchronous) and not self._engine.clock.virtual and number < self._config.rounds

    def _away(self, free: bool) -> set[ClientId]:
        """Clients that are left out of an evaluation of the free alone: they are under way, or not there."""
        asynchronous = self._engine.asynchronous
        if not free or asynchronous is None:
            return set()
        return {*asynchronous.under_way, *self._engine.absent(self._engine.federation.sites)}

    def _undo(self, number: int, last: Checkpoint | None) -> Undo | None:
        """What this round could be undone with, by the checkpoint that was the last one when it began."""
        before = self._engine.outliers.before if self._engine.outliers else None
        if before is None or before.number != number:
            return None
        return Undo(last.state if last else (), asdict(before.outlier))

    def _remember(self, checkpoints: Checkpoints, last: Checkpoint, initial: Any) -> None:
        """What comparing replies has found before this process began; `initial` is the method's initial state."""
        outliers = self._engine.outliers
        if outliers is None or self._folder is None:
            return
        records = rounds_of(self._folder, last.round)
        outliers.named = Counter(record.outlier for record in records if record.outlier is not None)
        if last.undo is not None and checkpoints.mark is not None:
            state = checkpoints.state(replace(last, state=last.undo.state), initial) if last.undo.state else initial
            outliers.before = Before(last.round, state, checkpoints.mark, Outlier(**last.undo.outlier))

    def _write(
        self, record: RoundRecord, evaluation: Evaluation | None, work: Sequence[WorkDone], undo: Undo | None
    ) -> None:
        """Write records first, then the checkpoint; lines beyond it are dropped when a killed run is resumed."""
        if not self._records or not self._checkpoints:
            return
        self._records.add(ROUNDS, [record_line(record)])
        self._records.add_costs(record.round, work)
        if self._twin:
            self._records.add_twin(self._twin.take(record.round))
        if evaluation:
            self._records.add(CLIENTS, map(asdict, evaluation.scores))
        if evaluation and self._folder and record.round == self._config.rounds:
            write_by_class(self._folder, evaluation.by_class(record.round))
        best, best_round = (self._last.best_validation, self._last.best_round) if self._last else (None, None)
        metric = self._engine.federation.task.primary
        validation = record.value("validation", metric.name)
        if validation is not None and metric.better(validation, best):
            best, best_round = validation, record.round
        extents = self._records.sync()
        before = self._engine.outliers.before if self._engine.outliers else None
        every = self._config.keep_every
        self._last = self._checkpoints.save(
            record.round,
            self._state,
            best,
            best_round,
            extents,
            self._settings,
            undo,
            mark=before.mark if undo is not None and before is not None else None,
            keep=every is not None and record.round % every == 0,
            under_way=self._engine.asynchronous.state() if self._engine.asynchronous else None,
        )


def _settings(method: Method[Any], config: RunConfig) -> Tree:
    """The settings of a run that was made without tables."""
    kind = type(method)
    return {"method": {"name": f"{kind.__module__}.{kind.__qualname__}", **asdict(method)}, "run": asdict(config)}


def twin_clock(config: RunConfig, clients: Sequence[ClientId]) -> TwinClock:
    """The clock of a run with a twin, at its start.

    Raises:
        ConfigError: a client has no device, or a trace cannot be read.
    """
    assert config.twin is not None
    kind = AsynchronousTwinClock if config.rounds_close.asynchronous else TwinClock
    return kind(config.course(Fleet(config.twin.devices, clients)))


def _arrivals(config: RunConfig, executor: Executor, clients: Sequence[ClientId]) -> ArrivalClock:
    """The clock of a run whose rounds are asynchronous, and whose clients take their own time.

    Raises:
        ConfigError: they do not, since they are on this machine.
    """
    if not isinstance(executor, OneByOne):
        config.check_has_clock()  # which it has not, or nobody would need this one
    return ArrivalClock(cast(OneByOne, executor), clients)


def _sums(
    method: Method[Any], federation: Federation, config: RunConfig, adding: "Adding | None"
) -> "ReplySums | None":
    """What sums the replies of a run; None if nothing does.

    Raises:
        ConfigError: what it takes is not installed, or the method needs single replies.
    """
    if not isinstance(config.secure_sums, SecureRule):
        return None
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            "run.secure_sums: cryptography is not installed, by which they hide: pip install 'potluck[flower]'"
        )
    from potluck.experiment.running.secure_sums import AddingHere, ReplySums, sum_noise

    noise = sum_noise(config)
    return ReplySums(method, federation, config.secure_sums, adding or AddingHere(noise), noise)


def _close(engine: Engine, process: int) -> None:
    if os.getpid() == process:  # a forked copy of the run must not close its parent's workers
        engine.close()


def _one_class(federation: Federation) -> list[str]:
    """A note, if all training examples that are here are of one class."""
    seen: set[int] = set()
    for site in federation.looked_at.values() if federation.task.has_classes else ():
        seen.update(site.train.labels.unique().tolist())
        if len(seen) > 1:
            return []
    return [f"all training examples are of class {label}; to predict it is always right" for label in seen]


def _chosen(config: RunConfig, federation: Federation) -> ChosenExecutor:
    nets = [federation.build(name, Key((name,))) for name in sorted(federation.architectures)]
    return choose_executor(config.executor, config.workers, config.threads, nets, config.computing.place)
