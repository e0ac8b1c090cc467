"""Executes an experiment in a folder: the run, with its configuration, manifest, log, status and lock."""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from potluck.core.ground.errors import PotluckError
from potluck.engine.disk.files import sync, write_atomically
from potluck.engine.disk.store import ClientStore
from potluck.engine.executors.choice import ChosenExecutor
from potluck.engine.numerics.allocator import keep_freed_memory
from potluck.experiment.federation.assemble import Assembly
from potluck.experiment.folder.folder import logging_to, note_status, open_folder, write_manifest
from potluck.experiment.results.result import Result
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.watching.observers import Observer
from potluck.experiment.watching.progress import ProgressFile
from potluck.locks import locked
from potluck.records import CONFIG, LOCK

if TYPE_CHECKING:
    from potluck.experiment.running.secure_sums import Adding

log = logging.getLogger(__name__)
_LOOK = 0.5  # seconds


@contextmanager
def holding(folder: Path, patience: float = _LOOK) -> Generator[None]:
    """Lock the run in this folder against other processes; the lock ends with the process, however it ends.

    Args:
        folder: of the run.
        patience: seconds to wait for a process that is about to end; `potluck watch` holds the lock for an instant.

    Raises:
        HeldError: another process runs it.
        StorageError: the folder cannot be written to.
    """
    otherwise = f"{folder}: another process is running in this folder; wait for it, or end it"
    with locked(folder / LOCK, patience, otherwise):
        yield


def prepare(
    experiment: Experiment,
    assembly: Assembly,
    folder: Path,
    choice: ChosenExecutor | None = None,
    store: ClientStore | None = None,
    adding: "Adding | None" = None,
) -> Run:
    """The run in this folder, at its start or its last checkpoint, with configuration and manifest written.

    A `choice` of executor and a `store` of clients' states take precedence over the configuration's. What carries out
    secure sums is by default this process.

    Raises:
        ConfigError: the federation lacks what the method needs.
        CheckpointError: the folder's checkpoint is damaged, or its data or configuration have changed; nothing is
            written.
        StorageError: the folder cannot be written to; its content is unchanged.
    """
    run = Run(
        experiment.method, assembly.federation, experiment.run, folder, choice, store, experiment.settings(), adding
    )
    run.load()  # a damaged checkpoint is refused before anything is written
    try:
        chosen = experiment.run.computing
        computing = {"threads": experiment.run.threads, **run.choice.facts, **asdict(chosen), **chosen.facts()}
        if run.releases_privately:
            computing["private_noise"] = "from the operating system: another run of this seed differs"
        write_manifest(folder, assembly, computing, experiment, run.rounds_done)
        config = experiment.toml().encode()
        if not (folder / CONFIG).is_file() or (folder / CONFIG).read_bytes() != config:
            write_atomically(folder / CONFIG, config)
        sync(folder, folder.resolve().parent)
    except BaseException:
        run.close()
        raise
    return run


def execute(run: Run, experiment: Experiment, folder: Path, *observers: Observer) -> tuple[Result, str | None]:
    """Run the remaining rounds; return the result and the statement of the privacy spent.

    The manifest records how the run ended; if it failed, manifest and log say why.
    """
    keep_freed_memory()
    try:
        with logging_to(folder):
            result = _logged(run, [ProgressFile(folder), *observers])
        privacy = run.privacy
        note_status(folder, "finished", privacy=privacy)
    except KeyboardInterrupt:
        note_end(folder, "interrupted")
        raise
    except BaseException as error:
        note_end(folder, "failed", reason=_reason(error))
        raise
    finally:
        run.close()
    return result, privacy


def note_end(folder: Path, status: str, **facts: str) -> None:
    """Record that a run ended early, if the folder can be written; the error itself is reported elsewhere."""
    with suppress(PotluckError):
        if open_folder(folder).get("status") != "finished":
            note_status(folder, status, **facts)


def _logged(run: Run, observers: Sequence[Observer]) -> Result:
    try:
        return run.run(*observers)
    except KeyboardInterrupt:
        log.warning("interrupted after round %d", run.rounds_done)
        raise
    except PotluckError as error:
        log.error("the run failed after round %d: %s", run.rounds_done, error)
        raise
    except BaseException:
        log.exception("the run failed after round %d", run.rounds_done)
        raise


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, PotluckError) else f"{type(error).__name__}: {text}"
