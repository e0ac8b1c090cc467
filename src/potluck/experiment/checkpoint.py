"""Checkpoints: after every round the whole state is on disk, and a flipped byte is noticed.

A checkpoint is one small JSON file that names content-addressed files: the method's state and one record a
client. Replacing that file is the only step that counts, so a run killed at any moment has either the old
checkpoint or the new one.
"""

import json
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from potluck.core.errors import CheckpointError
from potluck.core.federation import ClientId
from potluck.core.tree import digest, pack, unpack
from potluck.engines.stores import ClientStore, write_atomically

LAST, BEST = "last.json", "best.json"


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands.

    Attributes:
        round: the last round that is complete.
        state: file of the method's state.
        clients: by client, the file of what it keeps.
        best_validation: the highest mean validation accuracy so far, and `best_round` the first round with it.
    """

    round: int
    state: str
    clients: dict[ClientId, str]
    best_validation: float | None
    best_round: int | None

    @property
    def digest(self) -> str:
        """Stands for everything that the run has computed: equal digests, equal bits."""
        content = [self.round, self.state, [list(item) for item in sorted(self.clients.items())]]
        return digest(json.dumps(content).encode())


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
        if best_round == number:
            self._write(BEST, checkpoint)
        self._write(LAST, checkpoint)
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

    def _write(self, name: str, checkpoint: Checkpoint) -> None:
        content = {
            "round": checkpoint.round,
            "state": checkpoint.state,
            "clients": {str(id): file for id, file in checkpoint.clients.items()},
            "best_validation": checkpoint.best_validation,
            "best_round": checkpoint.best_round,
        }
        sealed = {**content, "seal": _seal(content)}
        write_atomically(self._folder / name, json.dumps(sealed, indent=1).encode())

    def _discard_unused(self) -> None:
        needed = {name for file in (LAST, BEST) if (found := read(self._folder, file)) for name in _files(found)}
        self._store.discard_except(needed)


def read(folder: Path, name: str = LAST) -> Checkpoint | None:
    """The checkpoint that a JSON file describes, or None if there is no such file.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / name
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
        seal = content.pop("seal")
        if seal != _seal(content):
            raise ValueError("its content does not match its seal")
        clients = {int(id): file for id, file in content.pop("clients").items()}
        return Checkpoint(**content, clients=clients)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; the checkpoint cannot be resumed") from error


def _files(checkpoint: Checkpoint) -> list[str]:
    return [checkpoint.state, *checkpoint.clients.values()]


def _read_checked(path: Path) -> bytes:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the checkpoint cannot be resumed")
    content = path.read_bytes()
    if digest(content) != path.stem.rsplit("-", 1)[1]:
        raise CheckpointError(f"{path} is damaged; the checkpoint cannot be resumed")
    return content


def _seal(content: dict[str, Any]) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())


def _dataclass(state: Any) -> Any:
    if not is_dataclass(state):
        raise TypeError(f"the method's state is a {type(state).__name__}; expected a frozen dataclass")
    return state
