"""Checkpoints: after every round the whole state is on disk, and a flipped byte is noticed.

A checkpoint is one small JSON file that names content-addressed files: the method's state and one record a
client. Replacing that file is the only step that counts, so a run killed at any moment has either the old
checkpoint or the new one.
"""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from potluck.core.digest import digest
from potluck.core.errors import CheckpointError
from potluck.core.tree import pack, unpack
from potluck.engines.files import write_atomically
from potluck.engines.stores import ClientStore
from potluck.records import BEST, LAST, Checkpoint


class Checkpoints:
    """The checkpoint folder of one run."""

    def __init__(self, folder: Path, store: ClientStore) -> None:
        self._folder = folder
        self._store = store

    def save(self, number: int, state: Any, best_validation: float | None, best_round: int | None) -> Checkpoint:
        """Write the state after round `number`; the best round's checkpoint is kept beside the last."""
        content = pack({spec.name: getattr(state, spec.name) for spec in fields(_dataclass(state))})
        name = f"state-{digest(content)}.safetensors"
        if not (self._folder / name).exists():
            write_atomically(self._folder / name, content)
        checkpoint = Checkpoint(number, name, self._store.save(), best_validation, best_round)
        for file in (BEST, LAST) if best_round == number else (LAST,):
            write_atomically(self._folder / file, checkpoint.sealed())
        self._discard_unused()
        return checkpoint

    def restore(self, checkpoint: Checkpoint, initial: Any) -> Any:
        """The state that was saved, in the type of the method's `initial` state; the clients' store filled.

        Raises:
            CheckpointError: a file is missing or damaged, or the state has other fields than the method's.
        """
        content = _read_checked(self._folder / checkpoint.state)
        self._store.restore(checkpoint.clients)
        saved = unpack(content)
        expected = {spec.name for spec in fields(_dataclass(initial))}
        if set(saved) != expected:
            raise CheckpointError(
                f"{self._folder / checkpoint.state} holds {sorted(saved)}; this version of the method keeps"
                f" {sorted(expected)}, so the run cannot be resumed with it"
            )
        return type(initial)(**saved)

    def _discard_unused(self) -> None:
        kept = [Checkpoint.read(self._folder / name) for name in (LAST, BEST)]
        self._store.discard_except(name for checkpoint in kept if checkpoint for name in checkpoint.files)


def _read_checked(path: Path) -> bytes:
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
