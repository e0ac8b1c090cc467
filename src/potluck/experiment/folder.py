"""A run's folder: its name, its configuration, and a manifest of what it ran on."""

import importlib.metadata
import json
import logging
import platform
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from potluck.core.digest import digest
from potluck.core.errors import CheckpointError
from potluck.engines.stores import write_atomically
from potluck.experiment.assemble import Assembly
from potluck.experiment.config import Experiment
from potluck.records import (
    CHECKPOINT,
    CLIENTS,
    LAST,
    LOG,
    MANIFEST,
    ROUNDS,
    SCHEMA_VERSION,
    Checkpoint,
    check_is_run,
)

_PACKAGES = ("potluck", "torch", "numpy", "scikit-learn", "datasets", "safetensors")


def new_folder(parent: Path, experiment: Experiment) -> Path:
    """Make a folder of its own for a run: date, method, data set, seed, hash of the configuration."""
    dataset = Path(experiment.federation.dataset).stem
    method = Path(experiment.method_name).stem
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    base = f"{stamp}-{method}-{dataset}-s{experiment.run.seed}-{experiment.hash8}"
    for attempt in range(1, 1000):
        folder = parent / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise CheckpointError(f"{parent / base}: a thousand runs have this name")


def open_folder(folder: Path) -> dict[str, Any]:
    """The manifest of an existing run.

    Raises:
        CheckpointError: the folder is not a run.
    """
    check_is_run(folder)
    try:
        return json.loads((folder / MANIFEST).read_text())
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}") from error


def write_manifest(folder: Path, assembly: Assembly, computing: dict[str, Any]) -> None:
    """Write what the run stands on; times and machine go here and nowhere else.

    Args:
        folder: of the run.
        assembly: its data, of which it notes checksums.
        computing: executor, threads and the like.

    Raises:
        CheckpointError: the run was started on other data or another partition.
    """
    before = json.loads((folder / MANIFEST).read_text()) if (folder / MANIFEST).is_file() else {}
    found = {
        "data_checksum": assembly.data_checksum,
        "partition_fingerprint": assembly.partition_fingerprint,
        "classes": list(assembly.classes),
    }
    for name, value in found.items():
        if before.get(name, value) != value:
            raise CheckpointError(
                f"{folder}: {name} was {before[name]} and now is {value}; the data or their division has"
                " changed since the run was started, so it cannot be resumed"
            )
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "status": "running",
        "command": sys.argv,
        "started": _now(),
        **before,
        **found,
        **_commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} cores for torch",
        "device": "cpu",
        "computing": {**computing, "fused_optimizers": True},
    }
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def note_status(folder: Path, status: str, **facts: Any) -> None:
    """Note how the run stands, and when."""
    manifest = {**json.loads((folder / MANIFEST).read_text()), "status": status, "ended": _now(), **facts}
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def run_digest(folder: Path) -> dict[str, str]:
    """Digests of what a run computed, which no clock has touched: its records and its last checkpoint.

    Raises:
        CheckpointError: the folder is not a run, or holds no finished round.
    """
    open_folder(folder)
    last = Checkpoint.read(folder / CHECKPOINT / LAST)
    if last is None:
        raise CheckpointError(f"{folder} has no finished round yet")
    records = {name: digest((folder / name).read_bytes()) for name in (ROUNDS, CLIENTS)}
    return {**records, "checkpoint": last.digest}


@contextmanager
def logging_to(folder: Path) -> Generator[None]:
    """Send Potluck's log to the run's log file inside the block."""
    handler = logging.FileHandler(folder / LOG)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("potluck")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # the terminal is for the progress bar
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        handler.close()


def _commit() -> dict[str, Any]:
    """The commit of the code, if it runs from a checkout."""
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        return {"git_commit": commit, "git_dirty": bool(_git(here, "status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return {"git_commit": None, "git_dirty": None}


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
