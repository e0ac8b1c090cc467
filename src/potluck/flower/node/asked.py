"""What a server asks of a node: installed parts by name, and settings in which no path has a place.

A server's tables are a stranger's text. Names are those of installed parts, or of files that the node's owner has
allowed; of the data only the owner says where they lie. Initial weights of a model are named by the digest of a file,
which is the owner's own. Every other value, under whatever key, is a number or a word, in a model's `cut` and
`train_only` the name of a module, in `columns` a name with which those of a table are compared, and the content of a
tokenizer, which is data. Should a path get through all the same, `potluck.core.ground.access` and
`potluck.flower.node.confined` keep it shut.
"""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from potluck.core.federation import ClientId
from potluck.core.ground.digest import digest
from potluck.core.ground.discovery import named_file
from potluck.core.ground.errors import ConfigError
from potluck.data.datasets import list_datasets
from potluck.data.partition import list_partitions
from potluck.data.tables.tokenizer import told_text
from potluck.experiment.settings.resolve import OF_ANY_MODEL, own_options, resolve
from potluck.experiment.settings.schema import Experiment, RunConfig, dealt
from potluck.experiment.settings.strict import typed
from potluck.flower.node.config import NodeConfig
from potluck.methods import list_methods
from potluck.models import list_models
from potluck.models.initial import file_digest

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MODULE = re.compile(r"<?\w[\w.]{0,199}(#\d{1,6})?")  # a module of a network, or a place at it
_LONGEST_COLUMN = 1_000  # characters
_LOCAL_PUBLIC = ("none", "holdout")
_TABLES = ("federation", "method", "run")
_JOIN_WITH_DATA = "a node's owner chooses its data: potluck join --data ..."


def asked(tree: Mapping[str, Any], config: NodeConfig, client: ClientId, code: str | None) -> Experiment:
    """A server's experiment as this node carries it out, with no model but its own and the common one.

    Args:
        tree: the experiment's tables, as they arrived.
        config: the node's configuration.
        client: the client that this node is.
        code: digest of the method's file, if it is a file.

    Raises:
        ConfigError: a name is of nothing installed and nothing allowed, a setting is no number and no word, or the
            experiment is not valid.
    """
    if strange := sorted(map(str, tree.keys() - {*_TABLES, "preset"})):
        raise ConfigError(f"the server's experiment has a table {_shown(strange[0])}; expected {', '.join(_TABLES)}")
    federation, method, run = (_table(tree, name) for name in _TABLES)
    asked_run = _run(run, config)
    seed = typed(RunConfig, asked_run, "run", "the server's experiment").seed
    made = {
        "federation": _federation(federation, config, client, seed),
        "method": {**_settings(method, {"name"}, "method"), "name": _method(method.get("name"), config, code)},
        "run": asked_run,
    }
    return resolve(made, "the server's experiment")


def _federation(asked: Mapping[str, Any], config: NodeConfig, client: ClientId, seed: int) -> dict[str, Any]:
    named = {"dataset", "data", "public", "partition", "metrics", "models", "server_model", "columns"}
    made = _settings(asked, named, "federation")
    made["dataset"] = _dataset(asked.get("dataset"), config)
    made["public"] = _public(asked.get("public", "none"), made["dataset"])
    if "columns" in asked:
        made["columns"] = _columns_of(asked["columns"])
    if "partition" in asked:
        made["partition"] = _part(asked["partition"], "partition", list_partitions(), config)
    if "metrics" in asked:
        made["metrics"] = [_allowed(metric, "metric", config) for metric in _list(asked["metrics"], "metrics")]
    models = _list(asked["models"], "models") if "models" in asked else []
    if "server_model" in asked:
        made["server_model"] = _part(asked["server_model"], "model", list_models(), config)
    if models:
        assigned = models[dealt(client, len(models), asked.get("dealing", "turn"), seed)]
        own = config.own_model
        made["models"] = [_part(assigned, "model", list_models(), config) if own is None else own.entry()]
    if config.data is None and asked.get("data") is not None:
        raise ConfigError(f"the server's federation.data names files; {_JOIN_WITH_DATA}")
    return made


def _run(asked: Mapping[str, Any], config: NodeConfig) -> dict[str, Any]:
    """Settings of the run, computed on the owner's device: the server's may not exist here."""
    computing = asked.get("computing", {})
    if not isinstance(computing, dict):
        raise ConfigError(f"the server's run.computing: expected a table, found {_shown(computing)}")
    made = _settings(asked, {"computing"}, "run")
    made["computing"] = {**_settings(computing, {"device"}, "run.computing"), "device": config.device}
    return made


def _settings(table: Mapping[str, Any], named: Collection[str], where: str) -> dict[str, Any]:
    """A table without the entries that name something, which are read one by one."""
    return {key: _setting(value, f"{where}.{key}") for key, value in table.items() if key not in named}


def _setting(value: Any, where: str) -> Any:
    """A value in which there is no text but words; what it may be besides is checked when it is used.

    Raises:
        ConfigError: it has other text.
    """
    if isinstance(value, str) and not _WORD.fullmatch(value):
        raise ConfigError(
            f"the server's {where[:80]}: expected a number or a word, found {_shown(value)}; an experiment names no"
            " files at a node"
        )
    if isinstance(value, dict):
        return {_setting(key, where): _setting(inner, f"{where}.{key}") for key, inner in value.items()}
    return [_setting(inner, where) for inner in value] if isinstance(value, list) else value


def _method(name: Any, config: NodeConfig, code: str | None) -> str:
    """A method that is installed, or the owner's copy of the server's file."""
    if name in list_methods():
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


def _part(asked: Any, kind: str, installed: Collection[str], config: NodeConfig) -> Any:
    """A part by its name, or by a table with its name and options."""
    table = asked if isinstance(asked, dict) else {"name": asked}
    name = table.get("name")
    if name not in installed and (kind != "model" or name is None or name != config.model):
        _allowed(name, kind, config)
    where = f"federation, {kind} {_shown(name)}"
    known = table.keys() & OF_ANY_MODEL if kind == "model" else set[str]()
    said = known - {*own_options(str(name))} if known else known
    options = _settings(table, {"name", *said}, where)
    for key in sorted(said - {"weights"}):
        names = [table[key]] if isinstance(table[key], str) else _list(table[key], key)
        options[key] = [_module(one, where, key) for one in names]
    if "weights" in said:
        options["weights"] = _own_weights(table["weights"], where, config)
    return {**options, "name": name} if isinstance(asked, dict) else name


def _module(name: Any, where: str, key: str) -> str:
    """The name of a module of a network, with which nothing is done but to compare it."""
    if not isinstance(name, str) or not _MODULE.fullmatch(name):
        raise ConfigError(f"the server's {where[:80]}: {key}: expected a module's name, found {_shown(name)}")
    return name


def _own_weights(asked: Any, where: str, config: NodeConfig) -> str:
    """The owner's file of initial weights, if it has the digest that the server names."""
    if config.weights is not None and asked == file_digest(str(config.weights)):
        return str(config.weights)
    raise ConfigError(
        f"the server's {where[:80]}: weights: found {_shown(asked)}; expected the digest of the file that this node's"
        " owner named, since an experiment names no files at a node: potluck join --weights FILE"
    )


def _allowed(name: Any, kind: str, config: NodeConfig) -> str:
    """The name of something in a file that the owner has allowed."""
    found = named_file(name) if isinstance(name, str) else None
    if not isinstance(name, str) or not found:
        raise ConfigError(
            f"the server's federation: the {kind} {_shown(name)} is not installed here; all: potluck list {kind}s"
        )
    if _from_root(found[0]) not in map(_from_root, config.code):
        raise ConfigError(
            f"the server's experiment has the {kind} {_shown(name)}; a node runs only code that its owner allows:"
            f" potluck join --allow-code {found[0].name[:80]}"
            f"{', or --model with a model of its own' if kind == 'model' else ''}"
        )
    return name


def _from_root(path: Path) -> str:
    return os.path.abspath(path)


def _dataset(name: Any, config: NodeConfig) -> str:
    """An installed data set; if the server's is a file, the node's own data replace it."""
    if name in list_datasets():
        return name
    if config.data is not None:
        return str(config.data)
    raise ConfigError(f"the server's federation.dataset, {_shown(name)}, is not installed here; {_JOIN_WITH_DATA}")


def _columns_of(asked: Any) -> Any:
    """What the server says of a table's columns, with the content of its tokenizer, which is data and never a path."""
    if not isinstance(asked, dict):
        return _columns(asked)
    if "tokenizer" in asked:
        raise ConfigError(
            f"the server's federation.columns.tokenizer: found {_shown(asked['tokenizer'])}; expected the content of a"
            " tokenizer in federation.columns.known, since an experiment names no files at a node"
        )
    known = asked.get("known")
    if not isinstance(known, dict) or "tokenizer" not in known:
        return _columns(asked)
    rest = {key: value for key, value in known.items() if key != "tokenizer"}
    made = _columns({**asked, "known": rest})
    return {**made, "known": {**made["known"], "tokenizer": told_text(known)}}


def _columns(asked: Any, where: str = "federation.columns") -> Any:
    """What the columns of a table are: names of columns and of what is in them, with which data are only compared."""
    if isinstance(asked, dict):
        return {_column(key, where): _columns(value, f"{where}.{key}"[:80]) for key, value in asked.items()}
    if isinstance(asked, list):
        return [_columns(value, where) for value in asked]
    return _column(asked, where) if isinstance(asked, str) else asked


def _column(name: Any, where: str) -> str:
    if not isinstance(name, str) or not name.isprintable() or len(name) > _LONGEST_COLUMN:
        raise ConfigError(f"the server's {where}: expected a name, printable and not longer than {_LONGEST_COLUMN}")
    return name


def _public(name: Any, dataset: str) -> str:
    """Installed public examples, or those that an installed data set's own examples are."""
    if name not in (*_LOCAL_PUBLIC, *list_datasets()) or (name == "holdout" and dataset not in list_datasets()):
        raise ConfigError(f"the server's federation.public, {_shown(name)}, is no data set that is installed here")
    return name


def _table(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = tree.get(name, {} if name == "run" else None)
    if not isinstance(table, dict):
        raise ConfigError(f"the server's experiment: {name}: expected a table, found {_shown(table)}")
    return table


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"the server's federation.{name}: expected a list of {name}, found {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:80]
