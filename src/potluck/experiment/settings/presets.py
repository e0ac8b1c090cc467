"""The starting point of a configuration: a file, or the demonstration's settings where they apply."""

import tomllib
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path

from potluck.core.ground.errors import ConfigError
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.settings.tables import Assignments, Tree, override, read_experiment
from potluck.methods import get_method
from potluck.seals import differences


def experiment_for(target: str | None, assignments: Assignments) -> Experiment:
    """The experiment of a target and overrides.

    Args:
        target: a TOML file, a method's name or Python file, or None for the demonstration.
        assignments: overrides by dotted key.

    Raises:
        ConfigError: see `potluck.experiment.settings.resolve.resolve`.
    """
    if target is not None and target.endswith(".toml"):
        return resolve(override(read_experiment(Path(target)), assignments), target)
    wanted = override({"method": {"name": target}} if target else {}, assignments)
    method = wanted.get("method", {})
    name = method.get("name", "fedin") if isinstance(method, dict) else target or "fedin"
    if target and name != target:
        raise ConfigError(f"method.name is given twice, as {target!r} and as {name!r}; give it once")
    plain: Tree = {"method": {"name": name}}
    if not isinstance(name, str) or not _on_digits(wanted):
        return resolve(override(plain, assignments), "arguments")
    made = resolve(override(_demonstration(name), assignments), "arguments")
    usual = resolve(override(plain, assignments), "arguments")
    replaced = {key: default for key, (_, default) in differences(made.settings(), usual.settings()).items()}
    return replace(made, preset=replaced)


def experiment_on(target: str, assignments: Assignments, on: Path | None) -> Experiment:
    """A target's experiment, with the federation, the run and the local training of a file if one is given.

    What else the file sets of its method is for this method alone.

    Raises:
        ConfigError: as `experiment_for`, or the target is a file with a federation of its own.
    """
    if on is None:
        return experiment_for(target, assignments)
    if target.endswith(".toml"):
        raise ConfigError(f"{target}: with --on name methods; this file has a federation of its own")
    tree = read_experiment(on)
    method = tree.get("method", {})
    if not isinstance(method, dict) or method.get("name") != target:
        trains = any(spec.name == "training" for spec in fields(get_method(target)))
        shared = (
            {"training": method["training"]} if trains and isinstance(method, dict) and "training" in method else {}
        )
        method = {"name": target, **shared}
    return resolve(override({**tree, "method": method}, assignments), f"{on}, {target}")


def seeded(experiment: Experiment, number: int) -> Experiment:
    """The same experiment with a seed that is larger by this number."""
    return replace(experiment, run=replace(experiment.run, seed=experiment.run.seed + number))


def _on_digits(wanted: Tree) -> bool:
    federation = wanted.get("federation", {})
    return not isinstance(federation, dict) or federation.get("dataset", "digits") == "digits"


def _demonstration(method: str) -> Tree:
    """The demonstration's settings with another method."""
    tree = tomllib.loads((files("potluck.experiment") / "demo.toml").read_text())
    training = tree["method"].pop("training")
    takes_training = any(spec.name == "training" for spec in fields(get_method(method)))
    tree["method"] = {"name": method, **({"training": training} if takes_training else {})}
    return tree
