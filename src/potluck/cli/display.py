"""What a run shows on the terminal: a progress bar, and a closing table per architecture."""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, cast

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from potluck.experiment.config import Experiment
from potluck.experiment.evaluate import Evaluation
from potluck.experiment.run import Result
from potluck.records import LOG, RoundRecord

_EXECUTORS = "potluck.engine.executors"
_MEGABYTE = 10**6


class _Patient:
    """A stream whose reader may go: what is written then is lost, and nothing else is."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, if anybody reads."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _console(stream: TextIO) -> Console:
    return Console(file=cast("TextIO", _Patient(stream)))


class _Aloud(logging.Handler):
    """Shows what is meant for the screen, and what executors warn of: a process that was lost or is waited for."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """One line, above the bar."""
        warns = record.name.startswith(_EXECUTORS) and record.levelno >= logging.WARNING
        if warns or getattr(record, "on_screen", False):
            self._console.print(f"potluck: {record.getMessage()}", highlight=False, markup=False, soft_wrap=True)


class Progress:
    """A bar with round, accuracy, traffic and time left; a plain line a round where there is no terminal.

    Lines of the log that are marked `ON_SCREEN` are shown too.
    """

    def __init__(self, experiment: Experiment, rounds_done: int, bytes_sent: int = 0) -> None:
        self._console = _console(sys.stderr)
        self._megabytes = bytes_sent / _MEGABYTE
        self._aloud = _Aloud(self._console)
        self._accuracy = "accuracy -"
        self._bar = rich.progress.Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TextColumn("{task.fields[traffic]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._aloud = _Aloud(self._console)
        self._task = self._bar.add_task(
            "round", total=experiment.run.rounds, completed=rounds_done, accuracy=self._accuracy, traffic=""
        )

    def __enter__(self) -> Self:
        self._bar.start()
        logging.getLogger("potluck").addHandler(self._aloud)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("potluck").removeHandler(self._aloud)
        self._bar.stop()

    def show(self, record: RoundRecord) -> None:
        """Show a finished round."""
        self._megabytes += (record.bytes_down + record.bytes_up) / _MEGABYTE
        if record.accuracy_personal_mean is not None:
            self._accuracy = f"accuracy {_percent(record.accuracy_personal_mean)}"
        traffic = f"{self._megabytes:.1f} MB"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=record.round, accuracy=self._accuracy, traffic=traffic)
        else:
            self._console.print(f"round {record.round}  {self._accuracy}  {traffic}", highlight=False)


def print_result(folder: Path, experiment: Experiment, result: Result, privacy: str | None) -> None:
    """The closing table, what privacy was spent, where the run lies, and what to do next."""
    console = _console(sys.stdout)
    console.print(_table(experiment, result.evaluation))
    evaluation, best = result.evaluation, result.checkpoint
    if evaluation.accuracy_global is not None:
        console.print(f"Global model on the common test set: {_percent(evaluation.accuracy_global)}")
    if best and best.best_round is not None and best.best_validation is not None:
        console.print(
            f"Best round on validation data: {best.best_round} ({_percent(best.best_validation)} there)",
            highlight=False,
        )
    failed = sum(len(record.failed) for record in result.rounds)
    if failed:
        console.print(f"{failed} client calls failed; see {folder / LOG}", highlight=False)
    if evaluation.missing:
        console.print(f"{evaluation.missing} clients could not be evaluated; see {folder / LOG}", highlight=False)
    if lost := sum(record.lost is not None for record in result.rounds):
        console.print(f"{lost} rounds were lost and changed nothing; see {folder / LOG}", highlight=False)
    if privacy:
        console.print(f"Privacy: {privacy}", highlight=False)
    console.print(f"Records: {folder}", highlight=False, soft_wrap=True)
    if result.checkpoint:
        console.print(f"Checkpoint digest: {result.checkpoint.digest}", highlight=False)
    console.print(f"Next: potluck report {folder}", highlight=False, soft_wrap=True)


def _table(experiment: Experiment, evaluation: Evaluation) -> Table:
    """Accuracy on held-out examples by architecture, and over all clients."""
    title = f"{experiment.method_name} on {experiment.federation.dataset} after {experiment.run.rounds} rounds"
    if experiment.preset_words:
        title += f"\n{experiment.preset_words}"
    table = Table(title=title, caption="accuracy on held-out examples; means over clients")
    table.add_column("architecture")
    for column in ("clients", "own test part", "whole test set"):
        table.add_column(column, justify="right")
    personal = evaluation.by_architecture("accuracy_personal")
    common = evaluation.by_architecture("accuracy_common")
    clients = [score.architecture for score in evaluation.scores]
    for name in dict.fromkeys(clients):
        cells = (str(clients.count(name)), _percent(personal.get(name)), _percent(common.get(name)))
        table.add_row(name, *cells)
    table.add_section()
    means = (_percent(evaluation.mean("accuracy_personal")), _percent(evaluation.mean("accuracy_common")))
    table.add_row("all clients", str(len(clients)), *means, style="bold")
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
