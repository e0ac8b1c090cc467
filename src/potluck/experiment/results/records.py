"""Writing records of rounds and evaluations, line by line, and checking that they are unchanged."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

from potluck.core.ground.errors import CheckpointError
from potluck.core.tasks.metric import ACCURACY
from potluck.engine.disk.files import append, make_folder, rename, sync, write_atomically
from potluck.engine.rounds.report import RoundReport, WorkDone
from potluck.experiment.results.evaluate import Evaluation
from potluck.records import (
    BY_CLASS,
    CLIENTS,
    COSTS,
    ROUNDS,
    TIMINGS,
    TWIN,
    ByClass,
    Checkpoint,
    CostRecord,
    Extent,
    Measure,
    RoundRecord,
    Values,
)
from potluck.seals import (
    NO_LINE,
    UNKNOWN,
    content_of,
    content_within,
    extent_of,
    extent_up_to,
    mark,
    marks_in,
    round_of,
    split_lines,
)


def round_record(number: int, report: RoundReport, evaluation: Evaluation | None, evaluation_bytes: int) -> RoundRecord:
    """The record of a round, from the engine's report and the evaluation."""
    traffic = report.traffic
    evaluated = evaluation if evaluation and evaluation.task.has_classes else None
    return RoundRecord(
        round=number,
        cohort=list(report.cohort),
        replied=report.replied,
        failed={str(id): failure.reason for id, failure in sorted(report.failures.items())},
        bytes_down=traffic.bytes_down,
        bytes_up=traffic.bytes_up,
        bytes_down_by_entry=dict(sorted(traffic.down.items())),
        bytes_up_by_entry=dict(sorted(traffic.up.items())),
        bytes_evaluation=evaluation_bytes,
        loss_local=report.loss_local,
        accuracy_validation_mean=evaluated.mean("accuracy_validation") if evaluated else None,
        accuracy_personal_mean=evaluated.mean("accuracy_personal") if evaluated else None,
        accuracy_personal_std=evaluated.spread(ACCURACY)[0] if evaluated else None,
        accuracy_personal_worst=evaluated.spread(ACCURACY)[1] if evaluated else None,
        accuracy_personal_by_architecture=evaluated.by_architecture("accuracy_personal") if evaluated else None,
        accuracy_common_mean=evaluated.mean("accuracy_common") if evaluated else None,
        accuracy_common_by_architecture=evaluated.by_architecture("accuracy_common") if evaluated else None,
        accuracy_global=evaluated.accuracy_global if evaluated else None,
        metrics=_metrics(evaluation) if evaluation else None,
        metrics_by_architecture=_metrics_by_architecture(evaluation) if evaluation else None,
        lost=report.lost,
        undone=report.undone,
        outlier=report.outlier,
        notes=report.notes or None,
        stale={str(client): late for client, late in sorted(report.stale.items())} or None,
        late=report.late or None,
        secure=asdict(report.secure) if report.secure else None,
    )


def _metrics(evaluation: Evaluation) -> dict[str, Values]:
    """Every metric of the task by measure, and its spread over clients."""
    metrics = evaluation.task.metrics
    measures: tuple[Measure, ...] = ("validation", "personal", "pooled", "common", "global")
    found: dict[str, Values] = {
        measure: {metric.name: evaluation.value(measure, metric.name) for metric in metrics} for measure in measures
    }
    spreads = {metric.name: evaluation.spread(metric) for metric in metrics}
    found["personal_std"] = {name: std for name, (std, _) in spreads.items()}
    found["personal_worst"] = {name: worst for name, (_, worst) in spreads.items()}
    return {measure: values for measure, values in found.items() if any(v is not None for v in values.values())}


def _metrics_by_architecture(evaluation: Evaluation) -> dict[str, dict[str, Values]]:
    found: dict[str, dict[str, Values]] = {}
    for measure in ("personal", "common"):
        by_name = {metric.name: evaluation.by_architecture(measure, metric.name) for metric in evaluation.task.metrics}
        architectures = dict.fromkeys(name for values in by_name.values() for name in values)
        found[measure] = {
            architecture: {name: values.get(architecture) for name, values in by_name.items()}
            for architecture in architectures
        }
    return found


class Records:
    """The records in a run's folder: lines added round by round, whose extent every checkpoint states."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ledgers = {name: _Ledger(folder / name) for name in (ROUNDS, CLIENTS)}
        self._aside: Path | None = None
        self._last = 0

    def check(self, checkpoint: Checkpoint | None) -> list[str]:
        """Compare the records with the extent in the checkpoint; return notes for the user. Nothing is written.

        Raises:
            CheckpointError: records within the extent are damaged; says where.
        """
        self._aside, self._last = None, checkpoint.round if checkpoint else 0
        if checkpoint is None:
            return self._start_over()
        for name, ledger in self._ledgers.items():
            ledger.check(extent_of(checkpoint, name) if checkpoint.records else None, checkpoint.round)
        if checkpoint.records is None:
            return [f"{self._folder}: an earlier version wrote the checkpoint; {UNKNOWN}"]
        return []

    def drop_excess(self) -> None:
        """Drop lines beyond the checkpoint's extent, which a killed run may leave.

        Raises:
            StorageError: the folder cannot be written to; nothing is lost.
        """
        if self._aside:
            self._put_aside(self._aside)
        for ledger in self._ledgers.values():
            ledger.drop_the_rest()
        for name in (COSTS, TIMINGS, TWIN):
            _keep_rounds(self._folder / name, self._last)

    def add(self, name: str, objects: Iterable[dict[str, Any]]) -> None:
        """Add one JSON line for each object, all of one round.

        Raises:
            StorageError: they cannot be written.
        """
        self._ledgers[name].add(lines_of(objects))

    def add_costs(self, number: int, work: Iterable[WorkDone]) -> None:
        """Add what a round's work took.

        Raises:
            StorageError: it cannot be written.
        """
        append(self._folder / COSTS, lines_of(asdict(CostRecord(number, **asdict(of_one))) for of_one in work))

    def add_twin(self, record: dict[str, Any]) -> None:
        """Add the course of a round by the run's virtual clock.

        Raises:
            StorageError: it cannot be written.
        """
        append(self._folder / TWIN, lines_of([record]))

    def sync(self) -> dict[str, Extent]:
        """Make all lines durable; return the extent of each file.

        Raises:
            StorageError: the system reports an error.
        """
        new_names = [ledger.sync() for ledger in self._ledgers.values()]
        if any(new_names):
            sync(self._folder)
        return {name: ledger.extent for name, ledger in self._ledgers.items()}

    def _start_over(self) -> list[str]:
        """Without a checkpoint: drop what a run killed in its first round leaves, and set aside anything more."""
        for ledger in self._ledgers.values():
            ledger.check(NO_LINE, 0)
        found = [ledger.path for ledger in self._ledgers.values() if ledger.path.is_file()]
        if not any(_has_later_rounds(path.read_bytes()) for path in found):
            return []
        self._aside = next(place for number in range(1, 10**6) if not (place := self._place(number)).exists())
        return [
            f"{self._folder}: its checkpoint is missing, so the run starts over; the old records go to {self._aside}"
        ]

    def _place(self, number: int) -> Path:
        return self._folder / f"set-aside-{number}"

    def _put_aside(self, place: Path) -> None:
        make_folder(place)
        for name in (ROUNDS, CLIENTS, COSTS, TIMINGS, TWIN):
            if (self._folder / name).is_file():
                rename(self._folder / name, place / name)
        sync(place, self._folder)
        self._aside = None


_RARE = ("lost", "undone", "outlier", "notes", "stale", "late", "set_aside", "secure")


def record_line(record: RoundRecord) -> dict[str, Any]:
    """The content of a round's line; what few rounds have is present only if it is set."""
    return {name: value for name, value in asdict(record).items() if name not in _RARE or value is not None}


def write_by_class(folder: Path, found: ByClass | None) -> None:
    """Write the last evaluation's counts by class, if there are any.

    Raises:
        StorageError: the folder cannot be written to.
    """
    if found is not None:
        write_atomically(folder / BY_CLASS, json.dumps(asdict(found)).encode())


def lost_in_a_row(path: Path) -> int:
    """The number of lost rounds at the end of `rounds.jsonl`."""
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(1 for _ in takewhile(lambda line: "lost" in json.loads(line), reversed(lines)))


class _Ledger:
    """One file of records, with a running digest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hash = hashlib.blake2b(digest_size=16)  # as in `core.ground.digest`
        self._bytes = 0
        self._marks: list[str] = []
        self._is_new = False
        self._unsynced = False

    @property
    def extent(self) -> Extent:
        """The current extent."""
        return Extent(self._bytes, self._hash.hexdigest(), "".join(self._marks))

    def check(self, extent: Extent | None, last: int) -> None:
        """Truncate to the extent in a checkpoint of round `last`, or to the lines up to `last` if it states none."""
        extent = extent_up_to(self.path, last) if extent is None else extent
        kept = content_within(self.path, extent)
        self._hash = hashlib.blake2b(kept, digest_size=16)
        self._bytes = len(kept)
        self._marks = marks_in(extent.marks)

    def drop_the_rest(self) -> None:
        content = content_of(self.path)
        if len(content) > self._bytes:
            write_atomically(self.path, content[: self._bytes])
            sync(self.path.parent)

    def add(self, lines: bytes) -> None:
        if not lines:
            return
        self._is_new = self._is_new or not self.path.is_file()
        append(self.path, lines)
        self._unsynced = True
        self._hash.update(lines)
        self._bytes += len(lines)
        self._marks.append(mark(lines))

    def sync(self) -> bool:
        """Make the lines durable; return whether the file is new in its folder."""
        if self._unsynced:
            sync(self.path)
        is_new, self._is_new, self._unsynced = self._is_new, False, False
        return is_new


def lines_of(objects: Iterable[dict[str, Any]]) -> bytes:
    """One JSON line for each object.

    Raises:
        ValueError: a number is not finite; the engine lets none through.
    """
    return "".join(json.dumps(item, allow_nan=False) + "\n" for item in objects).encode()


def twin_record(folder: Path, number: int) -> dict[str, Any] | None:
    """The course of a round by the run's virtual clock; None before the first.

    Raises:
        CheckpointError: it is missing.
    """
    if number == 0:
        return None
    for line in split_lines(content_of(folder / TWIN)):
        if round_of(line) == number:
            return json.loads(line)
    raise CheckpointError(f"{folder / TWIN} has no line of round {number}; the twin's clock is not known; run again")


def rounds_of(folder: Path, last: int) -> list[RoundRecord]:
    """The records of a run's rounds up to `last`."""
    lines = content_of(folder / ROUNDS).splitlines()[:last]
    return [RoundRecord(**json.loads(line)) for line in lines]


def _has_later_rounds(content: bytes) -> bool:
    return any(int(number) > 1 for number in re.findall(rb'^\{"round": (\d+)', content, flags=re.MULTILINE))


def _keep_rounds(path: Path, last: int) -> None:
    """Keep only the lines of rounds up to `last`, in a file without a known extent."""
    content = content_of(path)
    kept = b"".join(line for line in split_lines(content) if (round_of(line) or last + 1) <= last)
    if kept != content:
        write_atomically(path, kept)
