"""A run's output on the terminal: how it goes, and a closing table by architecture."""

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.table import Table

from potluck.cli.terminal import console_on, line_of
from potluck.experiment.results.evaluate import Evaluation
from potluck.experiment.results.result import Result
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.watching.progress import Standing
from potluck.records import ACCURACY, LOG, TITLES, Measure, Metric, Progress

_EXECUTORS = "potluck.engine.executors"
_EVERY = 10.0  # seconds between two lines within a round, without a terminal


class _Aloud(logging.Handler):
    """Shows log lines marked `ON_SCREEN`, and executors' warnings of lost or stopped processes."""

    def __init__(self, console: Console, note: Callable[[str, str], None]) -> None:
        super().__init__()
        self._console, self._note = console, note

    def emit(self, record: logging.LogRecord) -> None:
        """One line, above the bar."""
        warns = record.name.startswith(_EXECUTORS) and record.levelno >= logging.WARNING
        if warns or getattr(record, "on_screen", False):
            self._console.print(f"potluck: {record.getMessage()}", highlight=False, markup=False, soft_wrap=True)
            self._note(record.getMessage(), "run")


class Display(Standing):
    """Shows how a run goes: on a terminal a line that lives, with round, client, loss, score, traffic and time left.

    Without a terminal, a line for each round, and between rounds at most one every ten seconds. Lines of the log that
    are marked `ON_SCREEN` are shown too.

    Args:
        clock: seconds from any moment on.
        note: called with each line as it is without a terminal, and a word for what it is about.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, note: Callable[[str, str], None] = lambda line, event: None
    ) -> None:
        super().__init__(clock)
        self._console = console_on(sys.stderr)
        self._aloud, self._note = _Aloud(self._console, note), note
        self._printed = clock()
        self._bar = rich.progress.Progress(
            TextColumn("{task.fields[line]}"),
            BarColumn(20),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, line="starting")

    def __enter__(self) -> Self:
        self._bar.start()
        logging.getLogger("potluck").addHandler(self._aloud)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("potluck").removeHandler(self._aloud)
        self._bar.stop()

    def show(self, progress: Progress, *, round_ended: bool = False) -> None:
        """Show how the run stands."""
        if self._console.is_terminal:
            self._bar.update(self._task, completed=progress.share, total=progress.rounds, line=line_of(progress))
        if not round_ended and self._clock() - self._printed < _EVERY:
            return
        self._printed = self._clock()
        words = line_of(progress, ended=round_ended)
        if not self._console.is_terminal:
            self._console.print(words, highlight=False, markup=False, soft_wrap=True)
        self._note(words, "round" if round_ended else "progress")


def print_result(folder: Path, experiment: Experiment, result: Result, privacy: str | None) -> None:
    """Print the closing table, the privacy spent, the run's folder, and the next command."""
    console = console_on(sys.stdout)
    console.print(_table(experiment, result.evaluation))
    evaluation, best = result.evaluation, result.checkpoint
    metric = evaluation.primary
    for line in _other_metrics(evaluation):
        console.print(line, highlight=False, soft_wrap=True)
    if (value := evaluation.value("global")) is not None:
        where = f"{TITLES['global'].capitalize()} on the {TITLES['common']}"
        console.print(f"{where}: {_of(metric)}{metric.text(value)}", highlight=False)
    if best and best.best_round is not None and best.best_validation is not None:
        console.print(
            f"Best round on validation data: {best.best_round}"
            f" ({_of(metric)}{metric.text(best.best_validation)} there)",
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
    """The primary metric on held-out examples by architecture, and over all clients."""
    metric = evaluation.primary
    title = f"{experiment.method_name} on {experiment.federation.dataset} after {experiment.run.rounds} rounds"
    if experiment.preset_words:
        title += f"\n{experiment.preset_words}"
    table = Table(title=title, caption=f"{_named(metric)} on held-out examples; means over clients")
    table.add_column("architecture")
    for column in ("clients", TITLES["personal"], TITLES["common"]):
        table.add_column(column, justify="right")
    personal = evaluation.by_architecture("personal")
    common = evaluation.by_architecture("common")
    clients = [score.architecture for score in evaluation.scores]
    for name in dict.fromkeys(clients):
        cells = (str(clients.count(name)), metric.text(personal.get(name)), metric.text(common.get(name)))
        table.add_row(name, *cells)
    table.add_section()
    means = (metric.text(evaluation.value("personal")), metric.text(evaluation.value("common")))
    table.add_row("all clients", str(len(clients)), *means, style="bold")
    return table


def _other_metrics(evaluation: Evaluation) -> list[str]:
    """The other metrics: mean over clients, and over all own test parts as if they were one."""
    others = [metric for metric in evaluation.task.metrics if metric != evaluation.primary]
    found: list[str] = []
    measures: dict[str, Measure] = {
        f"Mean over clients, {TITLES['personal']}": "personal",
        TITLES["pooled"].capitalize(): "pooled",
    }
    for words, measure in measures.items():
        values = [(metric, evaluation.value(measure, metric.name)) for metric in others]
        known = [f"{_named(metric)} {metric.text(value)}" for metric, value in values if value is not None]
        found += [f"{words}: {', '.join(known)}"] if known else []
    return found


def _named(metric: Metric) -> str:
    """A metric's label, with its direction if lower is better."""
    return metric.label if metric.higher_is_better else f"{metric.label} ({metric.direction})"


def _of(metric: Metric) -> str:
    """The metric's name before a value; empty for accuracy."""
    return "" if metric == ACCURACY else f"{metric.label} "
