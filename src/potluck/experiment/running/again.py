"""A stored run taken up again: resumed as it was, or branched with changed settings."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from potluck.core.ground.errors import ConfigError
from potluck.experiment.folder.branch import branch
from potluck.experiment.folder.code import as_started
from potluck.experiment.folder.folder import open_folder
from potluck.experiment.running.execute import holding
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.settings.tables import Assignments, override, read_toml
from potluck.records import CHECKPOINT, CONFIG, LAST, Checkpoint
from potluck.seals import FREE, check_continues, what_matters

ENDING = 2.0  # seconds that a killed process may take to release its lock


def check_free(where: str, given: Iterable[str], otherwise: str) -> None:
    """Check that a run can be resumed with other values of these keys, or assignments to keys.

    Raises:
        ConfigError: one of them would change finished rounds; `where` opens the message, `otherwise` says how a new run
            continues from this one.
    """
    free = {f"run.{name}" for name in FREE}
    changed = [one for one in given if ".".join(one.partition("=")[0].strip().split(".")[:2]) not in free]
    if changed:
        raise ConfigError(
            f"{where}: found {' '.join(changed)}; a run is resumed with its own configuration and only run.rounds may"
            f" be given, or {' or '.join(sorted(free - {'run.rounds'}))}; {otherwise}"
        )


@contextmanager
def resuming(folder: Path, assignments: Assignments) -> Generator[tuple[Experiment, list[str]]]:
    """A run's experiment, and notes on its code; inside the block, code and relative paths are as it was started.

    Raises:
        ConfigError: a value is wrong.
        CheckpointError: the folder is not a run, or is damaged, or its configuration or code have changed.
    """
    manifest = open_folder(folder)
    home = folder.resolve()
    with as_started(folder, manifest) as notes:
        experiment = resolve(override(read_toml(home / CONFIG), assignments), str(folder / CONFIG))
        last = Checkpoint.read(home / CHECKPOINT / LAST)
        if last:
            check_continues(folder, last, what_matters(experiment.settings()), experiment.run.rounds)
        yield experiment, notes


@contextmanager
def branching(folder: Path, assignments: Assignments) -> Generator[tuple[Experiment, Path]]:
    """The experiment of a new run that continues from another's last checkpoint, and its folder beside it.

    Inside the block, relative paths start where the other run was started.

    Raises:
        ConfigError: a value is wrong, or the federation or the method would change.
        CheckpointError: the folder is not a run, has no finished round, or is damaged.
    """
    manifest = open_folder(folder)
    home = folder.resolve()
    with as_started(folder, manifest, with_copies=False):
        experiment = resolve(override(read_toml(home / CONFIG), assignments), str(folder / CONFIG))
        with holding(home, ENDING):
            place = branch(home, experiment, home.parent)
        yield experiment, folder.parent / place.name
