"""A sweep: a run's configuration, and what is to vary in it.

    [run]
    rounds = 50

    [sweep]
    seeds = 3
    "method.name" = ["local", "fedavg", "fedin"]
    "method.training.lr" = [0.01, 0.1]

    [sweep.search]
    trials = 20
    "method.training.weight_decay" = { low = 1e-6, high = 1e-2, log = true }

Lists make a grid: every value with every other. `rows`, a list of tables of dotted keys, are values that go together.
What `search` names is tuned by Optuna at each point of the grid, on validation parts unless it names another measure.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import Checked, at_least
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.settings.strict import typed
from potluck.experiment.settings.tables import Tree, merged
from potluck.records import Measure

Point = Mapping[str, Any]
"""Values by dotted key."""


@dataclass(frozen=True)
class Search(Checked):
    """What Optuna tunes.

    Attributes:
        trials: how many settings are tried at each point of the grid.
        measure: whose predictions, and on what, say which setting is better, by the primary metric in the last
            evaluated round, mean over seeds.
        together: settings that are tried before the next ones are chosen; more of them can run at a time, and
            learn less from one another.
        space: by dotted key a list of values, or a table with `low`, `high` and `log`.
    """

    trials: Annotated[int, at_least(1)] = 20
    measure: Measure = "validation"
    together: Annotated[int, at_least(1)] = 4
    space: tuple[tuple[str, Any], ...] = ()

    @property
    def first(self) -> Point:
        """Some setting in the space."""
        return {key: values[0] if isinstance(values, list) else values["low"] for key, values in self.space}


@dataclass(frozen=True)
class Sweep:
    """What is to be run.

    Attributes:
        base: the configuration's tables.
        points: of the grid.
        seeds: each point is run with every seed.
        search: what is tuned at each point; None if nothing is.
        source: the file, for errors.
    """

    base: Tree
    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    search: Search | None
    source: str

    def experiments(self, point: Point) -> list[Experiment]:
        """The experiment at a point, once for each seed.

        Raises:
            ConfigError: a key or a value is not allowed.
        """
        where = ", ".join([self.source, *(f"{key}={value!r}" for key, value in point.items())])
        experiment = resolve(merged(self.base, nested(point)), where)
        return [replace(experiment, run=replace(experiment.run, seed=seed)) for seed in self.seeds]


def read_sweep(tree: Tree, source: str) -> Sweep:
    """The sweep in the tables of a file.

    Raises:
        ConfigError: there is nothing to vary, or a key is not allowed.
    """
    base = {key: value for key, value in tree.items() if key != "sweep"}
    table = tree.get("sweep")
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: it has no table [sweep]; list there what varies, such as seeds = 3")
    table = dict(table)
    seeds, rows = _seeds(table.pop("seeds", 1), source), _rows(table.pop("rows", [{}]), source)
    search = _search(table.pop("search"), source) if "search" in table else None
    axes = flat(table)
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{source}: sweep.{key}: expected a list of values, found {values!r}")
    grid = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    points = tuple({**row, **point} for row, point in product(rows, grid))
    sweep = Sweep(base, points, seeds, search, source)
    for point in points:
        sweep.experiments({**point, **(search.first if search else {})})  # refused before anything runs
    return sweep


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Values by dotted key; a table with `low` and `high` is a value."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        whole = not isinstance(value, dict) or {"low", "high"} <= value.keys()
        found |= {f"{above}{key}": value} if whole else flat(value, f"{above}{key}.")
    return found


def nested(point: Point) -> Tree:
    """Tables of tables from dotted keys."""
    tree: Tree = {}
    for key, value in point.items():
        *tables, last = key.split(".")
        place = tree
        for name in tables:
            place = place.setdefault(name, {})
        place[last] = value
    return tree


def _seeds(given: Any, source: str) -> tuple[int, ...]:
    seeds = tuple(range(given)) if isinstance(given, int) else tuple(given) if isinstance(given, list) else ()
    if not seeds or not all(isinstance(seed, int) and seed >= 0 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ConfigError(f"{source}: sweep.seeds: expected how many, or a list of different ones, found {given!r}")
    return seeds


def _rows(given: Any, source: str) -> list[Point]:
    if not isinstance(given, list) or not given or not all(isinstance(row, dict) for row in given):
        raise ConfigError(f"{source}: sweep.rows: expected a list of tables of dotted keys, found {given!r}")
    return [flat(row) for row in given]


def _search(given: Any, source: str) -> Search:
    if not isinstance(given, dict):
        raise ConfigError(f"{source}: sweep.search: expected a table, found {given!r}")
    own = {key: value for key, value in given.items() if key in ("trials", "measure", "together")}
    space = flat({key: value for key, value in given.items() if key not in own})
    if not space:
        raise ConfigError(f"{source}: sweep.search: it names nothing to tune; give a dotted key with low and high")
    for key, values in space.items():
        _check_range(key, values, source)
    return replace(typed(Search, own, "sweep.search", source), space=tuple(space.items()))


def _check_range(key: str, values: Any, source: str) -> None:
    if isinstance(values, list) and values:
        return
    table: dict[str, Any] = values if isinstance(values, dict) else {}
    low, high = table.get("low"), table.get("high")
    ordered = isinstance(low, (int, float)) and isinstance(high, (int, float)) and low < high
    positive = not table.get("log") or (isinstance(low, (int, float)) and low > 0)
    if not ordered or not positive or table.keys() - {"low", "high", "log"}:
        raise ConfigError(
            f"{source}: sweep.search.{key}: expected a list of values or {{low = 1e-4, high = 1e-1, log = true}}"
            f" with low below high, found {values!r}"
        )


class Tuner:
    """Optuna's study of one point of the grid: which settings to try next, given how the earlier ones did."""

    def __init__(self, search: Search, *, higher_is_better: bool, seed: int) -> None:
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=seed)
        self._search = search
        self._failed = optuna.trial.TrialState.FAIL
        self._study = optuna.create_study(direction="maximize" if higher_is_better else "minimize", sampler=sampler)

    def batches(self) -> Iterator[list[tuple[Any, Point]]]:
        """Some trials at a time, each with its settings; tell how they did before the next are taken."""
        left = self._search.trials
        while left:
            trials = [self._study.ask() for _ in range(min(left, self._search.together))]
            left -= len(trials)
            yield [(trial, {key: _drawn(trial, key, values) for key, values in self._search.space}) for trial in trials]

    def tell(self, trial: Any, score: float | None) -> None:
        """How a trial did; None if it could not be finished."""
        self._study.tell(trial, score) if score is not None else self._study.tell(trial, state=self._failed)


def _drawn(trial: Any, key: str, values: Any) -> Any:
    if isinstance(values, list):
        return values[trial.suggest_categorical(key, list(range(len(values))))]
    whole = isinstance(values["low"], int) and isinstance(values["high"], int)
    suggest = trial.suggest_int if whole else trial.suggest_float
    return suggest(key, values["low"], values["high"], log=values.get("log", False))


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise ConfigError("sweep.search needs Optuna; install it with: pip install 'potluck[sweep]'") from None
    return optuna
