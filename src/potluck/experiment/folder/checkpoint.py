"""Checkpoints: after every round the whole state is on disk, and a flipped byte is detected.

A checkpoint is one small JSON file that names content-addressed files, the parts of the method's state, and has the
digest of all clients' states, which are in segments. Where in these is said by a file beside it, its layout. What has
not changed since the last checkpoint is not written again. Replacing the small file is the only step that counts, so a
run killed at any moment has either the old checkpoint or the new one.
"""

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import CheckpointError
from potluck.core.ground.tree import pack, unpack
from potluck.engine.disk.files import make_folder, remove, rename, sync, write_atomically
from potluck.engine.disk.store import ClientStore, ContentFiles, Layout
from potluck.records import BEST, LAST, Checkpoint, Extent, Undo, kept_rounds, name_of_kept, name_of_layout

log = logging.getLogger(__name__)
_PART_BYTES = 2**18
"""The most bytes of a part of the state that has more than one entry."""

_WITHOUT_BEST = "the run continues without it until a better round"


class Checkpoints:
    """The checkpoint folder of one run.

    Attributes:
        mark: after `restore`, the mark in the clients' store of the last round's start; None if it cannot be undone.
    """

    def __init__(self, folder: Path, store: ClientStore) -> None:
        self._folder = folder
        self._store = store
        self._content = ContentFiles()
        self._kept: set[str] | None = None  # files that kept rounds need; None until they are looked for
        self._best: set[str] | None = None  # likewise of the best round
        self.mark: Any = None

    def prepare(self) -> None:
        """Make the folder, and delete partial files of a killed run.

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
        undo: Undo | None = None,
        *,
        mark: Any = None,
        keep: bool = False,
        under_way: dict[str, Any] | None = None,
    ) -> Checkpoint:
        """Write the state after round `number`; the best round's checkpoint is kept beside the last one.

        Args:
            number: the number of the round.
            state: the method's state.
            best_validation: the best mean of the primary metric on validation parts so far; None if there is none.
            best_round: the first round with it.
            records: the extent of the records that the checkpoint refers to.
            config: the run's settings.
            undo: what the round can be undone with, all of whose files the last checkpoint named.
            mark: in the clients' store, of the round's start, if it can be undone.
            keep: whether it also stays when the next one is written.
            under_way: what clients are doing, of a run whose rounds are asynchronous.

        Raises:
            StorageError: it cannot be written; the last checkpoint is unchanged.
        """
        parts = self._put({spec.name: getattr(state, spec.name) for spec in fields(_dataclass(state))})
        others = () if under_way is None else self._put(under_way)
        self._content.sync()
        kept, best = self._kept_before(number), self._needed_by_best()
        layout = self._store.save(mark, kept | best)
        checkpoint = Checkpoint(number, parts, {}, best_validation, best_round, records, config, states=layout.states)
        if layout.states or layout.before:
            write_atomically(self._folder / name_of_layout(number), layout.sealed())
        now = checkpoint.files | {name_of_layout(number), *replace(layout, before=None).files}
        if best_round == number:
            self._best = best = now
            write_atomically(self._folder / BEST, checkpoint.sealed())
        if keep:
            self._kept = kept = kept | now
            write_atomically(self._folder / name_of_kept(number), checkpoint.sealed())
        checkpoint = replace(checkpoint, undo=undo, under_way=others)
        sync(self._folder)  # the files' names must be durable before the checkpoint that refers to them
        write_atomically(self._folder / LAST, checkpoint.sealed())
        sync(self._folder)  # only now: until here the last checkpoint may still be needed
        self._discard_except(checkpoint.files | now | layout.files | kept | best)
        return checkpoint

    def _discard_except(self, needed: Collection[str]) -> None:
        """Delete the files that no checkpoint needs."""
        for path in (*self._folder.glob("*.safetensors"), *self._folder.glob("states-*.json")):
            if path.name not in needed:
                remove(path)
        self._store.discard_except(needed)
        self._content.forget_except(needed)

    def _put(self, tree: dict[str, Any]) -> tuple[str, ...]:
        """Write a tree in parts; return the files' names."""
        names: list[str] = []
        for part in parts_of(tree):
            content = pack(part)
            names.append(f"part-{digest(content)}.safetensors")
            self._content.put(self._folder / names[-1], content)
        return tuple(names)

    def under_way(self, checkpoint: Checkpoint) -> dict[Any, Any]:
        """What clients were doing, of a run whose rounds are asynchronous.

        Raises:
            CheckpointError: a file is missing or damaged, or there is none.
        """
        if not checkpoint.under_way:
            raise CheckpointError(f"{self._folder / LAST} does not say who is under way; it cannot be resumed so")
        paths = [self._folder / name for name in checkpoint.under_way]
        self._content.found(paths)
        return joined(unpack(read_checked(path)) for path in paths)

    def complaint(self, last: Checkpoint | None) -> str | None:
        """What is wrong with the best round's checkpoint, without which the run can continue; None if nothing.

        Args:
            last: the last round's.

        Raises:
            CheckpointError: it is of an earlier round than the last one names, so that another one is lost.
        """
        place, best_round = self._folder / BEST, last.best_round if last else None
        try:
            best = Checkpoint.read(place)
        except CheckpointError as error:
            return f"{error}; {_WITHOUT_BEST}"
        if best_round is None:
            return None
        if best is None:
            return f"{place} is missing; {_WITHOUT_BEST}"
        if best.round < best_round:
            raise CheckpointError(
                f"{place} is of round {best.round}, and {LAST} names {best_round} as the best one: the folder is a copy"
                " of files from several moments; copy it again"
            )
        return None

    def restore(self, checkpoint: Checkpoint, initial: Any) -> Any:
        """The saved state, in the type of the method's `initial` state; also restores the clients' store.

        Raises:
            CheckpointError: a file is missing or damaged, or the state has other fields than the method's.
        """
        state = self.state(checkpoint, initial)
        if checkpoint.clients:
            self._store.adopt(checkpoint.clients)
            self.mark = None
        else:
            self.mark = self._store.restore(layout := self._layout(checkpoint))
            if checkpoint.undo is not None and layout == Layout():  # no client had a state, and none has one now
                self.mark = self._store.mark()
        return state

    def state(self, checkpoint: Checkpoint, initial: Any) -> Any:
        """The saved state alone; see `restore`."""
        paths = [self._folder / name for name in checkpoint.state]
        contents = [unpack(read_checked(path)) for path in paths]
        self._content.found(paths)
        saved = contents[0] if checkpoint.has_whole_state else joined(contents)
        expected = {spec.name for spec in fields(_dataclass(initial))}
        if set(saved) != expected:
            where = paths[0] if len(paths) == 1 else self._folder
            raise CheckpointError(
                f"{where} holds {sorted(saved)}; this version of the method keeps"
                f" {sorted(expected)}, so the run cannot be resumed with it"
            )
        return type(initial)(**saved)

    def _layout(self, checkpoint: Checkpoint) -> Layout:
        """Where the clients' states of a checkpoint are.

        Raises:
            CheckpointError: it is missing or damaged, or of other states.
        """
        path = self._folder / name_of_layout(checkpoint.round)
        if not checkpoint.states and (checkpoint.undo is None or not path.is_file()):
            return Layout()
        layout = Layout.read(path)
        if layout.states != checkpoint.states:
            raise CheckpointError(f"{path} is damaged: it is of other states; the checkpoint cannot be resumed")
        return layout

    def needed_by(self, checkpoint: Checkpoint) -> set[str]:
        """Names of all files that a checkpoint needs, those of clients' states among them.

        Raises:
            CheckpointError: what says where clients' states are is missing or damaged.
        """
        layout = replace(self._layout(checkpoint), **({} if checkpoint.undo else {"before": None}))
        return checkpoint.files | layout.files | ({name_of_layout(checkpoint.round)} if layout.states else set[str]())

    def _kept_before(self, number: int) -> set[str]:
        """The files that the kept rounds before this one need.

        Later ones, of a run that was killed before its last checkpoint spoke of them, are removed first.
        """
        if self._kept is None:
            self._kept = set()
            for kept, path in kept_rounds(self._folder).items():
                if kept >= number:
                    remove(path)
                else:
                    self._kept |= self._needed_in(path)
        return self._kept

    def _needed_by_best(self) -> set[str]:
        """The files that the best round so far needs."""
        if self._best is None:
            self._best = self._needed_in(self._folder / BEST)
        return self._best

    def _needed_in(self, place: Path) -> set[str]:
        """The files that a checkpoint needs without which a run can do; none if it is not there or damaged."""
        checkpoint = self._read_or_rename(place)
        try:
            return self.needed_by(checkpoint) if checkpoint else set()
        except CheckpointError as error:
            log.warning("%s", error)
            return set()

    def _read_or_rename(self, place: Path) -> Checkpoint | None:
        """A checkpoint that a run can do without; a damaged one is renamed."""
        try:
            return Checkpoint.read(place)
        except CheckpointError:
            names = (place.with_name(f"{place.name}.damaged-{number}") for number in range(1, 10**6))
            aside = next(name for name in names if not name.exists())
            log.warning("%s is damaged and goes to %s", place, aside)
            rename(place, aside)
        return None


def parts_of(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A state as a list of parts, each some entries of one of its dicts, and the keys that lead to that dict.

    Neighbouring entries share a part until it is large; a large dict has parts of its own. So a local change affects
    few parts, and many small entries do not make many parts.
    """
    return _parts(state, [])


def _parts(node: dict[Any, Any], at: list[Any]) -> Iterator[dict[str, Any]]:
    gathered: dict[Any, Any] = {}
    room = _PART_BYTES
    for key, child in node.items():
        size = _size(child)
        apart = isinstance(child, dict) and size >= _PART_BYTES
        if gathered and (apart or size > room):
            yield {"at": at, "entries": gathered}
            gathered, room = {}, _PART_BYTES
        if apart:
            yield from _parts(child, [*at, key])
        else:
            gathered[key], room = child, room - size
    if gathered or not (at or node):
        yield {"at": at, "entries": gathered}


def joined(parts: Iterable[Any]) -> dict[Any, Any]:
    """The state reassembled from these parts, its dicts in the same order."""
    state: dict[Any, Any] = {}
    for part in parts:
        node = state
        for key in part["at"]:
            node = node.setdefault(key, {})
        node.update(part["entries"])
    return state


def _size(node: Any) -> int:
    """The approximate number of bytes of a value in a file."""
    if isinstance(node, Tensor):
        return node.nbytes
    if isinstance(node, dict):
        return sum(map(_size, node.values()))
    return sum(map(_size, node)) if isinstance(node, list | tuple) else len(node) if isinstance(node, str) else 8


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
