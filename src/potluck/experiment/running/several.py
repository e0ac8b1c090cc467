"""Several runs: those that are finished are kept, and the others are run, each in a process of its own.

A run is found by its configuration, so that a sweep which was killed goes on where it was, and runs that were made one
by one count too. Several sweeps share a folder: each run is claimed by the process that works on it, and the others
take what is left or wait.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
import tomllib
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import CheckpointError, PotluckError, PotluckWarning, StorageError
from potluck.experiment.federation.assemble import Assembly, assemble
from potluck.experiment.folder.code import as_started
from potluck.experiment.folder.folder import open_folder, started
from potluck.experiment.running.execute import execute, holding, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.settings.tables import Tree, read_toml
from potluck.experiment.watching.progress import Standing
from potluck.locks import HeldError, is_locked, locked
from potluck.records import CHECKPOINT, CONFIG, LAST, LOCK, MANIFEST, Checkpoint, Progress, experiment_hash
from potluck.seals import read_sealed

_PATIENCE = 10.0  # seconds that a process may take to end in order
# By the process that the runs' processes are copies of: what a run imports when it gets there. Torch's optimisers, for
# one, import its compiler.
_IMPORTED = [__name__, "potluck.models", "potluck.parts", "sklearn.datasets", "torch._dynamo"]
_LOOK = 0.5  # seconds between two looks at what other processes work on
_CLAIMS = ".claims"
_EVERY = 1.0  # seconds between two tellings of how a run stands


@dataclass(frozen=True)
class Ended:
    """What became of one run.

    Attributes:
        experiment: what was to be run.
        folder: of the run; None if it never began.
        problem: why it is not finished; None if it is.
    """

    experiment: Experiment
    folder: Path | None
    problem: str | None = None


@dataclass(frozen=True)
class News:
    """Something that happened to a run while several go on.

    Attributes:
        index: of the run, in the order in which they were given.
        round: the last finished round.
        ended: what became of it; None while it goes on.
        waits: whether another process works on it, whose end is waited for.
        progress: how it stands; None before it begins.
    """

    index: int
    round: int = 0
    ended: Ended | None = None
    waits: bool = False
    progress: Progress | None = None


def found(parent: Path, experiments: Sequence[Experiment]) -> list[Path | None]:
    """For each experiment the folder in `parent` of its run, finished or not; None if it has to be started.

    A run belongs to an experiment if configuration, seed, number of rounds, the user's code and the files of initial
    weights are the same. Of several the one that has come furthest counts; one that is damaged does not, which a
    warning says.
    """
    keys = [_key(experiment) for experiment in experiments]
    wanted = set(keys)
    runs: dict[tuple[Any, ...], tuple[int, Path]] = {}
    for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
        if (key := _key_of_run(folder)) not in wanted:
            continue
        try:
            done = _intact_rounds(folder)
        except CheckpointError as error:
            warnings.warn(f"Left out and run again: {error}", PotluckWarning, stacklevel=2)
            continue
        if key not in runs or done >= runs[key][0]:
            runs[key] = done, folder
    return [runs[key][1] if key in runs else None for key in keys]


def _key_of_run(folder: Path) -> tuple[Any, ...] | None:
    """What tells the run in a folder from others; None if there is no run, or none that can be read."""
    try:
        config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        manifest = json.loads((folder / MANIFEST).read_bytes())
        code = frozenset((file["file"], file["digest"]) for file in manifest.get("code") or () if not file["imported"])
        weights = frozenset((manifest.get("initial_weights") or {}).items())
        return experiment_hash(config), config["run"]["seed"], config["run"]["rounds"], code | weights
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _intact_rounds(folder: Path) -> int:
    """How many rounds the run in a folder has finished.

    Raises:
        CheckpointError: its configuration or records are damaged.
    """
    checkpoint = read_sealed(folder).checkpoint
    return checkpoint.round if checkpoint else 0


def _key(experiment: Experiment) -> tuple[Any, ...]:
    files = [(name, Path(name)) for name in experiment.files]
    code = frozenset((name, digest(path.read_bytes())) for name, path in files if path.is_file())
    weights = frozenset(experiment.initial_weights().items())
    return experiment.experiment_id, experiment.run.seed, experiment.run.rounds, code | weights


def rounds_done(folder: Path) -> int:
    """How many rounds the run in a folder has finished."""
    last = Checkpoint.read(folder / CHECKPOINT / LAST)
    return last.round if last else 0


def run_several(experiments: Sequence[Experiment], parent: Path, processes: int) -> Iterator[News]:
    """Run what is missing in `parent`, `processes` runs at a time; the news of each run, the last one with its end.

    A run that fails, or whose process is killed, ends alone. What another process works on is waited for, and taken if
    that process ends without having finished it.

    Raises:
        StorageError: the folder cannot be made.
    """
    try:
        (parent / _CLAIMS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {parent}: {error.strerror}") from error
    for experiment in experiments:
        experiment.run.computing.make_ready()  # or all of their processes would be refused
    cells = [
        _Cell(index, experiment, _Work(experiment.run.rounds, folder, _claim(parent, experiment)))
        for index, (experiment, folder) in enumerate(zip(experiments, found(parent, experiments), strict=True))
    ]
    over = [cell for cell in cells if cell.work.is_over]
    yield from (cell.over for cell in over)
    with _ended() as running:
        left, waiting = [cell for cell in cells if cell not in over], list[_Cell]()
        while left or running or waiting:
            while left and len(running) < processes:
                cell = left.pop(0)
                if cell.work.is_over:  # since the first look
                    yield cell.over
                elif cell.work.is_held:
                    waiting.append(cell)
                    yield News(cell.index, waits=True)
                else:
                    running.append(_Running.start(cell, parent, alone=processes == 1))
            ready = wait([one.news for one in running], _LOOK if waiting else None) if running or waiting else []
            for one in [one for one in running if one.news in ready]:
                news = one.hear()
                if news.waits:
                    waiting.append(one.cell)
                if news.waits or news.ended is not None:
                    running.remove(one)
                yield news
            free = [cell for cell in waiting if not cell.work.is_held]
            waiting = [cell for cell in waiting if cell not in free]
            left = [*free, *left]


@dataclass(frozen=True)
class _Work:
    """What is done of a run, and by whom; also told to other processes.

    Attributes:
        rounds: how many are wanted.
        found: the run's folder when it was looked for; None if there was none.
        claim: the file whose lock is held by the process that works on the run, wherever that was started; it holds the
            name of the run's folder.
    """

    rounds: int
    found: Path | None
    claim: Path

    @property
    def folder(self) -> Path | None:
        """The run to go on with: the one that was found, or the one that another process has noted if it is as far."""
        noted = _noted(self.claim)
        known = [folder for folder in (self.found, noted) if folder is not None]
        return max(known, key=lambda folder: (rounds_done(folder), folder == noted), default=None)

    @property
    def is_over(self) -> bool:
        """Whether all rounds are finished."""
        folder = self.folder
        return folder is not None and rounds_done(folder) >= self.rounds

    @property
    def is_held(self) -> bool:
        """Whether another process works on it, as part of a sweep or alone."""
        folder = self.folder
        return bool(is_locked(self.claim) or (folder and is_locked(folder / LOCK)))


@dataclass(frozen=True, eq=False)
class _Cell:
    """A run that is wanted.

    Attributes:
        index: in the order in which they were given.
        experiment: what is to be run.
        work: what is done of it.
    """

    index: int
    experiment: Experiment
    work: _Work

    @property
    def over(self) -> News:
        """That all its rounds are finished."""
        return News(self.index, self.work.rounds, Ended(self.experiment, self.work.folder))


def _claim(parent: Path, experiment: Experiment) -> Path:
    """The file by which processes agree on who works on an experiment."""
    name, seed, rounds, code = _key(experiment)
    return parent / _CLAIMS / digest(repr((name, seed, rounds, sorted(code))).encode())


def _noted(claim: Path) -> Path | None:
    """The folder of the run that was last started under a claim; None if there is none, or it is damaged."""
    try:
        folder = claim.parents[1] / claim.read_text(encoding="utf-8")
        open_folder(folder)
        _intact_rounds(folder)
    except (OSError, ValueError, CheckpointError):
        return None
    return folder


class _Running:
    """A run in a process of its own."""

    def __init__(self, cell: _Cell, process: BaseProcess, news: Connection) -> None:
        self.cell = cell
        self.process = process
        self.news = news
        self.round = 0
        self.folder: Path | None = None
        self.progress: Progress | None = None

    @classmethod
    def start(cls, cell: _Cell, parent: Path, *, alone: bool) -> "_Running":
        """Start the process; those beside others keep to one process each."""
        experiment = cell.experiment
        if not alone and experiment.run.workers is None:
            experiment = replace(experiment, run=replace(experiment.run, workers=1))
        news, told = multiprocessing.Pipe(duplex=False)
        process = _new_processes().Process(
            target=_run, args=(experiment.tree(), cell.work, parent, dict(os.environ), told)
        )
        with _without_main():
            process.start()
        told.close()  # so that the end of the process is the end of the pipe
        return cls(cell, process, news)

    def hear(self) -> News:
        """What the process says; if it ended without a word, how."""
        try:
            kind, value = self.news.recv()
        except (EOFError, OSError):
            self.process.join()
            return self._end(f"its process ended with {_ended_with(self.process.exitcode)}")
        if kind == "folder":
            self.folder = value
        elif kind == "round":
            self.round = value
        elif kind == "progress":
            self.progress = value
        elif kind == "held":
            self.process.join()
            self.news.close()
            return News(self.cell.index, waits=True)
        else:
            self.process.join()
            return self._end(value)
        return News(self.cell.index, self.round, progress=self.progress)

    def _end(self, problem: str | None) -> News:
        self.news.close()
        return News(self.cell.index, self.round, Ended(self.cell.experiment, self.folder, problem))


def _new_processes() -> ForkServerContext | SpawnContext:
    """Makes processes that share nothing with this one.

    Where the system can fork, they begin as copies of a process that has imported what runs need and done nothing else:
    importing takes longer than a short run.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


@contextmanager
def _without_main() -> Generator[None]:
    """Inside the block, a process that starts does not run the caller's script again, of which it needs nothing."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


@contextmanager
def _ended() -> Generator[list[_Running]]:
    """The processes that run; whatever happens, none is left behind, and each can note how far it came."""
    running: list[_Running] = []
    try:
        yield running
    finally:
        for one in running:
            one.process.terminate()
        for one in running:
            one.process.join(_PATIENCE)
            if one.process.is_alive():
                one.process.kill()


def _ended_with(code: int | None) -> str:
    if code is not None and code < 0:
        advice = "; perhaps there was not enough memory, try fewer processes" if code == -signal.SIGKILL else ""
        return f"signal {signal.Signals(-code).name}{advice}"
    return f"exit code {code}"


def _run(tree: Tree, work: _Work, parent: Path, environment: dict[str, str], pipe: Connection) -> None:
    """One run from its start or its last checkpoint, in this process, which is a copy of one that may be older."""
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's goes to all; the sweep's own process ends the others
    signal.signal(signal.SIGTERM, _interrupt)
    tell = partial(_tell, pipe)
    try:
        with locked(work.claim, _LOOK, "another process works on it"):
            tell("end", _problem_of(tree, work, parent, tell))
    except HeldError:
        tell("held", None)
    except StorageError as error:
        tell("end", str(error))
    except KeyboardInterrupt:  # the sweep was ended; the folder says how far the run came
        os._exit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _tell(pipe: Connection, kind: str, value: Any) -> None:
    """Say something to the sweep's process; if that has gone, end in order."""
    try:
        pipe.send((kind, value))
    except OSError:
        raise KeyboardInterrupt from None


def _problem_of(tree: Tree, work: _Work, parent: Path, tell: Callable[[str, Any], None]) -> str | None:
    """Why the run could not be finished; None if it was.

    Raises:
        HeldError: another process, which has no claim, works on it.
    """
    try:
        if (folder := work.folder) is None:
            _start(resolve(tree), work.claim, parent, tell)
        elif work.is_over:  # since this process was started
            tell("folder", folder)
        else:
            _resume(folder, tree, tell)
    except HeldError:
        raise
    except PotluckError as error:
        return " ".join(str(error).split())
    except Exception as error:  # in the user's own code, whatever it is; the run's log has the trace
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def _start(experiment: Experiment, claim: Path, parent: Path, tell: Callable[[str, Any], None]) -> None:
    assembly = assemble(experiment)
    with started(parent, experiment) as folder:
        claim.write_text(folder.name, encoding="utf-8")
        tell("folder", folder)
        _execute(experiment, assembly, folder, tell)


def _resume(folder: Path, tree: Tree, tell: Callable[[str, Any], None]) -> None:
    tell("folder", folder)
    tell("round", rounds_done(folder))
    with as_started(folder, open_folder(folder)):
        stored = read_toml(folder.resolve() / CONFIG)
        experiment = resolve({**stored, "run": tree["run"]}, str(folder / CONFIG))
        assembly = assemble(experiment)
    _execute(experiment, assembly, folder, tell)


def _execute(experiment: Experiment, assembly: Assembly, folder: Path, tell: Callable[[str, Any], None]) -> None:
    with holding(folder):
        run = prepare(experiment, assembly, folder)
        execute(run, experiment, folder, _Telling(tell))


class _Telling(Standing):
    """Tells the sweep's process of every round, and in between how the run stands, at most once a second."""

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._tell = tell
        self._told = -_EVERY

    def show(self, progress: Progress, *, round_ended: bool = False) -> None:
        """Tell it."""
        now = time.monotonic()
        if round_ended:
            self._tell("round", progress.round)
        if round_ended or now - self._told >= _EVERY:
            self._told = now
            self._tell("progress", progress)
