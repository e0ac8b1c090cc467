"""What a run stands on: Potluck's code, packages and machine, now and in its earlier rounds; and the user's code."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "potluck",
    "torch",
    "numpy",
    "scikit-learn",
    "datasets",
    "safetensors",
    "timm",
    "tokenizers",
    "transformers",
)
MAY_CHANGE = ("potluck_commit", "potluck_dirty", "python", "packages", "machine", "computing")
"""The facts in a manifest that may change when a run is resumed."""
EARLIER = "earlier"
"""In a manifest, these facts as they were before they changed, each time with the last round that they hold for."""
_LAST = "last_round"


def provenance_now(computing: Mapping[str, Any]) -> dict[str, Any]:
    """What the rounds from here on stand on.

    Args:
        computing: executor, threads and so on.
    """
    values = (
        *_potluck_commit(),
        platform.python_version(),
        {name: _version(name) for name in _PACKAGES},
        f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} cores for torch",
        {**computing, "fused_optimizers": True},
    )
    return dict(zip(MAY_CHANGE, values, strict=True))


def earlier(before: Mapping[str, Any], now: Mapping[str, Any], rounds_done: int) -> list[dict[str, Any]]:
    """What finished rounds stood on, where that was not what the next ones do; the first rounds first.

    Args:
        before: the manifest before the run was resumed.
        now: what the rounds from here on stand on.
        rounds_done: how many are finished.
    """
    found = list(before.get(EARLIER, ()))
    then = {name: before[name] for name in now if name in before}
    noted = found[-1][_LAST] if found else 0
    if then and then != now and rounds_done > noted:
        found.append({_LAST: rounds_done, **then})
    if found and found[-1] == {_LAST: found[-1][_LAST], **now}:  # what came in between did not finish a round
        found.pop()
    return found


def users_commit(files: Sequence[Path]) -> dict[str, Any]:
    """The commit of the repository that holds the user's files; dirty if it has changed or lacks a file."""
    commit, dirty, tracked = _state_of(files) if files else (None, None, True)
    return {"git_commit": commit, "git_dirty": dirty if tracked else commit and True}


def _potluck_commit() -> tuple[str | None, bool | None]:
    """The commit of Potluck's code, if it runs from its own checkout, and whether that has changed."""
    commit, dirty, tracked = _state_of([Path(__file__)])
    return (commit, dirty) if tracked else (None, None)


def _state_of(files: Sequence[Path]) -> tuple[str | None, bool | None, bool]:
    """The commit of the repository around files, whether it has uncommitted changes, and whether it has all files."""
    try:
        folder = files[0].parent
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
        return commit, bool(changed), all(_git(folder, "ls-files", "--", str(file)) for file in files)
    except (OSError, subprocess.SubprocessError):
        return None, None, False


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
