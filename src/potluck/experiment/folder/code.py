"""The user's own code in a run: copied to the run's folder when it starts, and run from there when it is resumed.

So a resumed run ends as it would have without the interruption, even if the files have changed since; to use changed
files, start a new run, or a branch of this one.
"""

import os
import sys
import sysconfig
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from potluck.core.ground.digest import digest
from potluck.core.ground.discovery import FILE_PREFIX, standing_in
from potluck.core.ground.errors import CheckpointError
from potluck.engine.disk.files import sync, write_atomically
from potluck.experiment.settings.schema import Experiment

CODE = "code"
"""The folder of copies in a run's folder."""

Noted = Mapping[str, Any]
"""A file's entry in the manifest: `file` as it was typed, its `path`, its `copy` in the run's folder, the `digest` of
both, and whether it was `imported` by another file rather than named itself."""


def keep_code(folder: Path, experiment: Experiment) -> list[dict[str, Any]]:
    """Copy the files that define the experiment, and what Python files import; return their entries for the manifest.

    Raises:
        StorageError: they cannot be copied.
    """
    named = {name: Path(name).resolve() for name in experiment.files if Path(name).is_file()}
    imported = {str(path): path for path in _imported([path for path in named.values() if path.suffix == ".py"])}
    noted: list[dict[str, Any]] = []
    taken: set[str] = set()
    for name, path in {**named, **imported}.items():
        content = path.read_bytes()
        copy = path.name if path.name not in taken else f"{digest(content)[:8]}-{path.name}"
        taken.add(copy)
        write_atomically(folder / CODE / copy, content)
        facts = {"file": name, "path": str(path), "copy": f"{CODE}/{copy}", "digest": digest(content)}
        noted.append({**facts, "imported": name in imported})
    if noted:
        sync(folder / CODE, folder)
    return noted


@contextmanager
def as_started(folder: Path, manifest: Mapping[str, Any], *, with_copies: bool = True) -> Generator[list[str]]:
    """Inside the block, relative paths start where the run was started, and its code is the code it was started with.

    Yields notes on the code for the user.

    Args:
        folder: of the run.
        manifest: its content.
        with_copies: whether the run's copies of the user's files replace them.

    Raises:
        CheckpointError: a copy is damaged, or a file has changed that no copy can replace.
    """
    noted: list[Noted] = manifest.get("code") or []
    place, here = manifest.get("started_in"), Path.cwd()
    home = folder.resolve()
    if place and os.path.isdir(place):
        os.chdir(place)
    try:
        if not with_copies:
            yield []
            return
        copies = {Path(file["file"]).resolve(): _copy(home, file) for file in noted if not file["imported"]}
        notes = [note for file in noted if (note := _told(home, file))]
        with standing_in(copies):
            yield notes
    finally:
        os.chdir(here)


def _copy(folder: Path, file: Noted) -> Path:
    copy = folder / file["copy"]
    if not copy.is_file() or digest(copy.read_bytes()) != file["digest"]:
        found = "is damaged" if copy.is_file() else "is missing"
        raise CheckpointError(f"{copy} {found}, the code that the run was started with; restore it, or run again")
    return copy


def _told(folder: Path, file: Noted) -> str | None:
    """How a file has changed since the run was started; None if it has not."""
    path, copy = Path(file["path"]), folder / file["copy"]
    if path.is_file() and digest(path.read_bytes()) == file["digest"]:
        return None
    found = "has changed since the run was started" if path.is_file() else "no longer exists"
    if file["imported"]:
        raise CheckpointError(f"{path}, which the run's code imports, {found}; put it back from {copy}, or run again")
    return f"{path} {found}; the run continues with its copy of the code, {copy}"


def _imported(named: Iterable[Path]) -> list[Path]:
    """Files of loaded modules in or below the folders of the named ones that belong to no installed package."""
    named = set(named)
    homes = tuple(f"{path.parent}{os.sep}" for path in named)
    modules = [module for name, module in list(sys.modules.items()) if not name.startswith(("__main__", FILE_PREFIX))]
    loaded = {str(getattr(module, "__file__", None) or "") for module in modules}
    beside = {Path(file).resolve() for file in loaded if file.startswith(homes) and file.endswith(".py")}
    libraries = [
        Path(__file__).resolve().parents[1],
        *(Path(place).resolve() for place in sysconfig.get_paths().values()),
    ]
    return sorted(path for path in beside - named if not any(path.is_relative_to(library) for library in libraries))
