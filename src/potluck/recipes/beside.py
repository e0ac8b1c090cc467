"""Our results beside a paper's numbers. A number of the paper is never shown as ours: what was not run has none."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from potluck.analysis.read import StoredRun, last, read_run
from potluck.analysis.tables import rounds_to, spread
from potluck.core.ground.errors import ConfigError
from potluck.data.datasets import describe
from potluck.experiment.running.several import Ended, found, rounds_done
from potluck.experiment.settings.presets import seeded
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.settings.tables import Assignments, override
from potluck.models import get_model
from potluck.recipes.contents import Column, Printed, Recipe, Row
from potluck.recipes.scaling import Size, changes, scaled, size_of
from potluck.records import Measure

NOTHING = "–"
_BYTES_PER_MILLION = 4 * 10**6


@dataclass(frozen=True)
class Planned:
    """One run of a recipe.

    Attributes:
        row: its row's name.
        setting: the name of its setting.
        seed: of its draws.
        experiment: what is run, scaled and with the user's changes.
        full: the size of the paper's experiment.
        size: the size of this one.
    """

    row: str
    setting: str
    seed: int
    experiment: Experiment
    full: Size
    size: Size

    @property
    def name(self) -> str:
        """Row, setting and seed."""
        return f"{self.row}, {self.setting}, seed {self.seed}"


@dataclass(frozen=True)
class Beside:
    """A cell of the table.

    Attributes:
        printed: the paper's number; None if it has none.
        ours: what we measured, in the column's unit; None if nothing was.
        gap: ours less the paper's, in the column's unit; None if either is missing, and for rounds of a scaled run.
        decimals: of the gap, as it is shown.
    """

    printed: Printed | None
    ours: str | None
    gap: float | None
    decimals: int = 1

    @property
    def texts(self) -> tuple[str, str, str]:
        """Ours, the paper's and the gap, as they are shown."""
        gap = "" if self.gap is None else f"{self.gap:+.{self.decimals}f}".replace("-", "−")
        return self.ours or NOTHING, self.printed.text if self.printed else NOTHING, gap or NOTHING


@dataclass(frozen=True)
class Reproduced:
    """A recipe's table with ours beside the paper's.

    Attributes:
        recipe: the recipe, or the part of it that is shown.
        scale: of the runs.
        seeds: how many were asked for.
        assignments: the user's changes, as text.
        options: those of the command that chose the part, as text.
        plan: all runs.
        runs: those that are finished, by row and setting.
        problems: by name of the run, why it is not finished, where it was tried.
    """

    recipe: Recipe
    scale: float
    seeds: int
    assignments: tuple[str, ...]
    options: tuple[str, ...]
    plan: tuple[Planned, ...]
    runs: Mapping[tuple[str, str], tuple[StoredRun, ...]]
    problems: Mapping[str, str]

    def cell(self, row: Row, column: Column) -> Beside:
        """Ours beside the paper's in one cell."""
        printed, runs = self.recipe.printed(row, column), self.runs.get((row.name, column.setting), ())
        if not runs:
            failed = any(one.name in self.problems for one in self._planned(row, column))
            return Beside(printed, "failed" if failed else None, None)
        if column.states:
            return self._states(printed, runs, row, column)
        if column.millions:
            return self._millions(printed, runs, cut=column.parts_cut)
        if column.rounds_to is None:
            return self._score(printed, runs, self.recipe.by(row))
        return self._rounds(printed, runs, column.rounds_to, self.recipe.by(row))

    def _planned(self, row: Row, column: Column) -> list[Planned]:
        return [one for one in self.plan if (one.row, one.setting) == (row.name, column.setting)]

    def _score(self, printed: Printed | None, runs: Sequence[StoredRun], by: Measure) -> Beside:
        records = [(record, run.metric.name) for run in runs if (record := last(run))]
        ours = spread(record.value(by, metric) for record, metric in records)
        if ours is None:
            return Beside(printed, "not measured", None)
        half = "" if ours.std is None else f" ± {100 * ours.std:.1f}"
        gap = None if printed is None else 100 * ours.mean - printed.value
        return Beside(printed, f"{100 * ours.mean:.1f}{half}{self._of_seeds(ours.count)}", gap)

    def _rounds(self, printed: Printed | None, runs: Sequence[StoredRun], target: float, by: Measure) -> Beside:
        reached = [rounds_to(run, target / 100, by) for run in runs]
        ours = spread(reached)
        if ours is None:
            return Beside(printed, f">{min(len(run.rounds) for run in runs)}", None)
        gap = None if printed is None or self.scale < 1 or ours.count < self.seeds else ours.mean - printed.value
        return Beside(printed, f"{ours.mean:.4g}{self._of_seeds(ours.count)}", gap)

    def _states(self, printed: Printed | None, runs: Sequence[StoredRun], row: Row, column: Column) -> Beside:
        if not row.holds:
            return Beside(printed, None, None)
        experiment = self.recipe.full_size(row, column.setting)
        ours = fmean(_held(experiment, run, row.holds) for run in runs)
        return Beside(printed, f"{ours:.1f}", None if printed is None else round(ours, 1) - printed.value)

    def _millions(self, printed: Printed | None, runs: Sequence[StoredRun], *, cut: bool) -> Beside:
        ours = fmean(_millions_in_parts(run) if cut else _millions_up(run) for run in runs)
        return Beside(printed, f"{ours:.2f}", None if printed is None else ours - printed.value, decimals=2)

    def _of_seeds(self, count: int) -> str:
        return "" if count == self.seeds else f" ({count} of {self.seeds} seeds)"

    @property
    def sizes(self) -> dict[tuple[str, tuple[str, ...]], list[str]]:
        """What scaling has made of the paper's experiments: by new size and changes, the settings they belong to."""
        met: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for one in self.plan:
            names = met.setdefault((one.size.words, tuple(changes(one.full, one.size))), [])
            if one.setting not in names:
                names.append(one.setting)
        return met

    @property
    def is_the_papers(self) -> bool:
        """Whether these are the paper's experiments, but for the known deviations."""
        return self.scale == 1 and not self.assignments


def _millions_up(run: StoredRun) -> float:
    """Million numbers of 32 bits that a client sends in a round, mean over its rounds."""
    sent = [record.bytes_up / len(record.replied) for record in run.rounds if record.replied]
    return fmean(sent) / _BYTES_PER_MILLION


def _millions_in_parts(run: StoredRun) -> float:
    """The same, each part of the messages cut to two decimals before they are added."""
    return sum(math.floor(round(100 * numbers / _BYTES_PER_MILLION, 6)) / 100 for numbers in _parts(run).values())


def _parts(run: StoredRun) -> dict[str, float]:
    """Bytes of each part of what a client sends in a round, mean over clients, in the last round."""
    record = run.rounds[-1]
    return {name: count / len(record.replied) for name, count in record.bytes_up_by_entry.items()}


def _held(experiment: Experiment, run: StoredRun, holds: Sequence[str]) -> float:
    """MiB of what one client of each architecture holds, the parameters of models in whole MiB."""
    shape = describe(experiment.federation.dataset).input_shape
    classes = describe(experiment.federation.dataset).num_classes
    nets = [get_model(spec.name)(classes, shape, **spec.options) for spec in experiment.models]
    models = sum(round(4 * sum(tensor.numel() for tensor in net.parameters()) / 2**20) for net in nets)
    sent = _parts(run)
    return sum(models if one == "model" else sent[one] / 2**20 for one in holds)


def plan(
    recipe: Recipe, scale: float, seeds: int, assignments: Assignments = (), part: Recipe | None = None
) -> tuple[Planned, ...]:
    """The runs of a recipe, setting by setting, one seed of all rows after the other.

    Args:
        recipe: the recipe, whole, since the size of scaled experiments depends on all of its rows.
        scale: above 0 and at most 1.
        seeds: how many, from 0 on, or from `run.seed` if that is assigned.
        assignments: the user's changes by dotted key, which count after scaling.
        part: the part of the recipe that is wanted; None for all of it.

    Raises:
        ConfigError: the scale or a change is not allowed; before anything runs.
    """
    made: list[tuple[Row, str, Experiment, Size, Size]] = []
    part = part or recipe
    kinds = {setting: recipe.kinds(setting) for _, setting in part.cells()}
    for row, setting in part.cells():
        full, images = recipe.full_size(row, setting), recipe.settings[setting].images
        try:
            further = (*recipe.scales, *row.scales)
            small = scaled(full, scale, images, kinds[setting], further, keep_clients=recipe.keep_clients)
        except ConfigError as error:
            raise ConfigError(f"{recipe.name}, {row.name}, {setting}: {error}") from error
        where = f"{recipe.name}, {row.name}, {setting}"
        experiment = resolve(override(small.tree(), assignments), where) if assignments else small
        same_data = experiment.federation.dataset == full.federation.dataset
        size = size_of(experiment, images if same_data else None)
        made.append((row, setting, experiment, size_of(full, images), size))
    return tuple(
        Planned(row.name, setting, one.run.seed, one, full, size)
        for wanted in kinds
        for number in range(seeds)
        for row, setting, experiment, full, size in made
        if setting == wanted
        for one in [seeded(experiment, number)]
    )


def finished(planned: Sequence[Planned], parent: Path) -> list[Ended | None]:
    """Of each run its end, if the folder of runs has it finished; else None."""
    folders = found(parent, [one.experiment for one in planned])
    return [
        Ended(one.experiment, folder)
        if folder is not None and rounds_done(folder) >= one.experiment.run.rounds
        else None
        for one, folder in zip(planned, folders, strict=True)
    ]


def beside(
    recipe: Recipe,
    planned: Sequence[Planned],
    ends: Sequence[Ended | None],
    *,
    scale: float,
    seeds: int,
    assignments: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Reproduced:
    """The table of what became of planned runs, in their order; None for a run that was not tried."""
    runs: dict[tuple[str, str], tuple[StoredRun, ...]] = {}
    problems: dict[str, str] = {}
    for one, end in zip(planned, ends, strict=True):
        if end is not None and end.problem is None and end.folder is not None:
            runs[one.row, one.setting] = (*runs.get((one.row, one.setting), ()), read_run(end.folder))
        elif end is not None:
            problems[one.name] = end.problem or "it never began"
    return Reproduced(recipe, scale, seeds, tuple(assignments), tuple(options), tuple(planned), runs, problems)
