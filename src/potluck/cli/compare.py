"""`potluck compare` and `potluck sweep`: run what is missing, several runs at a time, and print one table."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Self, get_args

import rich.progress
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.table import Table as Shown
from rich.text import Text

from potluck.analysis.blocks import check_reference
from potluck.analysis.compare import ComparedRow, unequal
from potluck.analysis.compare import compare as compared
from potluck.analysis.export import caption, check_format, table_of, target_table_of, write_comparison
from potluck.analysis.groups import values_with_owners
from potluck.analysis.names import Planned, labels
from potluck.analysis.read import Reading, StoredRun, find_runs, last, read_run, read_runs
from potluck.analysis.tables import metric_of
from potluck.cli import stages
from potluck.cli.terminal import console_on, line_of
from potluck.core.ground.errors import ConfigError
from potluck.experiment.federation.assemble import task_of
from potluck.experiment.running.several import Ended, News, run_several
from potluck.experiment.running.sweep import Point, Search, Sweep, Tuner, flat, read_sweep
from potluck.experiment.settings.presets import experiment_on, seeded
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.settings.tables import override, read_experiment
from potluck.records import TITLES, Measure

_FILE_WIDTH = 1000  # characters that a line may have without a terminal
_WIDEST = 4  # values of a differing setting that are listed before the rest is counted


def measure_of(name: str) -> Measure:
    """The measure of this name.

    Raises:
        ConfigError: there is none.
    """
    for measure in get_args(Measure):
        if measure == name:
            return measure
    raise ConfigError(f"--measure {name}: expected one of {', '.join(get_args(Measure))}")


@dataclass(frozen=True)
class View:
    """What of the runs is compared, and where the table goes.

    Attributes:
        measure: by which experiments are compared.
        chosen: whether at the rounds that are best on validation parts instead of the last.
        against: label of the reference.
        target: value to reach.
        file: where the table is written as well.
    """

    measure: str = "personal"
    chosen: bool = False
    against: str | None = None
    target: float | None = None
    file: Path | None = None

    def check(self) -> None:
        """Refuse what would only be refused once everything has run.

        Raises:
            ConfigError: there is no such measure or format.
        """
        measure_of(self.measure)
        if self.file:
            check_format(self.file)


def print_comparison(
    what: Sequence[str], *, seeds: int, on: Path | None, parent: Path, processes: int | None, view: View
) -> bool:
    """Print a comparison of methods, files and finished runs; whether all runs could be finished."""
    view.check()
    assignments = [word for word in what if "=" in word]
    folders = [Path(word) for word in what if "=" not in word and Path(word).is_dir()]
    targets = [word for word in what if "=" not in word and not Path(word).is_dir()]
    if not folders and not targets:
        raise ConfigError(
            "compare: name methods, TOML files or folders of runs, such as `potluck compare local fedavg`"
        )
    if folders and not targets and (assignments or on):
        raise ConfigError(f"{(assignments or [str(on)])[0]}: finished runs are compared as they are; name a method too")
    stored = read_runs(find_runs(folders)) if folders else Reading(())
    experiments = [
        seeded(experiment_on(target, assignments, on), number) for target in targets for number in range(seeds)
    ]
    check_reference([*stored.runs, *map(_planned, experiments)], view.against)
    ends = run_missing(experiments, parent, processes)
    return _show(stored.and_also(_finished(ends)), ends, view)


def print_sweep(file: Path, overrides: Sequence[str], *, parent: Path, processes: int | None, view: View) -> bool:
    """Run a sweep and print its table; whether all runs could be finished."""
    view.check()
    plan = read_sweep(override(read_experiment(file), overrides), str(file))
    first = plan.search.first if plan.search else {}
    experiments = [one for point in plan.points for one in plan.experiments({**point, **first})]
    check_reference(list(map(_planned, experiments)), view.against)
    if plan.search is None:
        ends = best = run_missing(experiments, parent, processes)
    else:
        ends, best = _tuned(plan, plan.search, parent, processes)
    return _show(_finished(best), ends, view)


def _finished(ends: Sequence[Ended]) -> Reading:
    """The finished ones of these runs."""
    folders = [end.folder for end in ends if not end.problem and end.folder]
    return read_runs(folders) if folders else Reading(())


def _tuned(plan: Sweep, search: Search, parent: Path, processes: int | None) -> tuple[list[Ended], list[Ended]]:
    """All runs of a search, and those of the best setting at each point."""
    everything: list[Ended] = []
    best: list[Ended] = []
    for point in plan.points:
        task = task_of(plan.experiments({**point, **search.first})[0])
        tuner = Tuner(search, higher_is_better=task.primary.higher_is_better, seed=plan.seeds[0])
        leading: tuple[float, list[Ended]] | None = None
        for batch in tuner.batches():
            tried = [plan.experiments({**point, **settings}) for _, settings in batch]
            ends = run_missing([experiment for of_trial in tried for experiment in of_trial], parent, processes)
            everything += ends
            for (trial, _), start in zip(batch, range(0, len(ends), len(plan.seeds)), strict=True):
                of_trial = ends[start : start + len(plan.seeds)]
                score = _score(of_trial, search.measure)
                tuner.tell(trial, score)
                if score is not None and (leading is None or task.primary.better(score, leading[0])):
                    leading = score, of_trial
        if leading:
            best += leading[1]
            _tell_best(point, leading[1][0].experiment, search, task.primary.text(leading[0]))
    return everything, best


def _tell_best(point: Point, experiment: Experiment, search: Search, score: str) -> None:
    """The best setting at a point of the grid, and how it did."""
    settings = flat(experiment.settings())
    where = ", ".join(str(value) for value in point.values())
    found = ", ".join(f"{key}={settings.get(key)}" for key, _ in search.space)
    typer.echo(f"Best{f' of {where}' if where else ''}: {found} ({search.measure} {score})")


def _score(ends: Sequence[Ended], measure: Measure) -> float | None:
    """Mean of the primary metric over seeds in the last evaluated round; None if a run lacks it.

    Raises:
        ConfigError: the runs are finished, and it was not measured.
    """
    values: list[float] = []
    for end in ends:
        if end.problem or end.folder is None:
            return None
        run = read_run(end.folder)
        record = last(run)
        value = record.value(measure, run.metric.name) if record else None
        if value is None:
            raise ConfigError(
                f"sweep.search.measure: {end.folder} has no {measure} {run.metric.label}; tune by another"
            )
        values.append(value)
    return fmean(values)


def run_missing(
    experiments: Sequence[Experiment], parent: Path, processes: int | None, names: Sequence[str] | None = None
) -> list[Ended]:
    """Run what is missing, and show how it goes.

    Args:
        experiments: to be run.
        parent: folder of their runs.
        processes: runs at a time; None for one for each core.
        names: of the runs; None for those that they have in tables and reports.

    Returns:
        What became of each run, in order.
    """
    ends: dict[int, Ended] = {}
    if not experiments:
        return []
    at_a_time = processes or len(
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    console = console_on(sys.stderr)
    names = names or run_names_of(experiments)
    with _Several(names, sum(experiment.run.rounds for experiment in experiments), console) as shown:
        for news in run_several(experiments, parent, at_a_time):
            shown.show(news)
            if news.waits:
                words = f"{names[news.index]}: another process works on it; waiting for its end"
                console.print(words, highlight=False, markup=False, soft_wrap=True)
            if news.ended is not None:
                ends[news.index] = news.ended
                _tell(console.print, names[news.index], news.ended, len(ends), len(experiments))
    return [ends[index] for index in range(len(experiments))]


class _Several:
    """On a terminal, a line for all runs with a bar and the time left, and one for each run that goes on."""

    def __init__(self, names: Sequence[str], rounds: int, console: Console) -> None:
        self._names = names
        self._shares = [0.0] * len(names)
        self._ended = 0
        self._lines: dict[int, rich.progress.TaskID] = {}
        self._bar = rich.progress.Progress(
            TextColumn("{task.fields[line]}"),
            BarColumn(20),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._all = self._bar.add_task("", total=rounds, line=self._count)

    def __enter__(self) -> Self:
        stages.clear()
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    @property
    def _count(self) -> str:
        return f"{self._ended}/{len(self._names)} runs"

    def show(self, news: News) -> None:
        """Show what happened to a run."""
        index, progress = news.index, news.progress
        self._shares[index] = max(self._shares[index], float(news.round), progress.share if progress else 0.0)
        if news.ended is not None:
            self._ended += 1
            if index in self._lines:
                self._bar.remove_task(self._lines.pop(index))
        elif progress:
            if index not in self._lines:
                self._lines[index] = self._bar.add_task("", line="")
            line, rounds = f"{self._names[index]}:  {line_of(progress)}", progress.rounds
            self._bar.update(self._lines[index], line=line, completed=progress.share, total=rounds)
        self._bar.update(self._all, completed=sum(self._shares), line=self._count)


def run_names_of(experiments: Sequence[Experiment]) -> list[str]:
    """For each experiment the name that its run has in tables and reports, and its seed."""
    planned = [_planned(one) for one in experiments]
    return [f"{label}, seed {run.seed}" for label, run in zip(labels(planned), planned, strict=True)]


def _planned(experiment: Experiment) -> Planned:
    return Planned(experiment.tree())


def _tell(say: Callable[..., None], name: str, ended: Ended, count: int, of: int) -> None:
    what = "finished" if ended.problem is None else f"not finished: {ended.problem}"
    say(f"{count} of {of}: {name}: {what}", highlight=False, markup=False, soft_wrap=True)


def _show(reading: Reading, ends: Sequence[Ended], view: View) -> bool:
    """Print the table, what was not on equal terms, what was left out, and what failed; whether nothing did."""
    stages.clear()
    failed = [end for end in ends if end.problem]
    if reading.runs:
        rows = compared(
            reading.runs,
            measure_of(view.measure),
            at="chosen" if view.chosen else "last",
            against=view.against,
            target=view.target,
        )
        _print_table(rows, reading.runs, view)
        if view.file:
            write_comparison(rows, metric_of(reading.runs), view.file)
            typer.echo(f"Table: {view.file}")
    for remark in reading.remarks:
        typer.echo(remark)
    for end, name in zip(ends, run_names_of([end.experiment for end in ends]), strict=True):
        if end.problem:
            place = f" ({end.folder})" if end.folder else ""
            typer.echo(f"Not finished: {name}{place}: {end.problem}")
    return not failed


def _print_table(rows: Sequence[ComparedRow], runs: Sequence[StoredRun], view: View) -> None:
    metric, console = metric_of(runs), console_on(sys.stdout)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    when = "at the round that is best on validation parts" if view.chosen else "after the last evaluated round"
    tables = [(f"{metric.label}, {when}", table_of(rows, metric))]
    if view.target is not None:
        goal = f"until {metric.label} {metric.text(view.target)}, {TITLES[measure_of(view.measure)]}"
        tables.append((goal, target_table_of(rows)))
    for title, table in tables:
        shown = Shown(title=title, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
        for number, column in enumerate(table.columns):
            shown.add_column(column, justify="right" if number else "left", overflow="fold")
        for block, rows_of_block in table.parts:
            if block:
                shown.add_section()
                shown.add_row(Text(block, style="italic"))
            for cells in rows_of_block:
                shown.add_row(*map(Text, cells))
        console.print(shown)
    console.print(caption(rows, measure_of(view.measure)), highlight=False, markup=False)
    for key, values in unequal(runs).items():
        console.print(f"Not the same for all: {key}: {_told(values)}", highlight=False, markup=False, soft_wrap=True)


def _told(values: Mapping[str, str]) -> str:
    """The values of a setting, each with the rows that have it."""
    parts = [f"{value} ({labels})" for value, labels in values_with_owners(values)]
    more = [f"and {len(parts) - _WIDEST} more"] if len(parts) > _WIDEST else []
    return "; ".join([*parts[:_WIDEST], *more])
