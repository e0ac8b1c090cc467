"""A branch: a new run that continues from another run's checkpoint with a changed configuration."""

import dataclasses
from pathlib import Path

from potluck.core.ground.errors import CheckpointError, ConfigError, StorageError
from potluck.engine.disk.files import sync, write_atomically
from potluck.engine.disk.store import ClientStore
from potluck.experiment.folder.checkpoint import Checkpoints, read_checked
from potluck.experiment.folder.folder import new_folder, open_folder, seed_manifest
from potluck.experiment.folder.provenance import EARLIER, MAY_CHANGE
from potluck.experiment.results.records import Records
from potluck.experiment.settings.schema import Experiment
from potluck.records import BEST, CHECKPOINT, CONFIG, LAST, RELEASES, Checkpoint, kept_rounds
from potluck.seals import check_continues, differences, what_matters

_FIXED = ("federation.", "run.asynchronous")  # beside the method's name; the second says who is under way
_INHERITED = ("data_checksum", "partition_fingerprint", "initial_weights", EARLIER, *MAY_CHANGE)


def branch(folder: Path, experiment: Experiment, parent: Path) -> Path:
    """Make a folder in which `experiment` continues from the checkpoint in `folder`, which is only read.

    Args:
        folder: the folder of the run to branch from.
        experiment: what is run from there on: changed settings of the method or of the run, or changed code.
        parent: the folder in which the branch's folder is made.

    Raises:
        CheckpointError: the run has no finished round, or its files are damaged.
        ConfigError: the federation or the method is another one, for which the checkpoint holds no state; or sums would
            be private from now on that were not before.
        StorageError: the branch cannot be written.
    """
    last = Checkpoint.read(folder / CHECKPOINT / LAST)
    if last is None:
        raise CheckpointError(f"{folder} has no finished round to branch from; start another run instead")
    if last.config is None or last.records is None:
        raise CheckpointError(f"{folder} was written by an earlier version; resume it for a round, then branch from it")
    check_continues(folder, dataclasses.replace(last, config=None), {}, experiment.run.rounds)
    settings = what_matters(experiment.settings())
    fixed = [key for key in differences(last.config, settings) if key == "method.name" or key.startswith(_FIXED)]
    if fixed:
        kept = "federation, method and asynchronous rule"
        raise ConfigError(f"{folder}: {', '.join(fixed)} changed; a branch keeps {kept} of its run")
    noise = [key for key in differences(last.config, settings) if key.startswith("run.private_weights")]
    if noise and experiment.run.private_weights is not None:
        raise ConfigError(
            f"{folder}: {', '.join(noise)} changed, and sums of its first {last.round} rounds were told with other"
            " noise or none; a branch with private weights keeps those of its run"
        )
    manifest = open_folder(folder)
    Records(folder).check(last)
    place = new_folder(parent, experiment)
    try:
        _copy(folder, place, last, settings)
    except OSError as error:
        raise error if isinstance(error, StorageError) else CheckpointError(f"{folder}: {error}") from error
    origin = {"folder": str(folder.resolve()), "round": last.round, "digest": last.digest}
    seed_manifest(place, {"parent": origin, **{name: manifest[name] for name in _INHERITED if name in manifest}})
    write_atomically(place / CONFIG, experiment.toml().encode())  # last: with it the folder is a run
    sync(place, place.resolve().parent)
    return place


def _copy(folder: Path, place: Path, last: Checkpoint, settings: dict[str, object]) -> None:
    """Copy records, checkpoints and the count of private releases."""
    if (folder / RELEASES).is_file():
        write_atomically(place / RELEASES, (folder / RELEASES).read_bytes())
    for name, extent in (last.records or {}).items():
        if extent.bytes:
            with (folder / name).open("rb") as file:
                write_atomically(place / name, file.read(extent.bytes))
    home, checkpoints = folder / CHECKPOINT, {LAST: last}
    saved = Checkpoints(home, ClientStore(home))
    needed = saved.needed_by(last)
    kept = [path for number, path in kept_rounds(home).items() if number <= last.round]
    for path in (home / BEST, *kept):
        try:
            found = Checkpoint.read(path)
            files = saved.needed_by(found) if found else set[str]()
        except CheckpointError:  # not needed to continue
            continue
        if found and all((home / name).is_file() for name in files):
            checkpoints[path.name] = found
            needed |= files
    elsewhere = {name for name in last.clients.values() if not (home / name).is_file()}  # at clients on other machines
    for name in sorted(needed - elsewhere):
        write_atomically(place / CHECKPOINT / name, _content(home / name))
    checkpoints[LAST] = dataclasses.replace(last, config=settings)
    for name, checkpoint in checkpoints.items():
        write_atomically(place / CHECKPOINT / name, checkpoint.sealed())
    sync(place / CHECKPOINT)


def _content(path: Path) -> bytes:
    """What a file of a checkpoint holds; what is in segments and layouts is checked when it is restored."""
    return read_checked(path) if path.suffix == ".safetensors" else path.read_bytes()
