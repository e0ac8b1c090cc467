"""Where a configuration starts: a file, or the demonstration's settings where they apply."""

import tomllib
from collections.abc import Sequence
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

from potluck.experiment.config import Experiment, Tree, override, read_toml, resolve
from potluck.methods import get_method


def experiment_for(target: str | None, assignments: Sequence[str]) -> Experiment:
    """The experiment that a target and overrides ask for.

    Args:
        target: a TOML file, a method's name or Python file, or None for the demonstration.
        assignments: dotted `key=value` overrides.

    Raises:
        ConfigError: see `potluck.experiment.config.resolve`.
    """
    if target is not None and target.endswith(".toml"):
        return resolve(override(read_toml(Path(target)), assignments), target)
    wanted = override({"method": {"name": target}} if target else {}, assignments)
    base = _demonstration(target or "fedin") if _on_digits(wanted) else {"method": {"name": target or "fedin"}}
    return resolve(override(base, assignments), "arguments")


def _on_digits(wanted: Tree) -> bool:
    federation = wanted.get("federation", {})
    return not isinstance(federation, dict) or federation.get("dataset", "digits") == "digits"


def _demonstration(method: str) -> Tree:
    """The demonstration's settings with another method in its place."""
    tree = tomllib.loads((files("potluck.experiment") / "demo.toml").read_text())
    training = tree["method"].pop("training")
    takes_training = any(spec.name == "training" for spec in fields(get_method(method)))
    tree["method"] = {"name": method, **({"training": training} if takes_training else {})}
    return tree
