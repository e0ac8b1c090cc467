"""What a recipe's file holds: the paper, its experiments, and the numbers that it prints.

    title = "ResNets of five depths on four data sets"
    seeds = 3                                     # of the paper
    deviations = ["What we know to differ from the paper's experiment, a sentence each."]

    [paper]
    title = "FedIN: Federated Intermediate Layers Learning for Model Heterogeneity"
    place = "Table 1"
    version = "revision"
    url = "https://openreview.net/forum?id=Nh3pX3AnPt"

    [measured]
    by = "common"                                 # which measure of a run is compared with the paper's number
    words = "How the paper measures: which models, on which data, in which round."

    [analysis]                                    # of a figure, which `potluck analyse` draws at the end
    clients = 15

    [curves]                                      # of curves, which `potluck report` draws at the end
    smooth = 10

    [experiment.federation]                       # what all experiments have in common
    clients = 100

    [settings.cifar10-iid]                        # what those of some columns have in common
    images = 50_000
    federation = { dataset = "cifar10", partition = "iid" }

    [[columns]]
    group = "CIFAR-10"
    title = "IID"
    setting = "cifar10-iid"

    [[columns]]
    group = "CIFAR-10"
    title = "rounds to 60 %"
    setting = "cifar10"
    rounds_to = 60

    [[rows]]
    name = "FedAvg"
    paper = ["76.8", "109"]                       # as printed, by column; "" where the paper has none
    method = { name = "fedavg" }

A row's tables are laid over its setting's, and these over those of all experiments.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property
from typing import Annotated, Any

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import Checked, above, at_least, require
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.settings.strict import typed
from potluck.experiment.settings.tables import Tree, merged
from potluck.methods import get_method
from potluck.records import TITLES_OF_A_CLIENT, Measure

_PRINTED = re.compile(r"(\d+(?:\.\d+)?)(?:\s*±\s*(\d+(?:\.\d+)?))?")
_Table = dict[str, Any]


@dataclass(frozen=True)
class Printed:
    """A number as a paper prints it.

    Attributes:
        text: as printed, such as "89.2 ± 1.1".
        value: in the column's unit: percent, rounds, or millions.
        spread: what stands behind ±; None if nothing does.
    """

    text: str
    value: float
    spread: float | None


@dataclass(frozen=True)
class Paper(Checked):
    """Where the numbers come from.

    Attributes:
        title: of the paper.
        place: the table or figure.
        url: where the paper can be read.
        version: which text of the paper, if there are several; "" if there is one.
        short: what the paper is called in lists; "" for its title up to a colon.
    """

    title: str
    place: str
    url: str
    version: str = ""
    short: str = ""

    @property
    def edition(self) -> str:
        """Its version as it follows the title, in brackets after a space; "" if it has one text."""
        return f" ({self.version})" if self.version else ""


@dataclass(frozen=True)
class Measured(Checked):
    """How the numbers are measured.

    Attributes:
        by: the measure of our runs that is compared with the paper's numbers, in the last evaluated round.
        words: how the paper measures: which models, on which data, in which round; and what it leaves open.
        spread: what the paper's ± is; "" if there is none.
    """

    by: Measure
    words: str
    spread: str = ""


@dataclass(frozen=True)
class Setting(Checked):
    """What the experiments of some columns have in common.

    Attributes:
        images: how many training examples the data set has.
        federation: settings of the federation; `run` and `method` likewise.
        missing: why Potluck cannot run it; None if it can.
    """

    images: Annotated[int, at_least(1)]
    federation: _Table = field(default_factory=dict[str, Any])
    run: _Table = field(default_factory=dict[str, Any])
    method: _Table = field(default_factory=dict[str, Any])
    missing: str | None = None


@dataclass(frozen=True)
class Column(Checked):
    """A column of the paper's table.

    Attributes:
        title: of the column.
        setting: name of the setting whose runs it shows.
        group: what several columns have in common, such as the data set; each group is a table of its own.
        rounds_to: the score in percent whose first round the column shows; None for a column of scores in percent.
        millions: whether it shows instead how many million numbers a client sends in a round, mean over clients.
        parts_cut: with `millions`, as some papers count: each part of a message is cut to two decimals, and then they
            are added.
        states: whether it shows instead the MiB of what a row's `holds` names, of one client of each architecture.
    """

    title: str
    setting: str
    group: str = ""
    rounds_to: Annotated[float, above(0)] | None = None
    millions: bool = False
    parts_cut: bool = False
    states: bool = False

    def __post_init__(self) -> None:
        require(self.millions or not self.parts_cut, "parts_cut", "false without millions", self.parts_cut)

    @property
    def full_title(self) -> str:
        """Group and title."""
        return f"{self.group}, {self.title}" if self.group else self.title


@dataclass(frozen=True)
class Row(Checked):
    """A row of the paper's table: a method with its settings, and the numbers that the paper prints.

    Attributes:
        name: as the paper calls it.
        paper: the numbers as printed, by column; "" where the paper has none.
        method: the method's name and hyper-parameters; None if the row cannot be run.
        federation: settings of the federation; `run` likewise.
        missing: why Potluck cannot run it; None if it can.
        note: what is particular to it here, such as hyper-parameters that the paper does not state.
        scales: dotted keys of whole numbers, or lists of them, that a scaled run reduces too, such as the examples of a
            distillation or the rounds before one.
        settings: the settings in which it is run; None for all.
        by: the measure of its runs that is compared, where it is not that of the table.
        holds: for a column of `states`, what a client holds: "model" for the parameters of a model of its architecture,
            in whole MiB, as often as it holds one, or the name of a part of its message.
    """

    name: str
    paper: tuple[str, ...]
    method: _Table | None = None
    federation: _Table = field(default_factory=dict[str, Any])
    run: _Table = field(default_factory=dict[str, Any])
    missing: str | None = None
    note: str | None = None
    scales: tuple[str, ...] = ()
    settings: tuple[str, ...] | None = None
    by: Measure | None = None
    holds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.method is None) != (self.missing is not None):
            raise ConfigError(f"row {self.name}: expected either a method, or in `missing` why it cannot be run")
        require(self.method is None or "name" in self.method, "method", "a table with a name", self.method)


@dataclass(frozen=True)
class Drawing(Checked):
    """How a recipe's figures are drawn at its end: options of `potluck analyse`, by the recipe's measure.

    Attributes:
        clients: of how many at most the networks are compared, of each architecture in turn.
        examples: of the common test set at most, on which they are compared.
        map_class: the class whose examples alone the map of features shows, a number from 0; None for all.
    """

    clients: Annotated[int, at_least(2)] = 10
    examples: Annotated[int, at_least(8)] = 512
    map_class: Annotated[int, at_least(0)] | None = None


@dataclass(frozen=True)
class Curves(Checked):
    """How a recipe's scores are drawn over the rounds at its end: options of `potluck report`, by its measure.

    Attributes:
        smooth: a curve at each round is the mean of its latest so many values.
    """

    smooth: Annotated[int, at_least(1)] = 1


@dataclass(frozen=True)
class Recipe(Checked):
    """A table or figure of a paper, as experiments at the paper's full size.

    Attributes:
        name: of its file.
        path: of its file as it was given, of one that does not come with Potluck.
        title: what is compared.
        paper: the paper.
        measured: how it measures.
        settings: by name, what the experiments of some columns have in common.
        columns: of the table.
        rows: of the table.
        experiment: tables that all experiments have in common.
        seeds: how many the paper has; None if it does not say.
        deviations: what is known to differ from the paper's experiment, or not stated by it.
        figures: further figures or tables of the paper that show the same runs, such as "Figure 9 of the revision: the
            same curves"; without a version they are of the same text.
        scales: as a row's, for all rows.
        keep_clients: whether a scaled run keeps the number of clients, since the table compares numbers of them.
        analysis: how figures of its clients' models are drawn once its runs are finished; None of a table.
        curves: how its curves are drawn then; None if the paper draws none.
    """

    title: str
    paper: Paper
    measured: Measured
    settings: dict[str, Setting]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    experiment: _Table = field(default_factory=dict[str, Any])
    seeds: Annotated[int, at_least(1)] | None = None
    deviations: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    keep_clients: bool = False
    analysis: Drawing | None = None
    curves: Curves | None = None
    name: str = ""
    path: str = ""

    def __post_init__(self) -> None:
        if self.analysis is not None:
            good = f"one of {', '.join(TITLES_OF_A_CLIENT)}, since [analysis] is of clients"
            require(self.measured.by in TITLES_OF_A_CLIENT, "measured.by", good, self.measured.by)
        for column in self.columns:
            known = column.setting in self.settings
            require(known, "columns.setting", f"one of {', '.join(self.settings)}", column.setting)
        names = [row.name for row in self.rows]
        require(len(set(names)) == len(names), "rows.name", "different names", names)
        titles = [column.full_title for column in self.columns]
        require(len(set(titles)) == len(titles), "columns.title", "different titles", titles)
        for row in self.rows:
            count = f"{len(self.columns)} numbers, one for each column"
            require(len(row.paper) == len(self.columns), f"rows.paper of {row.name}", count, len(row.paper))
            for text in row.paper:
                good = not text or _PRINTED.fullmatch(text) is not None
                require(good, f"rows.paper of {row.name}", 'numbers such as "89.2 ± 1.1", or ""', text)
            for setting in row.settings or ():
                known = setting in self.settings
                require(known, f"rows.settings of {row.name}", f"some of {', '.join(self.settings)}", setting)

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods in it, in order."""
        return tuple(dict.fromkeys(row.method["name"] for row in self.rows if row.method is not None))

    @cached_property
    def datasets(self) -> tuple[str, ...]:
        """Names of the data sets that its runs need, public ones too, in order."""
        trees = [self.tree(row, setting)["federation"] for row, setting in self.cells()]
        names = [name for tree in trees for name in (tree["dataset"], tree.get("public", "none"))]
        return tuple(dict.fromkeys(name for name in names if name not in ("none", "holdout")))

    def printed(self, row: Row, column: Column) -> Printed | None:
        """The paper's number; None if it has none there."""
        found = _PRINTED.fullmatch(text := row.paper[self.columns.index(column)])
        if found is None:
            return None
        return Printed(text, float(found[1]), float(found[2]) if found[2] else None)

    def by(self, row: Row) -> Measure:
        """The measure of a row's runs that is compared."""
        return row.by or self.measured.by

    def why_missing(self, row: Row, setting: str) -> str | None:
        """Why a row cannot be run in a setting; None if it can."""
        if row.settings is not None and setting not in row.settings:
            return "the paper has no such row there"
        return row.missing or self.settings[setting].missing

    def cells(self) -> Iterator[tuple[Row, str]]:
        """What can be run: each row with the name of each setting that a column shows, setting by setting."""
        for setting in dict.fromkeys(column.setting for column in self.columns):
            yield from ((row, setting) for row in self.rows if self.why_missing(row, setting) is None)

    def tree(self, row: Row, setting: str) -> Tree:
        """The tables of an experiment at full size."""
        common = self.settings[setting]
        shared: Tree = {"federation": common.federation, "run": common.run, "method": common.method}
        own: Tree = {"federation": row.federation, "run": row.run, "method": row.method or {}}
        return merged(merged(self.experiment, shared), own)

    def kinds(self, setting: str) -> int:
        """The largest number of architectures or capacities in any row that can be run in a setting."""
        trees = [self.tree(row, setting) for row, of in self.cells() if of == setting]
        return max(max(_kinds(tree)) for tree in trees)

    def full_size(self, row: Row, setting: str) -> Experiment:
        """The experiment of a row in a setting, as the paper has it.

        Raises:
            ConfigError: a key or a value in the recipe is not allowed.
        """
        return resolve(self.tree(row, setting), f"recipe {self.name}, {row.name}, {setting}")

    def part(self, rows: str = "*", columns: str = "*") -> "Recipe":
        """The recipe with those rows and columns alone that shell-style patterns select, whatever their case.

        Args:
            rows: pattern of rows' names.
            columns: pattern of columns' titles, with or without their group.

        Raises:
            ConfigError: a pattern selects nothing.
        """
        chosen = [row for row in self.rows if _selects(rows, row.name)]
        if not chosen:
            raise ConfigError(f"{self.name} has no row {rows!r}; its rows: {', '.join(row.name for row in self.rows)}")
        shown = [index for index, one in enumerate(self.columns) if _selects(columns, one.title, one.full_title)]
        if not shown:
            titles = "; ".join(column.full_title for column in self.columns)
            raise ConfigError(f"{self.name} has no column {columns!r}; its columns: {titles}")
        return replace(
            self,
            columns=tuple(self.columns[index] for index in shown),
            rows=tuple(replace(row, paper=tuple(row.paper[index] for index in shown)) for row in chosen),
        )


def _kinds(tree: Tree) -> tuple[int, int]:
    """How many architectures and capacities the clients have."""
    federation, method = tree["federation"], get_method(tree["method"]["name"])
    capacities = federation.get("capacities") or method.default_capacities
    return len(federation.get("models") or ("default",)), len(capacities)


def _selects(pattern: str, *names: str) -> bool:
    return any(fnmatch(name.lower(), pattern.lower()) for name in names)


def read_recipe(tree: Mapping[str, Any], name: str, source: str, path: str = "") -> Recipe:
    """The recipe in the tables of a file, which has a path if it does not come with Potluck.

    Raises:
        ConfigError: something in it is unknown, of the wrong type, or contradictory.
    """
    return replace(typed(Recipe, dict(tree), "recipe", source), name=name, path=path)
