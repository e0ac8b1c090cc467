"""A run's folder: its name, its configuration, and a manifest of what it ran on."""

import json
import logging
import shutil
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import CheckpointError, StorageError
from potluck.core.needs import Offer
from potluck.core.requests.examples import Examples
from potluck.core.tasks.task import Task
from potluck.engine.disk.files import make_folder, sync, write_atomically
from potluck.experiment.federation.assemble import Assembly
from potluck.experiment.federation.needs import cautions, needs_of
from potluck.experiment.folder.code import keep_code
from potluck.experiment.folder.provenance import EARLIER, earlier, provenance_now, users_commit
from potluck.experiment.settings.schema import Experiment
from potluck.records import (
    LOG,
    MANIFEST,
    PARTITION,
    SCHEMA_VERSION,
    PartitionRecord,
    check_is_run,
    check_schema,
)
from potluck.seals import read_sealed


def new_folder(parent: Path, experiment: Experiment) -> Path:
    """Make a new folder for a run, named by date, method, data set, seed and hash of the configuration.

    Raises:
        StorageError: the parent cannot be written to.
    """
    dataset = Path(experiment.federation.dataset).stem
    method = Path(experiment.method_name).stem
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    base = f"{stamp}-{method}-{dataset}-s{experiment.run.seed}-{experiment.experiment_id}"
    for attempt in range(1, 1000):
        folder = parent / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            make_folder(folder, new=True)
        except FileExistsError:
            continue
        return folder
    raise CheckpointError(f"{parent / base}: a thousand runs have this name")


@contextmanager
def started(parent: Path, experiment: Experiment) -> Generator[Path]:
    """A new folder for a run, which goes on inside the block; removed if the run was refused before it began.

    Raises:
        StorageError: the parent cannot be written to.
    """
    parent_is_new = not parent.exists()
    folder = new_folder(parent, experiment)
    try:
        yield folder
    finally:
        if not (folder / MANIFEST).exists():
            shutil.rmtree(folder, ignore_errors=True)
            if parent_is_new:
                with suppress(OSError):
                    parent.rmdir()


def open_folder(folder: Path) -> dict[str, Any]:
    """The manifest of an existing run.

    Raises:
        CheckpointError: the folder is not a run.
    """
    check_is_run(folder)
    manifest = _manifest(folder)
    try:
        check_schema(folder / MANIFEST, manifest)
    except KeyError as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: it has no {error}") from error
    return manifest


def write_manifest(
    folder: Path, assembly: Assembly, computing: Mapping[str, Any], experiment: Experiment, rounds_done: int
) -> None:
    """Write the manifest: data, code, machine, times, and what the models' builders have frozen.

    Also copies the user's code, and writes how the classes are divided among clients. Of a run that is resumed with
    other code, packages or machine, it keeps what the finished rounds stood on.

    Args:
        folder: of the run.
        assembly: the federation, whose data's checksums are recorded.
        computing: executor, threads and so on.
        experiment: the experiment.
        rounds_done: how many rounds are finished.

    Raises:
        CheckpointError: the run was started on other data, another partition or other files of initial weights; or its
            manifest is damaged.
        StorageError: the folder cannot be written to.
    """
    before = _manifest(folder) if (folder / MANIFEST).is_file() else {}
    found = check_data(folder, before, assembly)
    start = {} if "started" in before else _start(folder, experiment)
    now = provenance_now(computing)
    try:
        past = earlier(before, now, rounds_done)
    except (KeyError, TypeError) as error:
        place = folder / MANIFEST
        raise CheckpointError(f"{place} is damaged: of `{EARLIER}`, a table or its last_round is missing") from error
    before = {name: fact for name, fact in before.items() if name not in ("ended", EARLIER)}
    members, task = assembly.federation.roster.values(), assembly.federation.task
    manifest = {
        "schema_version": SCHEMA_VERSION,
        **start,
        **before,
        **found,
        "status": "running",
        **now,
        **({EARLIER: past} if past else {}),
        "task": {"name": task.name, "metrics": [metric.facts() for metric in task.metrics]},
        **_cautions(assembly, experiment),
        **({"client_names": list(assembly.names)} if assembly.names else {}),
        "frozen": {member.architecture: sorted(member.frozen) for member in members if member.frozen},
    }
    if partition := _partition(assembly):
        write_atomically(folder / PARTITION, json.dumps(asdict(partition)).encode())
    _write(folder, manifest)


def _cautions(assembly: Assembly, experiment: Experiment) -> dict[str, list[str]]:
    """What the readers of a report should know of clients that the method does nothing for, or that lie, if any."""
    found = cautions(needs_of(experiment.method), experiment.method_name, Offer.of(assembly.federation))
    if (attackers := experiment.run.attackers) is not None:
        found = [*found, attackers.told(sorted(assembly.federation.sites), experiment.run.seed)]
    return {"cautions": found} if found else {}


def _partition(assembly: Assembly) -> PartitionRecord | None:
    """How the classes are divided among clients; None without labels, and for clients on other machines."""
    task, classes = assembly.federation.task, len(assembly.classes)
    everybody = len(assembly.federation.looked_at) == len(assembly.federation.sites)
    if not task.has_labels or not classes or not assembly.here or not everybody:
        return None
    sites = [site for _, site in sorted(assembly.federation.sites.items())]
    return PartitionRecord([_class_counts(site.train, task, classes) for site in sites])


def _class_counts(examples: Examples, task: Task, classes: int) -> list[int]:
    targets = examples.targets if examples.rows is None else examples.targets[examples.rows]
    return torch.bincount(task.labels(targets), minlength=classes).tolist()


def check_data(folder: Path, manifest: Mapping[str, Any], assembly: Assembly) -> dict[str, Any]:
    """Check that data, their division and initial weights are those of a run's start; return the facts about them.

    Raises:
        CheckpointError: they are not.
    """
    found = {
        "data_checksum": assembly.data_checksum,
        "partition_fingerprint": assembly.partition_fingerprint,
        "classes": list(assembly.classes),
    }
    for name, value in found.items():
        if manifest.get(name, value) != value:
            raise CheckpointError(
                f"{folder}: {name} was {manifest[name]} and now is {value}; the data or their division has"
                " changed since the run was started, so it cannot be resumed"
            )
    for file, known in (manifest.get("initial_weights") or {}).items():
        if (now := assembly.initial_weights.get(file, known)) != known:
            raise CheckpointError(
                f"{folder}: {file}, a file of initial weights, had the digest {known} and now has {now}; it has changed"
                " since the run was started: put it back, or start another run"
            )
    return {**found, **({"initial_weights": dict(assembly.initial_weights)} if assembly.initial_weights else {})}


def seed_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the first facts of a run's manifest; `write_manifest` adds the rest.

    Raises:
        StorageError: the folder cannot be written to.
    """
    _write(folder, {"schema_version": SCHEMA_VERSION, "status": "new", **facts})


def _start(folder: Path, experiment: Experiment) -> dict[str, Any]:
    """How and with which code a run was started; recorded once."""
    code = keep_code(folder, experiment)
    facts = {"command": sys.argv, "started": _now(), "started_in": str(Path.cwd()), "code": code}
    return {**facts, **users_commit([Path(file["path"]) for file in code])}


def note_status(folder: Path, status: str, **facts: Any) -> None:
    """Record the run's status and the time.

    Raises:
        StorageError: the folder cannot be written to.
    """
    _write(folder, {**_manifest(folder), "status": status, "ended": _now(), **facts})


def _manifest(folder: Path) -> dict[str, Any]:
    place = folder / MANIFEST
    try:
        manifest = json.loads(place.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{place} is damaged: {error}") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{place} is damaged: found {type(manifest).__name__}, expected a table")
    return manifest


def _write(folder: Path, manifest: Mapping[str, Any]) -> None:
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    sync(folder)


def run_digest(folder: Path) -> dict[str, str]:
    """Digests of a run's results, which contain no times: its records up to its last checkpoint, and of that.

    Raises:
        CheckpointError: the folder is not a run, holds no finished round, or is damaged.
    """
    open_folder(folder)
    run = read_sealed(folder)
    if run.checkpoint is None:
        raise CheckpointError(f"{folder} has no finished round yet")
    return {**{name: digest(content) for name, content in run.records.items()}, "checkpoint": run.checkpoint.digest}


class _LogFile(logging.FileHandler):
    """A log handler that stops quietly when the disk is full; writing the records reports that."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing."""


@contextmanager
def logging_to(folder: Path) -> Generator[None]:
    """Write Potluck's log to the run's log file inside the block.

    Raises:
        StorageError: the file cannot be opened.
    """
    try:
        handler = _LogFile(folder / LOG)
    except OSError as error:
        raise StorageError(f"cannot write {folder / LOG}: {error.strerror}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("potluck")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # the terminal shows the progress bar
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        with suppress(OSError):
            handler.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
