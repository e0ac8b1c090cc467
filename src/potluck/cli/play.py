"""`potluck run`: start or resume a run, and show how it goes."""

from collections.abc import Sequence
from pathlib import Path

from potluck.cli.display import Progress, print_result
from potluck.core.errors import ConfigError, PotluckError
from potluck.experiment.assemble import Assembly, assemble
from potluck.experiment.config import Experiment, override, read_toml, resolve
from potluck.experiment.folder import logging_to, new_folder, note_status, open_folder, write_manifest
from potluck.experiment.presets import experiment_for
from potluck.experiment.records import releases
from potluck.experiment.run import Run
from potluck.records import CONFIG


def play_new(target: str | None, assignments: Sequence[str], parent: Path) -> None:
    """Start a run; the folder is made when nothing is left that could be refused."""
    experiment = experiment_for(target, assignments)
    assembly = assemble(experiment)
    _play(new_folder(parent, experiment), experiment, assembly)


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
    run = Run(experiment.method, assembly.federation, experiment.run, folder)
    run.load()  # a damaged checkpoint is refused before anything is written
    write_manifest(folder, assembly, experiment.run.threads)
    (folder / CONFIG).write_text(experiment.toml())
    try:
        with logging_to(folder), Progress(experiment, run.rounds_done) as progress:
            result = run.play(progress.show)
    except KeyboardInterrupt:
        note_status(folder, "interrupted")
        raise PotluckError(f"interrupted; go on with: potluck run --resume {folder}") from None
    except BaseException:
        note_status(folder, "failed")
        raise
    privacy = experiment.method.privacy_statement(releases(folder))
    note_status(folder, "finished", privacy=privacy)
    print_result(folder, experiment, result, privacy)
