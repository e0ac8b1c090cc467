"""`potluck.compare` and `potluck.report`: runs side by side, from Python."""

import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from potluck.analysis.blocks import check_reference
from potluck.analysis.compare import ComparedRow, unequal
from potluck.analysis.compare import compare as compared
from potluck.analysis.export import (
    caption,
    comma_separated,
    markdown,
    table_of,
    target_table_of,
    write_comparison,
)
from potluck.analysis.names import Planned
from potluck.analysis.read import Reading, StoredRun, find_runs, read_runs
from potluck.analysis.report import Target, write_report
from potluck.analysis.tables import metric_of
from potluck.api.analyse import inside_of
from potluck.api.given import explaining, given
from potluck.api.result import RunResult, folders_of
from potluck.core.ground.errors import ConfigError
from potluck.engine.executors.workers import cores
from potluck.experiment.running.several import Ended, run_several
from potluck.experiment.settings.presets import experiment_on, seeded
from potluck.experiment.settings.schema import Experiment
from potluck.records import Measure, Metric

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Comparison:
    """Experiments side by side, each over its seeds.

    Attributes:
        rows: one for each experiment.
        runs: the runs that were compared.
        failed: what could not be finished, and why.
        remarks: which runs are left out since they are damaged, and which could not be checked.
    """

    rows: Sequence[ComparedRow]
    runs: Sequence[StoredRun]
    failed: Sequence[Ended]
    remarks: Sequence[str] = ()
    _measure: Measure = "personal"

    @property
    def metric(self) -> Metric:
        """The primary metric of the task, which is compared."""
        return metric_of(self.runs)

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """One row for each experiment: means over seeds, half widths of 95 % confidence intervals, differences and p.

        Then its block, which holds the experiments that differ in nothing but the method, and every setting of its
        configuration under the dotted key. The columns are those of `potluck compare --table FILE.csv`.
        """
        import pandas as pd

        return pd.read_csv(io.StringIO(comma_separated(self.rows)))

    @cached_property
    def text(self) -> str:
        """The table in Markdown, with a caption, settings that differ, and what could not be finished."""
        if not self.rows:
            return "\n".join(self._problems())
        tables = [markdown(table_of(self.rows, self.metric))]
        if any(row.reached for row in self.rows):
            tables.append(markdown(target_table_of(self.rows)))
        differing = [
            f"Not the same for all: {key}: " + "; ".join(f"{value} ({label})" for label, value in values.items())
            for key, values in unequal(self.runs).items()
        ]
        words = caption(self.rows, self._measure)
        return "\n".join([*tables, words, *differing, *self._problems()])

    def save(self, path: str | Path) -> None:
        """Write the table as Markdown, CSV or LaTeX, as the file's name ends: .md, .csv or .tex.

        Raises:
            ConfigError: it ends otherwise.
        """
        write_comparison(self.rows, self.metric, Path(path))

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        tables = [table_of(self.rows, self.metric)] if self.rows else []
        if any(row.reached for row in self.rows):
            tables.append(target_table_of(self.rows))
        parts: list[str] = []
        for table in tables:
            lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in table.columns)]
            for block, rows in table.parts:
                lines += [f"<th colspan={len(table.columns)}>{html.escape(block)}</th>"] if block else []
                lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
            parts.append(f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>")
        words = [caption(self.rows, self._measure)] if self.rows else []
        return "".join([*parts, *(f"<div>{html.escape(line)}</div>" for line in [*words, *self._problems()])])

    def _problems(self) -> list[str]:
        """What is missing from the table, and why."""
        return [*self.remarks, *self._unfinished()]

    def _unfinished(self) -> list[str]:
        return [
            f"Not finished: {end.experiment.method_name}, seed {end.experiment.run.seed}: {end.problem}"
            for end in self.failed
        ]


@explaining
def compare(
    *what: str | Path | RunResult,
    seeds: int = 1,
    on: str | Path | None = None,
    to: str | Path = "runs",
    processes: int | None = None,
    measure: Measure = "personal",
    chosen: bool = False,
    against: str | None = None,
    target: float | None = None,
    dataset: str | Path | None = None,
    clients: int | None = None,
    models: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partition: str | Mapping[str, Any] | None = None,
    capacities: Sequence[float] | None = None,
    public: str | Path | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare methods over seeds, and run what is missing; or compare runs that are there: `potluck compare`.

        potluck.compare("local", "fedavg", "fedin", seeds=3, clients=10, rounds=20).frame

    Every run has a process of its own and a folder in `to`, so methods and models are named, by names or files.

    Args:
        what: methods by name or Python file, TOML files, runs, and folders of runs.
        seeds: how many seeds each method is run with, from `seed` on.
        on: a TOML file with the federation and the run of all methods.
        to: the folder of the runs; those that are there already are not repeated.
        processes: runs at a time; by default one for each core.
        measure: by which experiments are compared: "personal", "common", "global", "pooled" or "validation".
        chosen: whether the rounds that are best on validation parts are compared instead of the last.
        against: name of the row that the others of its block are compared with; by default the first.
        target: a value of the metric to reach, such as 0.6.
        dataset: this and the following as in `potluck.run`, for all methods.
        clients: see there.
        models: see there, by name.
        partition: see there.
        capacities: see there.
        public: see there.
        rounds: see there.
        seed: see there.
        settings: see there.

    Raises:
        ConfigError: a key or a value is wrong, or there is nothing to compare.
        CheckpointError: a folder is not a run, or all runs are damaged.
    """
    _check_measure(measure)
    for one in what:
        if not isinstance(one, str | Path | RunResult):
            raise ConfigError(
                f"compare: found {one!r}; every run has a process of its own, so name a method, such as 'fedavg', a"
                " file or a run; hyper-parameters are settings, such as settings={'method.training.lr': 0.1}"
            )
    keywords = {
        "dataset": dataset,
        "clients": clients,
        "models": models,
        "partition": partition,
        "capacities": capacities,
        "public": public,
        "rounds": rounds,
        "seed": seed,
    }
    wanted = given(None, keywords, settings)
    if wanted.unwritable:
        raise ConfigError(
            f"compare: found {wanted.unwritable[0]}, an object of this program; every run has a process of its own, so"
            " name a file, such as 'nets.py:small' or 'data.npz'"
        )
    stored = [one for one in what if isinstance(one, RunResult) or Path(one).is_dir()]
    targets = [str(one) for one in what if not isinstance(one, RunResult) and not Path(one).is_dir()]
    if not what:
        raise ConfigError("compare: name methods, TOML files or runs, such as potluck.compare('local', 'fedavg')")
    if not targets and (wanted.values or on):
        raise ConfigError(f"{next(iter(wanted.values), on)}: finished runs are compared as they are; name a method too")
    reading = read_runs(find_runs(folders_of(stored))) if stored else Reading(())
    experiments = [
        seeded(experiment_on(one, wanted.values, None if on is None else Path(on)), number)
        for one in targets
        for number in range(_at_least_one("seeds", seeds))
    ]
    check_reference([*reading.runs, *(Planned(one.tree()) for one in experiments)], against)
    ends = _ends(experiments, Path(to), processes)
    finished = [end.folder for end in ends if not end.problem and end.folder]
    reading = reading.and_also(read_runs(finished)) if finished else reading
    runs = reading.runs
    rows = compared(runs, measure, at="chosen" if chosen else "last", against=against, target=target) if runs else []
    return Comparison(rows, runs, [end for end in ends if end.problem], reading.remarks, measure)


@explaining
def report(
    *runs: str | Path | RunResult,
    to: str | Path | None = None,
    target: float | None = None,
    measure: Measure = "personal",
    smooth: int = 1,
    inside: bool = False,
) -> Path:
    """Write the report of `potluck report` on these runs, or folders of runs; return its path.

    Args:
        runs: with a folder each.
        to: the folder to write to; by default that of a single run, and `report` for several.
        target: adds how many rounds each run took to reach this value of the metric, and a line there in the curves.
        measure: of what; its curves are drawn, and shown first.
        smooth: a run's curve at each round is the mean of its latest so many values, over a pale one as measured.
        inside: also what the models show, as `potluck analyse`, which takes as long.

    Raises:
        CheckpointError: there is no run to read, or one is damaged.
        ConfigError: a run has no folder, there is no such measure, a target for a share is no share, or `smooth` is not
            a whole number of at least 1.
    """
    _check_measure(measure)
    _at_least_one("smooth", smooth)
    folders = folders_of(runs)
    place = Path(to) if to is not None else folders[0] if len(folders) == 1 else Path("report")
    goal = None if target is None else Target(target, measure)
    findings = inside_of(folders, measure) if inside else None
    return write_report(folders, place, goal, measure=measure, smooth=smooth, findings=findings)


def _ends(experiments: Sequence[Experiment], parent: Path, processes: int | None) -> list[Ended]:
    """Run what is missing; what became of each run, in order."""
    if not experiments:
        return []
    ends = {news.index: news.ended for news in run_several(experiments, parent, processes or cores()) if news.ended}
    return [ends[index] for index in range(len(experiments))]


def _check_measure(measure: Any) -> None:
    if measure not in get_args(Measure):
        raise ConfigError(f"measure {measure!r}: expected one of {', '.join(get_args(Measure))}")


def _at_least_one(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: expected a whole number of at least 1, found {value!r}")
    return value
