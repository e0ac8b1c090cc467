"""Which code and data a server may name at a node: what is installed there, and what its owner has allowed.

A server sends an experiment's tables, some of whose values can name files: of a method, a model, data. None of these is
opened before it is permitted; and if a file of code is permitted, the owner's own copy runs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from potluck.core.digest import digest
from potluck.core.discovery import named_file
from potluck.core.errors import ConfigError
from potluck.core.federation import ClientId
from potluck.data.datasets import list_datasets
from potluck.flower.node.config import NodeConfig
from potluck.methods import list_methods
from potluck.models import list_models

_PUBLIC = ("none", "holdout")


def permitted(tree: Mapping[str, Any], config: NodeConfig, client: ClientId, code: str | None) -> dict[str, Any]:
    """A server's experiment as this node runs it, with only its own model and the common one.

    Args:
        tree: the experiment's tables.
        config: the node's configuration.
        client: the client that this node is.
        code: digest of the method's file, if it is a file.

    Raises:
        ConfigError: it names code or data that this node does not permit.
    """
    if config.simulated:
        return dict(tree)
    federation, method = dict(_table(tree, "federation")), dict(_table(tree, "method"))
    method["name"] = _method(method.get("name"), config, code)
    if (models := federation.get("models")) is not None:
        if not isinstance(models, list) or not models:
            raise ConfigError(f"the server's federation.models: expected a list of models, found {_shown(models)}")
        federation["server_model"] = _model(federation.get("server_model", models[0]), config)
        federation["models"] = [_model(models[client % len(models)], config) if config.model is None else config.model]
    partition, metrics = federation.get("partition"), federation.get("metrics")
    _check_code(partition.get("name") if isinstance(partition, dict) else partition, "partition", config)
    for metric in metrics if isinstance(metrics, list) else [metrics]:
        _check_code(metric, "metric", config)
    federation["dataset"] = _dataset(federation.get("dataset"), config)
    _check_public(federation)
    if config.data is None and federation.get("data") is not None:
        raise ConfigError(f"the server's federation.data names files; {_JOIN_WITH_DATA}")
    federation.pop("data", None)
    run = dict(_table({"run": {}, **tree}, "run"))
    computing = _table({"computing": {}, **run}, "computing")
    run["computing"] = {**computing, "device": config.device}  # the server's device may not exist here
    return {**tree, "federation": federation, "method": method, "run": run}


_JOIN_WITH_DATA = "a node's owner chooses its data: potluck join --data ..."


def _method(name: Any, config: NodeConfig, code: str | None) -> str:
    """A method that is installed, or the owner's copy of the server's file."""
    if isinstance(name, str) and name in list_methods():
        return name
    found = named_file(name) if isinstance(name, str) else None
    if found and code is not None:
        own = next((place for place in config.code if digest(place.read_bytes()) == code), None)
        if own is not None:
            return f"{own}:{found[1]}" if found[1] else str(own)
        raise ConfigError(
            f"the server's method is the file {found[0].name[:80]} with the digest {code[:32]}; a node runs only"
            " code that its owner allows: read the file, then potluck join --allow-code FILE"
        )
    raise ConfigError(f"the server's method.name: {_shown(name)} is not installed here; all: potluck list")


def _model(model: Any, config: NodeConfig) -> Any:
    """A model that is installed, or in a file that the owner has allowed."""
    name = model.get("name") if isinstance(model, dict) else model
    if isinstance(name, str) and (name == config.model or name in list_models()):
        return model
    if isinstance(name, str) and (found := named_file(name)):
        if _allowed(found[0], config):
            return model
        raise ConfigError(
            f"the server's experiment has the model {_shown(name)}; a node runs only code that its owner allows:"
            f" potluck join --allow-code {found[0].name[:80]}, or --model with the node's own model"
        )
    raise ConfigError(f"the server's federation.models: {_shown(name)} is not installed here; all: potluck list models")


def _allowed(path: Path, config: NodeConfig) -> bool:
    return path.resolve() in {place.resolve() for place in config.code}


def _check_code(name: Any, what: str, config: NodeConfig) -> None:
    """Check that a partition or a metric is in no file, or in one that the owner has allowed."""
    found = named_file(name) if isinstance(name, str) else None
    if found and not _allowed(found[0], config):
        raise ConfigError(
            f"the server's experiment has the {what} {_shown(name)}; a node runs only code that its owner allows:"
            f" potluck join --allow-code {found[0].name[:80]}"
        )


def _dataset(name: Any, config: NodeConfig) -> str:
    """An installed data set; if the server's is a file, the node's own data replace it."""
    if isinstance(name, str) and name in list_datasets():
        return name
    if config.data is not None:
        return str(config.data)
    raise ConfigError(f"the server's federation.dataset, {_shown(name)}, is not installed here; {_JOIN_WITH_DATA}")


def _check_public(federation: Mapping[str, Any]) -> None:
    public, of_a_file = federation.get("public", "none"), federation["dataset"] not in list_datasets()
    if public not in (*_PUBLIC, *list_datasets()) or (public == "holdout" and of_a_file):
        raise ConfigError(f"the server's federation.public, {_shown(public)}, is no data set that is installed here")


def _table(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = tree.get(name)
    if not isinstance(table, dict):
        raise ConfigError(f"the server's experiment: {name}: expected a table, found {_shown(table)}")
    return table


def _shown(value: Any) -> str:
    return repr(value)[:80]
