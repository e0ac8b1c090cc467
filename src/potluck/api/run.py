"""`potluck.run` and `potluck.resume`: one run from Python, with the keys, presets and refusals of the command line."""

import inspect
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from potluck.analysis.read import read_run
from potluck.api.given import Given, explaining, given
from potluck.api.progress import progress as display
from potluck.api.result import RunResult, of_stored
from potluck.core.federation import Federation
from potluck.core.ground.errors import ConfigError, PotluckWarning, StorageError
from potluck.core.method import Method
from potluck.data.dataset import Dataset
from potluck.experiment.federation.assemble import Assembly, assemble
from potluck.experiment.folder.folder import started
from potluck.experiment.results.evaluate import Evaluation
from potluck.experiment.running.again import ENDING, branching, check_free, resuming
from potluck.experiment.running.execute import execute, holding, prepare
from potluck.experiment.running.run import Run
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.settings.tables import override
from potluck.experiment.watching.observers import Observer
from potluck.records import ClientRecord, RoundRecord

if TYPE_CHECKING:
    import pandas as pd

Model = str | Mapping[str, Any] | Callable[..., nn.Module]
"""A model's name, a table of its name and options, or a class or function that builds a network."""

Watching = Observer | Callable[[RoundRecord], object]
"""An observer, or a function that is called with each round's record."""


@explaining
def run(
    method: str | Path | Method[Any] | type[Method[Any]] | None = None,
    *,
    dataset: "str | Path | Dataset | Mapping[str, Any] | pd.DataFrame | Sequence[pd.DataFrame] | None" = None,
    columns: Mapping[str, Any] | None = None,
    clients: int | None = None,
    models: Model | Sequence[Model] | None = None,
    partition: str | Mapping[str, Any] | None = None,
    capacities: Sequence[float] | None = None,
    public: str | Path | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    federation: Federation | None = None,
    to: str | Path | None = None,
    observers: Watching | Iterable[Watching] = (),
    progress: bool | None = None,
) -> RunResult:
    """Run a federation, as `potluck run` does.

        result = potluck.run("fedprox", clients=4, models=["cnn2", "cnn3"], rounds=3, settings={"method.mu": 0.1})
        result.records, result.clients, result.model(0)

    Args:
        method: a method's name or Python file, a `Method` with its hyper-parameters, or a TOML file of an experiment.
            None for the demonstration.
        dataset: a name or a path, as `federation.dataset`; a `Dataset`, such as of
            `potluck.data.datasets.from_torch`; arrays by name: x_train, y_train, x_test, y_test; or a DataFrame, or
            two, for training and for tests.
        columns: what the columns of a table are: the keys of `federation.columns`.
        clients: the number of clients.
        models: dealt to the clients, in turn by default: names, tables with a name and options, or classes and
            functions that build a network. They are called with those of `num_classes`, `input_shape` and `scale` that
            they take.
        partition: a scheme and its parameters.
        capacities: shares of the full model that clients can train, assigned in turn.
        public: public examples: "none", "holdout" or a data set.
        rounds: the number of rounds.
        seed: the seed of every draw.
        settings: all other keys by their dotted names, as on the command line: `{"method.training.lr": 0.1}`.
        federation: clients with data and models of your own, in place of all keys `federation.*`.
        to: a folder in which the run's folder is made, exactly as `potluck run --to` does, so that the command line can
            resume it, report on it and compare it. None keeps everything in memory.
        observers: told how it goes; of functions, each is called with every round's record.
        progress: whether to show how it goes; by default in notebooks and terminals.

    Raises:
        ConfigError: a key or a value is wrong, or the federation lacks what the method needs.
        DataError: the data are missing, or labels do not suit the task.
        StorageError: the folder cannot be written to.
        PotluckError: the run failed, as a run of the command line does.
    """
    keywords = {
        "dataset": dataset,
        "columns": columns,
        "clients": clients,
        "models": models,
        "partition": partition,
        "capacities": capacities,
        "public": public,
        "rounds": rounds,
        "seed": seed,
    }
    wanted = given(method, keywords, settings)
    watching = _observers(observers, progress)
    if federation is not None:
        return _run_federation(wanted, federation, to, watching)
    if to is not None:
        _check_writable(wanted)
    with wanted.naming():
        experiment = experiment_for(wanted.target, wanted.values)
        if to is None:
            return _in_memory(experiment, assemble(experiment), watching)
        return _in_folder(experiment, Path(to), watching)


@explaining
def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    settings: Mapping[str, Any] | None = None,
    branch: bool = False,
    observers: Watching | Iterable[Watching] = (),
    progress: bool | None = None,
) -> RunResult:
    """Go on with the run in a folder, as `potluck run --resume` does: to the same bytes as without the interruption.

        result = potluck.resume("runs/fedin-digits-seed0", rounds=50)

    Args:
        folder: of a run that the command line, or `potluck.run` with `to`, has started. A finished run goes on if it
            gets more rounds.
        rounds: the number of rounds in all. None for the run's own.
        settings: other keys by their dotted names; of a run that is resumed only those that change no finished round,
            which are `run.workers`, `run.memory_gib` and `run.track`.
        branch: whether to leave this run as it is, and to continue from its last round in a new folder beside it, with
            any settings of the method and the run.
        observers: as of `potluck.run`.
        progress: as of `potluck.run`.

    Raises:
        ConfigError: a key or a value is wrong, or may not change.
        CheckpointError: the folder is not a run, or is damaged, or its data, configuration or code have changed.
        StorageError: the folder cannot be written to.
        PotluckError: the run failed.
    """
    values = given(None, {"rounds": rounds}, settings).values
    watching = _observers(observers, progress)
    place = Path(folder)
    if branch:
        with branching(place, values) as (experiment, place):
            assembly = assemble(experiment)
    else:
        check_free(
            f"potluck.resume({str(folder)!r})", values, "with branch=True a new run continues from it with another"
        )
        with resuming(place, values) as (experiment, notes):
            assembly = assemble(experiment)
        _say(notes)
    return _carried_on(experiment, assembly, place, watching)


def _in_folder(experiment: Experiment, parent: Path, observers: Sequence[Observer]) -> RunResult:
    """Run in a new folder, as `potluck run` does."""
    stored = resolve(tomllib.loads(experiment.toml()), "configuration")
    if stored.settings() != experiment.settings():
        raise ConfigError("to: these settings cannot be written to a config.toml; run without a folder")
    assembly = assemble(experiment)
    with started(parent, experiment) as folder:
        return _carried_on(experiment, assembly, folder, observers)


def _carried_on(experiment: Experiment, assembly: Assembly, folder: Path, observers: Sequence[Observer]) -> RunResult:
    """Run the rounds that are left of the run in this folder."""
    try:
        with holding(folder, ENDING):
            run = prepare(experiment, assembly, folder)
            _say(run.notes)
            result, _ = execute(run, experiment, folder, *observers)
    except StorageError as error:
        onward = f"go on with potluck.resume({str(folder)!r})"
        raise StorageError(f"{error}; finished rounds are kept: fix this and {onward}") from error
    return of_stored(read_run(folder), lambda: result.evaluation, lambda: run.trained(assembly.classes))


def _in_memory(experiment: Experiment, assembly: Assembly, observers: Sequence[Observer]) -> RunResult:
    """Run without a folder."""
    federation = assembly.federation
    run = Run(experiment.method, federation, experiment.run, settings=experiment.settings())
    seen = _Scores()
    result = run.run(seen, *observers)
    _say(run.notes)
    return RunResult(
        method=Path(experiment.method_name).stem,
        dataset=Path(experiment.federation.dataset).stem,
        seed=experiment.run.seed,
        metric=federation.task.primary,
        rounds=tuple(result.rounds),
        scores=tuple(seen.scores),
        privacy=run.privacy,
        _evaluate=lambda: result.evaluation,
        _train=lambda: run.trained(assembly.classes),
    )


def _run_federation(
    wanted: Given, federation: Federation, to: str | Path | None, observers: Sequence[Observer]
) -> RunResult:
    """Run a federation that was built in Python."""
    also = [key for key in wanted.values if key.startswith("federation.")]
    if also:
        raise ConfigError(f"{also[0]}: the federation that is given has its own; leave it out, or give no federation")
    if to is not None:
        raise ConfigError(
            "to: a run's folder holds a config.toml, which cannot describe a federation that was built in Python;"
            " run without a folder, or store its data in files and name them"
        )
    with wanted.naming():
        if wanted.target is not None and wanted.target.endswith(".toml"):
            raise ConfigError(f"{wanted.target}: found a federation too; name a method, since this file has its own")
        tree = {"method": {"name": wanted.target or "fedin"}}
        experiment = resolve(override(tree, wanted.values), "arguments")
        named = replace(experiment, federation=replace(experiment.federation, dataset="own data"))
        return _in_memory(named, Assembly(federation, "", ""), observers)


def _check_writable(wanted: Given) -> None:
    """Check that a configuration file can hold everything.

    Raises:
        ConfigError: it cannot.
    """
    if wanted.unwritable:
        raise ConfigError(
            f"to: a run's folder holds a config.toml, which cannot name {', '.join(wanted.unwritable)} of this program;"
            " put methods and models into a Python file and data into an .npz or .csv file, and name those"
            " ('nets.py:small'), or run without a folder"
        )


class _Scores(Observer):
    """Keeps every client's scores."""

    def __init__(self) -> None:
        self.scores: list[ClientRecord] = []

    def on_evaluation_end(self, event: Evaluation) -> None:
        self.scores += event.scores


def _observers(given: Watching | Iterable[Watching], show: bool | None) -> list[Observer]:
    """The observers, of which a display is the last.

    Raises:
        ConfigError: one is none.
    """
    listed = [given] if isinstance(given, Observer) or callable(given) else list(given)
    found: list[Observer] = []
    for one in listed:
        if not isinstance(one, Observer) and (isinstance(one, type) or not callable(one)):
            name = f"the class {one.__name__}; make one: {one.__name__}()" if isinstance(one, type) else repr(one)
            raise ConfigError(f"observers: found {name}; expected an Observer, or a function of a round's record")
        found.append(one if isinstance(one, Observer) else Observer.of(on_round_end=one))
    shown = display() if show is None or show else None
    return [*found, shown] if shown else found


def _say(notes: Iterable[str]) -> None:
    """Warn, as from the caller's own line."""
    level, frame = 1, inspect.currentframe()
    while frame and Path(frame.f_code.co_filename).parent == Path(__file__).parent:
        level, frame = level + 1, frame.f_back
    for note in notes:
        warnings.warn(note, PotluckWarning, stacklevel=level)
