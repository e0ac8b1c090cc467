"""`potluck public`: what all parties of a federation have in common, as arrays for nodes without PyTorch."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import typer
from numpy.typing import NDArray
from torch import Tensor, cat

from potluck.api.export import preparation_of
from potluck.core.ground.errors import ConfigError, StorageError
from potluck.core.ground.inputs import shown
from potluck.core.requests.examples import Examples
from potluck.experiment.federation.assemble import common_classes, common_of, public_digest
from potluck.experiment.settings.presets import experiment_for


def write_public(target: str | None, assignments: Sequence[str], to: Path) -> None:
    """Write the file and say what is in it.

    Args:
        target: a TOML file or a method, as for `potluck serve`.
        assignments: dotted keys, as for `potluck serve`.
        to: the file.

    Raises:
        ConfigError: the file's name does not end in .npz, the inputs have names, or there is nothing to write.
        StorageError: the file cannot be written.
    """
    if to.suffix != ".npz":
        raise ConfigError(f"--to {to}: expected a file whose name ends in .npz")
    experiment = experiment_for(target, assignments)
    public, test = common_of(experiment, common_classes(experiment))
    examples = {name: found for name, found in (("public", public), ("common", test)) if found is not None}
    if not examples:
        found = f"neither public examples nor the data set {experiment.federation.dataset}, whose test part is common"
        raise ConfigError(f"public: found {found}; set federation.public, or bring the data here")
    arrays = {f"x_{name}": _prepared(found, name) for name, found in examples.items()}
    if test is not None:
        arrays["y_common"] = test.labels.numpy()
    if (digest := public_digest(public)) is not None:
        arrays["digest"] = np.array(digest)
    arrays["preparation"] = np.array(json.dumps([preparation_of(found) for found in examples.values()][-1]))
    try:
        with to.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise StorageError(f"cannot write {to}: {error.strerror or error}") from error
    counts = " and ".join(f"{len(found)} {_WORDS[name]}" for name, found in examples.items())
    shape = shown(next(iter(examples.values())).input_shape)
    typer.echo(f"Wrote {to}: {counts}, prepared inputs of shape {shape}")


_WORDS = {"public": "public examples", "common": "examples of the common test set"}


def _prepared(examples: Examples, name: str) -> NDArray[np.generic]:
    """The prepared inputs (n, ...)."""
    batches: list[Tensor] = []
    for batch in examples.batches(1000):
        if not isinstance(batch.inputs, Tensor):
            raise ConfigError(
                f"public: the inputs of the {_WORDS[name]} have names, {shown(examples.input_shape)}; nodes without"
                " PyTorch take inputs of one tensor"
            )
        batches.append(batch.inputs)
    return cat(batches).numpy()
