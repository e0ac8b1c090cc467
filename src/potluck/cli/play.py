"""`potluck run`: start or resume a run, and show how it goes."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from potluck.cli.display import Progress, print_result
from potluck.core.errors import ConfigError, PotluckError
from potluck.experiment.assemble import Assembly, assemble
from potluck.experiment.config import Experiment, override, read_toml, resolve
from potluck.experiment.folder import new_folder, open_folder
from potluck.experiment.play import holding, play, prepare
from potluck.experiment.presets import experiment_for
from potluck.records import CONFIG, MANIFEST


def play_new(target: str | None, assignments: Sequence[str], parent: Path) -> None:
    """Start a run; the folder is made when nothing is left that could be refused."""
    experiment = experiment_for(target, assignments)
    assembly = assemble(experiment)
    parent_is_new = not parent.exists()
    folder = new_folder(parent, experiment)
    try:
        _play(folder, experiment, assembly)
    finally:
        if not (folder / MANIFEST).exists():  # refused before it began
            shutil.rmtree(folder, ignore_errors=True)
            if parent_is_new:
                with suppress(OSError):
                    parent.rmdir()


def play_on(folder: Path, target: str | None, assignments: Sequence[str]) -> None:
    """Go on with a run from its last checkpoint; only its length may change.

    Raises:
        ConfigError: something other than run.rounds is to be changed.
        CheckpointError: the folder is not a run, or is damaged, or its data have changed.
    """
    open_folder(folder)
    changed = [assignment for assignment in assignments if not assignment.startswith("run.rounds=")]
    if target is not None or changed:
        raise ConfigError(
            f"--resume {folder}: found {' '.join([*filter(None, [target]), *changed])}; a run goes on with its own"
            " configuration and only run.rounds may be given"
        )
    experiment = resolve(override(read_toml(folder / CONFIG), assignments), str(folder / CONFIG))
    assembly = assemble(experiment)
    _play(folder, experiment, assembly)


def _play(folder: Path, experiment: Experiment, assembly: Assembly) -> None:
    with holding(folder):
        run = prepare(experiment, assembly, folder)
        try:
            with Progress(experiment, run.rounds_done) as progress:
                result, privacy = play(run, experiment, folder, progress.show)
        except KeyboardInterrupt:
            raise PotluckError(f"interrupted; go on with: potluck run --resume {folder}") from None
    print_result(folder, experiment, result, privacy)
