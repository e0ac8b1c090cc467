"""A cache of decoded images on disk, so that they are decoded once on a machine and not in every run."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from potluck.core.ground.errors import DataError
from potluck.data.dataset import arrays_digest

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """`potluck` under `$XDG_CACHE_HOME`, or under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "potluck"


def cached(path: Path, decode: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The inputs and targets stored at `path`; decoded and stored if missing or damaged."""
    if path.is_file():
        try:
            return _read(path)
        except _damage() as error:
            _log.warning("%s is damaged (%s) and is decoded again", path, error)
    inputs, targets = decode()
    _write(path, inputs, targets)
    return inputs, targets


def _read(path: Path) -> tuple[Tensor, Tensor]:
    """Inputs and targets, checked against the digest they were stored with."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as archive:
        inputs, targets = archive.get_tensor("inputs"), archive.get_tensor("targets")
        expected = (archive.metadata() or {}).get("digest")
    if arrays_digest(inputs, targets) != expected:
        raise ValueError("its contents do not have the digest in its header")
    return inputs, targets


def _write(path: Path, inputs: Tensor, targets: Tensor) -> None:
    """Write under another name, then rename, so that other processes see the old file or the whole new one."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".writing-") as scratch:
            unfinished = Path(scratch) / path.name
            save_file({"inputs": inputs, "targets": targets}, unfinished, {"digest": arrays_digest(inputs, targets)})
            os.replace(unfinished, path)
    except (SafetensorError, OSError) as error:  # safetensors raises its own error if the disk is full
        raise DataError(
            f"{path.parent}: decoded images cannot be stored here ({error}); "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error


def _damage() -> tuple[type[Exception], ...]:
    """The errors of reading a file that is truncated, altered or not an archive."""
    from safetensors import SafetensorError

    return (SafetensorError, OSError, ValueError)
