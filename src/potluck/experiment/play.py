"""An experiment in a folder: the run, and around it configuration, manifest, log, status and a lock."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

from potluck.core.errors import CheckpointError
from potluck.engines.allocator import keep_freed_memory
from potluck.engines.executors.choice import Choice
from potluck.engines.stores import ClientStore
from potluck.experiment.assemble import Assembly
from potluck.experiment.config import Experiment
from potluck.experiment.folder import logging_to, note_status, write_manifest
from potluck.experiment.run import Result, Run, Watcher
from potluck.records import CONFIG, LOCK

try:
    import fcntl
except ImportError:  # a system without file locks
    fcntl = None


@contextmanager
def holding(folder: Path, patience: float = 0.0) -> Generator[None]:
    """Keep other processes from playing the run in this folder; the lock goes with the process, however it ends.

    Args:
        folder: of the run.
        patience: seconds to wait for a process that is about to end.

    Raises:
        CheckpointError: another process plays it.
    """
    deadline = time.monotonic() + patience
    with (folder / LOCK).open("a") as file:
        while not _locked(file):
            if time.monotonic() >= deadline:
                raise CheckpointError(f"{folder}: another process plays this run; wait for it, or end it")
            time.sleep(0.2)
        yield


def _locked(file: IO[str]) -> bool:
    """Whether the file is now locked by us."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def prepare(
    experiment: Experiment,
    assembly: Assembly,
    folder: Path,
    choice: Choice | None = None,
    store: ClientStore | None = None,
) -> Run:
    """The run in this folder, from its start or its last checkpoint, with configuration and manifest written.

    A `choice` of executor and a `store` of what clients keep go before the configuration's.

    Raises:
        ConfigError: the federation does not offer what the method needs.
        CheckpointError: the folder's checkpoint is damaged, or its data have changed; nothing is written.
    """
    run = Run(experiment.method, assembly.federation, experiment.run, folder, choice, store)
    run.load()  # a damaged checkpoint is refused before anything is written
    computing = {"threads": experiment.run.threads, **run.choice.facts, **asdict(experiment.run.computing)}
    if experiment.method.releases_privately:
        computing["private_noise"] = "from the operating system: another run of this seed differs"
    write_manifest(folder, assembly, computing)
    (folder / CONFIG).write_text(experiment.toml())
    return run


def play(
    run: Run, experiment: Experiment, folder: Path, watch: Watcher = lambda record: None
) -> tuple[Result, str | None]:
    """Play the rounds that are left; what they gave, and what the run says of the privacy it spent.

    However it ends, the folder's manifest says so.
    """
    keep_freed_memory()
    try:
        with logging_to(folder):
            result = run.play(watch)
    except KeyboardInterrupt:
        note_status(folder, "interrupted")
        raise
    except BaseException:
        note_status(folder, "failed")
        raise
    privacy = experiment.method.privacy_statement(run.releases)
    note_status(folder, "finished", privacy=privacy)
    return result, privacy
