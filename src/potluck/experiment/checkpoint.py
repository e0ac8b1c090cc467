"""Checkpoints: after every round the whole state is on disk, and a flipped byte is noticed.

A checkpoint is one small JSON file that names content-addressed files: the method's state and one record a
client. Replacing that file is the only step that counts, so a run killed at any moment has either the old
checkpoint or the new one.
"""

import logging
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from potluck.core.digest import digest
from potluck.core.errors import CheckpointError
from potluck.core.tree import pack, unpack
from potluck.engine.files import make_folder, remove, rename, sync, write_atomically
from potluck.engine.store import ClientStore
from potluck.records import BEST, LAST, Checkpoint, Extent

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoint folder of one run."""

    def __init__(self, folder: Path, store: ClientStore) -> None:
        self._folder = folder
        self._store = store

    def make_ready(self) -> None:
        """Make the folder, and rid it of what a killed run was writing.

        Raises:
            StorageError: it cannot be written to.
        """
        make_folder(self._folder)
        sync(self._folder.parent)
        for aside in self._folder.glob("*.tmp"):
            remove(aside)

    def save(
        self,
        number: int,
        state: Any,
        best_validation: float | None,
        best_round: int | None,
        records: dict[str, Extent],
        config: dict[str, Any],
    ) -> Checkpoint:
        """Write the state after round `number`; the best round's checkpoint is kept beside the last.

        Args:
            number: of the round.
            state: the method's.
            best_validation: the best mean of the primary metric on validation parts so far; None if there is none.
            best_round: the first round with it.
            records: how far those reach that the checkpoint stands on.
            config: what is played.

        Raises:
            StorageError: it cannot be written; the checkpoint before stands.
        """
        content = pack({spec.name: getattr(state, spec.name) for spec in fields(_dataclass(state))})
        name = f"state-{digest(content)}.safetensors"
        if not (self._folder / name).exists():
            write_atomically(self._folder / name, content)
        checkpoint = Checkpoint(number, name, self._store.save(), best_validation, best_round, records, config)
        best = self._best()
        if best_round == number:
            best = checkpoint
            write_atomically(self._folder / BEST, checkpoint.sealed())
        sync(self._folder)  # the names of all these files come before what names them
        write_atomically(self._folder / LAST, checkpoint.sealed())
        sync(self._folder)  # nothing is deleted that the checkpoint before may still be needed for
        self._discard_unused(checkpoint, best)
        return checkpoint

    def complaint(self) -> str | None:
        """What is wrong with the best round's checkpoint, without which a run can go on."""
        try:
            Checkpoint.read(self._folder / BEST)
        except CheckpointError as error:
            return f"{error}; the run goes on without it until a round is better"
        return None

    def restore(self, checkpoint: Checkpoint, initial: Any) -> Any:
        """The state that was saved, in the type of the method's `initial` state; the clients' store filled.

        Raises:
            CheckpointError: a file is missing or damaged, or the state has other fields than the method's.
        """
        content = read_checked(self._folder / checkpoint.state)
        self._store.restore(checkpoint.clients)
        saved = unpack(content)
        expected = {spec.name for spec in fields(_dataclass(initial))}
        if set(saved) != expected:
            raise CheckpointError(
                f"{self._folder / checkpoint.state} holds {sorted(saved)}; this version of the method keeps"
                f" {sorted(expected)}, so the run cannot be resumed with it"
            )
        return type(initial)(**saved)

    def _best(self) -> Checkpoint | None:
        """The best round's checkpoint; what is none is put aside."""
        place = self._folder / BEST
        try:
            return Checkpoint.read(place)
        except CheckpointError:
            names = (place.with_name(f"{BEST}.damaged-{number}") for number in range(1, 10**6))
            aside = next(name for name in names if not name.exists())
            log.warning("%s is damaged and goes to %s", place, aside)
            rename(place, aside)
        return None

    def _discard_unused(self, *kept: Checkpoint | None) -> None:
        self._store.discard_except(name for checkpoint in kept if checkpoint for name in checkpoint.files)


def read_checked(path: Path) -> bytes:
    """The content of a file whose name holds its digest.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the checkpoint cannot be resumed")
    content = path.read_bytes()
    if digest(content) != path.stem.rsplit("-", 1)[1]:
        raise CheckpointError(f"{path} is damaged; the checkpoint cannot be resumed")
    return content


def _dataclass(state: Any) -> Any:
    if not is_dataclass(state):
        raise TypeError(f"the method's state is a {type(state).__name__}; expected a frozen dataclass")
    return state
