"""`potluck run`: start, resume or branch a run, show its progress, and end it in order on a signal."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import typer

from potluck.cli import stages
from potluck.cli.display import Display, print_result
from potluck.core.ground.errors import ConfigError, StorageError
from potluck.experiment.federation.assemble import Assembly, assemble
from potluck.experiment.folder.folder import started
from potluck.experiment.running.again import ENDING, branching, check_free, resuming
from potluck.experiment.running.execute import execute, holding, note_end, prepare
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.watching.trackers.names import check_installed


def start_run(target: str | None, assignments: Sequence[str], parent: Path) -> None:
    """Start a run; its folder is made only after the configuration and the data were accepted."""
    experiment = experiment_for(target, assignments)
    assembly = _assembled(experiment)
    with started(parent, experiment) as folder:
        _execute(folder, experiment, assembly)


def resume_run(folder: Path, target: str | None, assignments: Sequence[str]) -> None:
    """Resume a run from its last checkpoint; only settings that change no bit of finished rounds may differ.

    Raises:
        ConfigError: another setting was given.
        CheckpointError: the folder is not a run, or is damaged, or its data, configuration or code have changed.
    """
    check_free(
        f"--resume {folder}",
        [*filter(None, [target]), *assignments],
        "with --branch a new run continues from this one with another",
    )
    with resuming(folder, assignments) as (experiment, notes):
        assembly = _assembled(experiment)
    _say(notes)
    _execute(folder, experiment, assembly)


def branch_run(folder: Path, target: str | None, assignments: Sequence[str]) -> None:
    """Start a run from another's last checkpoint, in a folder beside it.

    Raises:
        ConfigError: a target was given, or the federation or the method would change.
        CheckpointError: the folder is not a run, or is damaged.
    """
    if target is not None:
        raise ConfigError(f"--branch: found {target}; a branch keeps its run's method; expected dotted keys")
    with branching(folder, assignments) as (experiment, place):
        assembly = _assembled(experiment)
    _execute(place, experiment, assembly)


def _assembled(experiment: Experiment) -> Assembly:
    check_installed(experiment.run.track)
    stages.show_stages(f"reading {experiment.federation.dataset}")
    return assemble(experiment)


def _execute(folder: Path, experiment: Experiment, assembly: Assembly) -> None:
    onward = f"resume with: potluck run --resume {folder}"
    try:
        with holding(folder, ENDING), _ending_in_order(folder, onward):
            stages.show_stages("trying the models on their data")
            run = prepare(experiment, assembly, folder)
            stages.clear()
            _say(run.notes)
            with Display() as display:
                result, privacy = execute(run, experiment, folder, display)
    except StorageError as error:
        raise StorageError(f"{error}; finished rounds are kept: fix this and {onward}") from error
    print_result(folder, experiment, result, privacy)


def _say(notes: Sequence[str]) -> None:
    stages.clear()
    for note in notes:
        with suppress(OSError):  # the terminal may be gone
            typer.echo(f"potluck: {note}", err=True)


_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals that people, shells and schedulers send, and that by default end a process."""


class _Signalled(KeyboardInterrupt):
    """A signal ended the run."""

    def __init__(self, number: int) -> None:
        self.number = number


def _end_at_once(number: int, onward: str) -> None:
    """Exit at once, and kill workers that do not react."""
    for worker in multiprocessing.active_children():
        worker.kill()
    with suppress(OSError):
        cursor = "\x1b[?25h" if os.isatty(2) else ""  # show it again, since the progress bar hides it
        os.write(2, f"{cursor}potluck: interrupted; {onward}\n".encode())
    os._exit(128 + number)


@contextmanager
def _ending_in_order(folder: Path, onward: str) -> Generator[None]:
    """Have a signal end the run with one line and a status in its folder; a second one ends it at once.

    Raises:
        typer.Exit: a signal was received; with 128 plus its number, as in shells.
    """
    ours, told = os.getpid(), 0

    def tell(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if os.getpid() != ours:  # a worker, which its parent ends
            return
        again, told = told, number
        note_end(folder, "interrupted")  # first, since the rest may take a while
        if again:
            _end_at_once(number, onward)
        raise _Signalled(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    numbers = [number for name in _ENDING if (number := getattr(signal, name, None))]
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # ignored under nohup, say
    before = {number: signal.signal(number, tell) for number in heard}
    try:
        yield
    except KeyboardInterrupt as interrupt:
        number = interrupt.number if isinstance(interrupt, _Signalled) else signal.SIGINT
        _say([f"interrupted; {onward}"])
        raise typer.Exit(128 + number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
