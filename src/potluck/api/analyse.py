"""The analysis of runs: what their records tell, and what the models do that they have trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from potluck.analysis.findings import Findings, find
from potluck.analysis.findings_page import write_findings
from potluck.analysis.findings_tables import tables_of
from potluck.analysis.inside import Inside
from potluck.analysis.names import labels, run_names
from potluck.analysis.read import find_runs, read_runs
from potluck.api.inside import NoSuchClass, Sampling, look_inside
from potluck.core.ground.errors import PotluckError
from potluck.experiment.folder.trained import models_in
from potluck.records import TITLES_OF_A_CLIENT, Measure

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Analysis:
    """What was found of some runs.

    Attributes:
        findings: everything, as plain data.
    """

    findings: Findings

    @property
    def sentences(self) -> list[str]:
        """Who profits and who loses, one sentence for each experiment."""
        return self.findings.sentences

    @cached_property
    def frames(self) -> "dict[str, pd.DataFrame]":
        """All numbers by the name of the table, as in the files that `write` writes.

        `gains`, `clients`, `groups`, `architectures`, `classes` and `client_classes`: what experiments and these of
        them gain over training alone. `fairness`, `costs` and `speed`: of experiments. `similarity`: of pairs of
        stages. `map` and `separation`: of features in two dimensions, and of their groups. `drift`: of layers.
        `calibration` and `bins`: of predictions. Of runs that have kept rounds `similarity_by_round`,
        `separation_by_round` and `drift_by_round`. A table without rows is not there.
        """
        import pandas as pd

        return {name: pd.DataFrame(rows) for name, rows in tables_of(self.findings).items()}

    def write(self, to: str | Path) -> Path:
        """Write `analysis.html` into a folder, and beside it in `analysis/` all tables and figures.

        Returns:
            The path of the page.
        """
        return write_findings(self.findings, Path(to))

    def __str__(self) -> str:
        return "\n".join([*self.sentences, *self.findings.remarks])


@dataclass(frozen=True)
class Scope:
    """What an analysis is about.

    Attributes:
        measure: on what the clients' models are scored: "personal", "common" or "validation".
        chosen: whether after the rounds that are best on validation parts instead of the last.
        alone: name of the experiment that stands for training alone; by default the one of the method `local`.
        target: a value of the metric to reach.
        clients: of how many at most the networks are compared, of each architecture in turn.
        examples: of the common test set at most, on which they are compared.
        bins: of confidence, for the calibration.
        by: a column of the runs' tables, by whose values test examples are divided into groups; None for none.
        map_class: the class whose examples alone the map of features shows, a number from 0; None for all.
    """

    measure: Measure = "personal"
    chosen: bool = False
    alone: str | None = None
    target: float | None = None
    clients: int = 10
    examples: int = 512
    bins: int = 15
    by: str | None = None
    map_class: int | None = None


def analysis_of(paths: Sequence[Path], scope: Scope, tell: Callable[[str], None] = lambda words: None) -> Analysis:
    """The analysis of the runs at these paths.

    Args:
        paths: runs, or folders of runs.
        scope: what it is about.
        tell: is called with what is being done.

    Raises:
        CheckpointError: there is no run to read, or all are damaged.
        ConfigError: a value is wrong, a class has no examples, or a column has too many different ones.
        DataError: data are no tables, or lack the column.
    """
    sampling = Sampling(
        scope.clients, scope.examples, common=scope.measure == "common", bins=scope.bins, map_class=scope.map_class
    )
    reading = read_runs(find_runs(paths))
    found = partial(
        find,
        reading.runs,
        measure=scope.measure,
        at="chosen" if scope.chosen else "last",
        alone=scope.alone,
        target=scope.target,
    )
    found()  # what is wrong with the words is said before any model is made
    inside, remarks = list[Inside](), list(reading.remarks)
    names, experiments = run_names(reading.runs), labels(reading.runs)
    for number, (run, name, experiment) in enumerate(zip(reading.runs, names, experiments, strict=True), 1):
        tell(f"{number} of {len(reading.runs)}: the models of {name}")
        try:
            models = models_in(run.folder)
            trained = models.trained(chosen=scope.chosen)
        except PotluckError as problem:
            remarks.append(f"{name}: nothing of its models: {problem}")
            continue
        groups = None if scope.by is None else models.groups(scope.by)
        empty = Inside(name, experiment, trained.round, run.client_names)
        try:
            drawn = experiment not in {one.experiment for one in inside if one.map}
            look = look_inside(trained, empty, sampling, kept=models.kept(), groups=groups, drawn=drawn)
            inside.append(look)
        except NoSuchClass:
            raise
        except PotluckError as problem:
            remarks.append(f"{name}: nothing of its models: {problem}")
    return Analysis(found(inside, remarks=remarks))


def inside_of(paths: Sequence[Path], measure: Measure, tell: Callable[[str], None] = lambda words: None) -> Findings:
    """What a report shows of the models of these runs too: on own test parts, where `measure` is of no single client.

    Raises:
        CheckpointError: there is no run to read, or all are damaged.
        ConfigError: several experiments stand for training alone.
    """
    return analysis_of(paths, Scope(measure if measure in TITLES_OF_A_CLIENT else "personal"), tell).findings
