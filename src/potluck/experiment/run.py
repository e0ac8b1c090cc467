"""One run: rounds, evaluations, records and checkpoints, from the start or from where it stopped."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from potluck.core.federation import ClientId, Federation
from potluck.core.method import Method
from potluck.core.modes import threads
from potluck.core.rng import Key, fold_in
from potluck.core.roles import ClientFailure
from potluck.engines.executors.choice import Choice, choose_executor
from potluck.engines.inprocess import InProcessEngine
from potluck.engines.inspection import check_class_targets
from potluck.engines.stores import ClientStore
from potluck.experiment.checkpoint import Checkpoints
from potluck.experiment.config import RunConfig
from potluck.experiment.evaluate import Evaluation, evaluate
from potluck.experiment.needs import Offer, check_needs
from potluck.experiment.records import append, keep_rounds, line_of, lost_in_a_row, round_record
from potluck.records import CHECKPOINT, CLIENTS, LAST, ROUNDS, TIMINGS, Checkpoint, RoundRecord

log = logging.getLogger(__name__)
Watcher = Callable[[RoundRecord], None]


@dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
        rounds: the records of the rounds played, in this process.
        evaluation: of the last round.
        checkpoint: of the last round; None if the run has no folder.
    """

    rounds: list[RoundRecord]
    evaluation: Evaluation
    checkpoint: Checkpoint | None


class Run:
    """Plays a method on a federation.

    Args:
        method: what to run.
        federation: who takes part.
        config: rounds, cohorts, seed, evaluation.
        folder: where records and checkpoints go; None keeps nothing. A folder with a checkpoint is resumed.
        choice: of the executor; by the configuration without.
        store: of what clients keep; in the folder without.
    """

    def __init__(
        self,
        method: Method[Any],
        federation: Federation,
        config: RunConfig,
        folder: Path | None = None,
        choice: Choice | None = None,
        store: ClientStore | None = None,
    ) -> None:
        self._config = config
        self._folder = folder
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        cap_bytes = int(config.memory_gib * 2**30)
        store = ClientStore(folder / CHECKPOINT if folder else None, cap_bytes) if store is None else store
        self.choice = _chosen(config, federation) if choice is None else choice
        self._engine = InProcessEngine(
            method,
            federation,
            seed=config.seed,
            store=store,
            executor=self.choice.executor,
            computing=config.computing,
            tolerate_failures=config.tolerate_failures,
            on_divergence=config.on_divergence,
            largest=config.largest_value,
        )
        self._checkpoints = Checkpoints(folder / CHECKPOINT, store) if folder else None
        self._last = Checkpoint.read(folder / CHECKPOINT / LAST) if folder else None
        self._state: Any = None
        self._lost = 0  # rounds in a row so far

    @property
    def rounds_done(self) -> int:
        """Rounds that the folder's checkpoint has behind it."""
        return self._last.round if self._last else 0

    def load(self) -> None:
        """Take the state of the folder's checkpoint, or the method's first; nothing is written.

        Raises:
            ConfigError: the federation does not offer what the method needs.
            DataError: its data hold NaN, or targets that are no classes.
            CheckpointError: the folder's checkpoint is damaged.
        """
        method = self._engine.method
        check_needs(method.needs(), type(method).__name__, Offer.of(self._engine.federation))
        check_class_targets(self._engine.federation)
        self._state = self._engine.start()
        if self._last and self._checkpoints:
            self._state = self._checkpoints.restore(self._last, self._state)

    def play(self, watch: Watcher = lambda record: None) -> Result:
        """Play the rounds that are left, calling `watch` after each.

        Raises:
            ClientFailure: a client failed and failures are not tolerated, or too many rounds in a row were lost; the
                last checkpoint stands.
            DivergenceError: numbers became NaN or infinite, and such are not to be dropped.
            CheckpointError: the folder's checkpoint is damaged.
        """
        with threads(self._config.threads):
            try:
                self.load()
                return self._play(watch)
            finally:
                self._engine.close()

    def _play(self, watch: Watcher) -> Result:
        self._forget_unfinished_rounds()
        self._lost = lost_in_a_row(self._folder / ROUNDS) if self._folder else 0
        records: list[RoundRecord] = []
        evaluation: Evaluation | None = None
        for number in range(self.rounds_done + 1, self._config.rounds + 1):
            evaluation, record = self._round(number)
            records.append(record)
            watch(record)
            self._check_not_stalled(record)
        if evaluation is None:  # nothing was left to play
            evaluation = self._evaluate(self.rounds_done)
        return Result(records, evaluation, self._last)

    def _round(self, number: int) -> tuple[Evaluation | None, RoundRecord]:
        started = time.perf_counter()
        self._state, report = self._engine.round(number, self._state, self._cohort(number))
        played = time.perf_counter()
        due = number % self._config.evaluate_every == 0 or number == self._config.rounds
        before = self._engine.evaluation_traffic.bytes_down
        evaluation = self._evaluate(number) if due else None
        evaluation_bytes = self._engine.evaluation_traffic.bytes_down - before
        record = round_record(number, report, evaluation, evaluation_bytes)
        judged = time.perf_counter()
        self._write(record, evaluation)
        if self._folder:
            local = report.seconds_local
            timing = {
                "round": number,
                "seconds_local": local,
                "seconds_server": played - started - local,
                "seconds_evaluation": judged - played,
                "seconds_total": time.perf_counter() - started,
            }
            append(self._folder / TIMINGS, [timing])
        log.info("round %d: loss %s, personal %s", number, record.loss_local, record.accuracy_personal_mean)
        return evaluation, record

    def _check_not_stalled(self, record: RoundRecord) -> None:
        self._lost = self._lost + 1 if record.lost is not None else 0
        if self._lost >= self._config.lost_rounds:
            raise ClientFailure(
                f"{self._lost} rounds in a row were lost, the last one, {record.round}, because: {record.lost};"
                " run.lost_rounds says how many may be"
            )

    def _evaluate(self, number: int) -> Evaluation:
        return evaluate(self._engine, self._state, round_number=number, common_test=self._config.common_test)

    def _cohort(self, number: int) -> list[ClientId]:
        """This round's clients: uniform without replacement, the same for every method under one seed."""
        ids = sorted(self._engine.federation.sites)
        size = max(1, int(self._config.cohort_fraction * len(ids) + 1e-9))  # 0.29 of 100 is 29
        order = torch.randperm(len(ids), generator=fold_in(self._config.seed, "cohort", number).generator())
        return sorted(ids[index] for index in order[:size].tolist())

    def _write(self, record: RoundRecord, evaluation: Evaluation | None) -> None:
        """Records first, then the checkpoint: what a killed run wrote too much is dropped when it is resumed."""
        if not self._folder or not self._checkpoints:
            return
        append(self._folder / ROUNDS, [line_of(record)])
        if evaluation:
            append(self._folder / CLIENTS, map(asdict, evaluation.scores))
        best, best_round = (self._last.best_validation, self._last.best_round) if self._last else (None, None)
        validation = record.accuracy_validation_mean
        if validation is not None and (best is None or validation > best):
            best, best_round = validation, record.round
        self._last = self._checkpoints.save(record.round, self._state, best, best_round)

    def _forget_unfinished_rounds(self) -> None:
        for name in (ROUNDS, CLIENTS, TIMINGS):
            if self._folder:
                keep_rounds(self._folder / name, self.rounds_done)


def _chosen(config: RunConfig, federation: Federation) -> Choice:
    nets = [federation.build(name, Key((name,))) for name in sorted(federation.architectures)]
    return choose_executor(config.executor, config.workers, config.threads, nets)
