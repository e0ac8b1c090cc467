"""A branch of a run: a run of its own that goes on from another's checkpoint with something changed."""

import dataclasses
from pathlib import Path

from potluck.core.errors import CheckpointError, ConfigError, StorageError
from potluck.engine.files import sync, write_atomically
from potluck.experiment.checkpoint import read_checked
from potluck.experiment.config import Experiment, differences
from potluck.experiment.folder import new_folder, open_folder, seed_manifest
from potluck.experiment.records import Records
from potluck.experiment.run import check_continues, what_matters
from potluck.records import BEST, CHECKPOINT, CONFIG, LAST, RELEASES, Checkpoint

_INHERITED = ("data_checksum", "partition_fingerprint")


def branch(folder: Path, experiment: Experiment, parent: Path) -> Path:
    """Make a folder in which `experiment` goes on where the run in `folder` stands; that one is only read.

    Args:
        folder: of the run to branch from.
        experiment: what is played from there on: another method's settings, another way to run, other code.
        parent: in which the branch gets a folder of its own.

    Raises:
        CheckpointError: the run has no finished round, or what it left is damaged.
        ConfigError: the federation or the method is another one, which the checkpoint says nothing of.
        StorageError: the branch cannot be written.
    """
    last = Checkpoint.read(folder / CHECKPOINT / LAST)
    if last is None:
        raise CheckpointError(f"{folder} has no finished round to branch from; start another run instead")
    if last.config is None or last.records is None:
        raise CheckpointError(f"{folder} was written by an earlier version; resume it for a round, then branch from it")
    check_continues(folder, dataclasses.replace(last, config=None), {}, experiment.run.rounds)
    settings = what_matters(experiment.settings())
    fixed = [key for key in differences(last.config, settings) if key == "method.name" or key.startswith("federation.")]
    if fixed:
        raise ConfigError(f"{folder}: {', '.join(fixed)} changed; a branch keeps federation and method of its run")
    manifest = open_folder(folder)
    Records(folder).check(last)
    place = new_folder(parent, experiment)
    try:
        _copy(folder, place, last, settings)
    except OSError as error:
        raise error if isinstance(error, StorageError) else CheckpointError(f"{folder}: {error}") from error
    origin = {"folder": str(folder.resolve()), "round": last.round, "digest": last.digest}
    seed_manifest(place, {"parent": origin, **{name: manifest[name] for name in _INHERITED if name in manifest}})
    write_atomically(place / CONFIG, experiment.toml().encode())  # the last: from now on it is a run
    sync(place, place.resolve().parent)
    return place


def _copy(folder: Path, place: Path, last: Checkpoint, settings: dict[str, object]) -> None:
    """Records, checkpoints, and the count of private releases, which the branch goes on with."""
    if (folder / RELEASES).is_file():
        write_atomically(place / RELEASES, (folder / RELEASES).read_bytes())
    for name, extent in (last.records or {}).items():
        if extent.bytes:
            with (folder / name).open("rb") as file:
                write_atomically(place / name, file.read(extent.bytes))
    checkpoints = {LAST: dataclasses.replace(last, config=settings)}
    try:
        best = Checkpoint.read(folder / CHECKPOINT / BEST)
    except CheckpointError:  # not needed to go on
        best = None
    if best and all((folder / CHECKPOINT / name).is_file() for name in best.files):
        checkpoints[BEST] = best
    for name in sorted({name for checkpoint in checkpoints.values() for name in checkpoint.files}):
        if name in last.state or (folder / CHECKPOINT / name).is_file():  # clients elsewhere keep theirs
            write_atomically(place / CHECKPOINT / name, read_checked(folder / CHECKPOINT / name))
    for name, checkpoint in checkpoints.items():
        write_atomically(place / CHECKPOINT / name, checkpoint.sealed())
    sync(place / CHECKPOINT)
