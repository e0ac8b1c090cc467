"""`potluck twin`: how long federations take on devices, foreseen, or timed from what their runs have counted."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from potluck.analysis.courses import COLUMNS, WORDS, VirtualCourse, course_of, reached_at, virtual
from potluck.analysis.read import StoredRun, costs, find_runs, read_run
from potluck.core.federation import ClientId
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in
from potluck.engine.rounds.asynchrony.departures import Departures
from potluck.experiment.federation.suitability import federation_of
from potluck.experiment.running.aside import SetAside
from potluck.experiment.running.asynchrony import check_asynchronous
from potluck.experiment.running.foresee import Foreseen, foresee
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.resolve import named_devices
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.settings.strict import typed
from potluck.twin.devices import Fleet, Twin, TwinDevice, read_devices
from potluck.twin.simulate import Load, Summary, Timed, doubted, simulate, simulate_asynchronously, summed
from potluck.twin.timeline import Closing, Errand, Timeline

_TRIES = 20  # of a simulation whose devices are doubted
_HOUR = 3600.0  # seconds
_FILE_WIDTH = 160  # characters of a line without a terminal


@dataclass(frozen=True)
class Question:
    """What is asked of each federation.

    Attributes:
        devices: a CSV file of devices, instead of those in the configuration.
        hours: how long it goes on, instead of for the configuration's rounds.
        doubt: how wrong speeds may be, as the standard deviation of their logarithm.
        target: value of the primary metric, whose time a run's row shows.
    """

    devices: Path | None = None
    hours: float | None = None
    doubt: float = 0.0
    target: float | None = None


@dataclass(frozen=True)
class _Row:
    name: str
    course: VirtualCourse
    spread: tuple[float, float] | None = None
    reached: float | None = None


def print_twins(what: Sequence[str], question: Question) -> None:
    """Print one row for each federation and run.

    Args:
        what: TOML files, methods, runs and folders of runs; then dotted keys.
        question: what is asked.

    Raises:
        ConfigError: no devices are named, or a run was not made for them.
    """
    assignments = [word for word in what if "=" in word]
    named = [word for word in what if "=" not in word]
    folders = [Path(word) for word in named if Path(word).is_dir()]
    targets = [word for word in named if not Path(word).is_dir()]
    if not named:
        raise ConfigError("twin: name TOML files, methods or runs, such as `potluck twin fedavg --devices devices.csv`")
    rows = [_of_run(read_run(folder), question) for folder in (find_runs(folders) if folders else ())]
    rows += [_foreseen(target, assignments, question) for target in targets]
    _print(rows, question)


def _foreseen(target: str, assignments: Sequence[str], question: Question) -> _Row:
    experiment = experiment_for(target, assignments)
    devices = _devices(experiment.run.twin, question)
    federation = federation_of(experiment)
    if experiment.run.rounds_close.asynchronous:
        check_asynchronous(experiment.method, federation, experiment.run)
    known, ids = foresee(experiment, federation), sorted(federation.sites)
    found, each, spread = Summary(), list[float](), None
    for timed in _simulated(experiment, known, Fleet(devices, ids), question):  # of millions none is kept
        found.add(timed)
        each.append(timed.end - timed.start)
    if question.doubt:
        tries = [
            summed(_simulated(experiment, known, Fleet(doubted(devices, question.doubt, key), ids), question))
            for key in (fold_in(experiment.run.seed, "doubt", number) for number in range(_TRIES))
        ]
        seconds = sorted(_pace(one) for one in tries)
        spread = seconds[0], seconds[-1]
    return _Row(target, VirtualCourse(found, tuple(each)), spread)


def _simulated(experiment: Experiment, known: Foreseen, fleet: Fleet, question: Question) -> Iterator[Timed]:
    run = experiment.run
    if (rule := run.rounds_close.asynchronous) is None:
        aside = SetAside(run, len(known.like))
        rounds = aside.following(simulate(run.course(fleet), known.loads(experiment, aside.at), run.needed))
    else:
        ids = sorted(known.like)
        departures = Departures(rule, run.cohort_size(len(ids)))
        rounds = simulate_asynchronously(run.course(fleet), departures, known.load, partial(run.order, ids))
    return islice(rounds, run.rounds) if question.hours is None else _within(rounds, question.hours)


def _of_run(run: StoredRun, question: Question) -> _Row:
    """A finished run, by its own virtual clock or by one for the devices that are named."""
    rounds = course_of(run) if question.devices is None else timed_again(run, _devices(None, question))
    if not rounds:
        raise ConfigError(f"{run.folder}: it ran without a twin; name its devices: --devices FILE.csv")
    if question.hours is not None:
        rounds = list(_within(rounds, question.hours))
    reached = None if question.target is None else reached_at(run, rounds, question.target)
    return _Row(run.name, VirtualCourse.of(rounds), reached=reached)


def timed_again(run: StoredRun, devices: Sequence[TwinDevice]) -> list[Timed]:
    """The rounds of a run whose clients were all heard, as they would be on these devices.

    Raises:
        ConfigError: devices that come and go, since others would then have been heard; or nothing was counted.
    """
    if any(device.available != "always" for device in devices):
        raise ConfigError(
            f"{run.folder}: its clients were always there; on devices that come and go it must run again, with"
            " run.twin.devices"
        )
    loads: dict[int, dict[int, dict[ClientId, Errand]]] = {}
    server: dict[int, int] = {}
    for record in costs(run):
        exchanges = loads.setdefault(record.round, {})
        if record.client is None:
            server[record.round] = record.flops or 0
        elif record.flops is None and record.bytes_up:
            raise ConfigError(
                f"{run.folder}: client {record.client} does not say what it computed in round {record.round}; a node of"
                " an earlier version, or without PyTorch, does not, and its run cannot be timed"
            )
        else:
            sizes = record.bytes_down, record.bytes_up, record.memory or 0
            part = Errand(record.flops, *sizes, record.exchange)
            exchanges.setdefault(record.exchange, {})[record.client] = part
    if not loads:
        raise ConfigError(f"{run.folder}: it has no costs.jsonl; an earlier version ran it")
    work = [Load([by[place] for place in sorted(by)], server.get(number, 0)) for number, by in sorted(loads.items())]
    everybody = range(run.client_count)
    return list(simulate(Timeline(Fleet(devices, everybody), Closing()), work, lambda clients: clients))


def _devices(twin: Twin | None, question: Question) -> Sequence[TwinDevice]:
    if question.devices is not None:
        tables = named_devices(read_devices(question.devices))
        return [typed(TwinDevice, table, "device", str(question.devices)) for table in tables]
    if twin is None or not twin.devices:
        raise ConfigError("twin: found no devices; name a file of them, --devices FILE.csv, or set run.twin.devices")
    return twin.devices


def _within(rounds: Iterable[Timed], hours: float) -> Iterator[Timed]:
    return takewhile(lambda timed: timed.end <= hours * _HOUR, rounds)


def _pace(found: Summary) -> float:
    """Seconds of a mean round."""
    return found.seconds / found.rounds if found.rounds else math.inf


def _print(rows: Sequence[_Row], question: Question) -> None:
    table = Table(box=SIMPLE_HEAD, caption=WORDS)
    columns = ["", *COLUMNS]
    doubted_at_all = any(row.spread for row in rows)
    columns += ["mean round, doubted"] * doubted_at_all
    columns += ["" if question.target is None else f"until {question.target:g}"] * (question.target is not None)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for row in rows:
        cells = [row.name, *row.course.cells]
        if doubted_at_all:
            cells.append(" to ".join(map(virtual, row.spread)) if row.spread else "")
        if question.target is not None:
            cells.append("" if row.reached is None else virtual(row.reached))
        table.add_row(*cells)
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(table)
