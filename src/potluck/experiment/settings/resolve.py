"""Tables resolved to an experiment: every default filled in, everything checked that can be without the data."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.core.ground.discovery import config_file, named_file
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import require
from potluck.core.ground.inputs import InputShape, one_shape, shown
from potluck.core.method import Method
from potluck.core.needs import Need
from potluck.core.nets.scale import collects_options
from potluck.core.tasks.named import task_named
from potluck.core.tasks.own_metrics import with_metrics
from potluck.core.tasks.task import Task
from potluck.data.datasets import describe
from potluck.data.partition import get_partition
from potluck.data.tables.columns import Columns
from potluck.data.tables.tokenizer import vocabulary_of
from potluck.data.tables.tokens import BYTES
from potluck.experiment.settings.budget import check_budgets
from potluck.experiment.settings.devices import get_device
from potluck.experiment.settings.schema import TABLES, Experiment, FederationConfig, ModelSpec, RunConfig
from potluck.experiment.settings.strict import check_keys, typed
from potluck.experiment.settings.tables import Tree
from potluck.methods import get_method
from potluck.models import get_model
from potluck.twin.devices import read_devices

_FAMILY = ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26")
_SMALL_FAMILY = ("cnn2", "cnn3", "cnn4", "cnn5", "cnn6")
_SMALL_IMAGE = 16


def resolve(tree: Tree, source: str = "configuration") -> Experiment:
    """Check the tables and fill in every default.

    Raises:
        ConfigError: something in them is unknown, of the wrong type, or out of range.
    """
    check_keys(tree, (*TABLES, "method", "preset"), "", source, tree)
    method_tree = {"name": "fedin", **_table(tree, "method", source)}
    method_name = method_tree.pop("name")
    if not isinstance(method_name, str):
        raise ConfigError(f"{source}: method.name: expected text, found {method_name!r}")
    method = typed(get_method(method_name), method_tree, "method", source)
    run = typed(RunConfig, _with_devices(_table(tree, "run", source)), "run", source)
    federation_tree = dict(_table(tree, "federation", source))
    if isinstance(federation_tree.get("partition"), str):
        federation_tree["partition"] = {"name": federation_tree["partition"]}
    federation = typed(FederationConfig, federation_tree, "federation", source)
    cohort, quorum = run.cohort_size(federation.clients), run.rounds_close.quorum
    require(quorum <= cohort, f"{source}: run.rounds_close.quorum", f"at most the {cohort} of a cohort", quorum)
    if (rule := run.rounds_close.asynchronous) is not None:
        wanted, name = rule.buffer or rule.tiers or 1, "buffer" if rule.buffer else "tiers"
        most = f"at most the {federation.clients} clients"
        require(wanted <= federation.clients, f"{source}: run.rounds_close.asynchronous.{name}", most, wanted)
    check_budgets(run.budgets or (), federation.clients, f"{source}: run.budgets")
    task = _task(federation, source)
    if task is not None and not task.has_labels and "partition" not in federation_tree:
        federation = dataclasses.replace(federation, partition={"name": "iid"})
    partition_tree = dict(federation.partition)
    partition_name = partition_tree.pop("name", "dirichlet")
    if not isinstance(partition_name, str):
        raise ConfigError(f"{source}: federation.partition.name: expected a name; all: potluck list partitions")
    partition = typed(get_partition(partition_name), partition_tree, "federation.partition", source)
    federation = _with_defaults(federation, method, task)
    columns = federation.columns
    models = tuple(of_vocabulary(_model(model, source), columns) for model in federation.models or ())
    common = federation.server_model
    server_model = None if common is None else of_vocabulary(_model(common, source), columns)
    preset = _table(tree, "preset", source)
    return Experiment(federation, partition, models, server_model, method_name, method, run, preset, task)


def _with_devices(run: Tree) -> Tree:
    """The table `run`, with the numbers of a twin's devices instead of names of a file or of classes."""
    twin = run.get("twin")
    if not isinstance(twin, dict):
        return run
    devices = twin.get("devices")
    tables = read_devices(Path(devices)) if isinstance(devices, str) else devices
    return {**run, "twin": {**twin, "devices": named_devices(tables)}} if isinstance(tables, list) else run


def named_devices(tables: Sequence[Any]) -> list[Any]:
    """Tables of devices of a twin, those that name a class as `device` with its speed, bandwidth and name.

    Raises:
        ConfigError: there is no such class.
    """
    return [_of_class(table) if isinstance(table, dict) and "device" in table else table for table in tables]


def _of_class(table: Tree) -> Tree:
    known = get_device(str(table["device"]))
    numbers = {key: getattr(known, key) for key in ("gflops", "down_mbit", "up_mbit", "memory_mib")}
    return {**numbers, "name": table["device"], **{key: value for key, value in table.items() if key != "device"}}


def _task(federation: FederationConfig, source: str) -> Task | None:
    """The task that the configuration names, with the metrics that it adds; None if it does neither."""
    task, chosen = None, federation.task
    if chosen is not None:
        options = {} if isinstance(chosen, str) else dict(chosen)
        name = chosen if isinstance(chosen, str) else options.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"{source}: federation.task: expected a name or a table with one, found {chosen!r}")
        task = typed(type(task_named(name)), options, "federation.task", source)
    if not federation.metrics:
        return task
    for reference in federation.metrics:
        if not named_file(reference):
            raise ConfigError(f"{source}: federation.metrics: found {reference!r}; expected FILE.py:FUNCTION")
    return with_metrics(task or describe(federation.dataset, columns=federation.columns).task, federation.metrics)


def _with_defaults(federation: FederationConfig, method: Method[Any], task: Task | None) -> FederationConfig:
    """Default models and capacities, if the configuration gives none."""
    slices = Need.WIDTH_SLICES in method.needs()
    models, capacities = federation.models, federation.capacities
    if models is None:
        shape = describe(federation.dataset, task, federation.image_size, federation.columns).input_shape
        in_pieces = capacities is None and not slices and min(method.default_capacities) < 1
        models = _models_of_many_stages(one_shape(shape)) if in_pieces else _default_models(shape, slices)
    if capacities is None:
        capacities = method.default_capacities
    return dataclasses.replace(federation, models=models, capacities=capacities)


def _default_models(shape: InputShape, slices: bool) -> tuple[str | Tree, ...]:
    if isinstance(shape, Mapping):
        raise ConfigError(
            f"federation.models: the inputs have names, {shown(shape)}; name models that take them, such as your own"
            " FILE.py:NAME or hf:CONFIG.json"
        )
    if len(shape) == 1:
        return ("mlp4",) if slices else ("mlp2", "mlp3", "mlp4", "mlp5", "mlp6")
    small = min(shape[1:]) <= _SMALL_IMAGE
    if slices:
        return ({"name": "preresnet18", "width": 16} if small else "preresnet18",)
    return tuple({"name": name, "width": 32} for name in _SMALL_FAMILY) if small else _FAMILY


def _models_of_many_stages(shape: tuple[int, ...]) -> tuple[str | Tree, ...]:
    """One net that clients with little memory can train stage by stage."""
    if len(shape) == 1:
        return ("mlp6",)
    small = min(shape[1:]) <= _SMALL_IMAGE
    return ({"name": "preresnet20", "widths": [8, 16, 32]} if small else "preresnet20",)


def _model(model: str | Tree, source: str) -> ModelSpec:
    options = {} if isinstance(model, str) else dict(model)
    name = model if isinstance(model, str) else options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{source}: federation.models: expected a name or a table with one, found {model!r}")
    known = own_options(name)
    if not collects_options(get_model(name)):  # else what it builds says what it does not know
        check_keys(options, [*known, *OF_ANY_MODEL], "federation.models", f"{source}: {name}")
    said = {key: options.pop(key) for key in OF_ANY_MODEL if key in options and key not in known}
    weights = said.get("weights")
    if weights is not None and not (isinstance(weights, str) and weights):
        raise ConfigError(f"{source}: federation.models: {name}: weights: found {weights!r}; expected a file's path")
    cut, train_only = _cut(said.get("cut", ()), name, source), _train_only(said.get("train_only"), name, source)
    return ModelSpec(name, options, cut, weights, train_only)


def of_vocabulary(spec: ModelSpec, columns: Columns | None) -> ModelSpec:
    """The model with the number of tokens and the token for padding, if it asks for them and its table has them not.

    A model asks by arguments `vocab_size` and `pad_token_id`. Where a token is a byte, their defaults stand.

    Raises:
        ConfigError: the tokenizer cannot be read.
    """
    if columns is None or not columns.text:
        return spec
    found, parameters = vocabulary_of(columns), inspect.signature(get_model(spec.name)).parameters
    facts = {"vocab_size": found.size, "pad_token_id": found.padding}
    takes = facts if found is not BYTES and config_file(spec.name) else parameters  # transformers know these names
    asked = [name for name in facts if name in takes]
    if found is BYTES:
        asked = [name for name in asked if parameters[name].default is inspect.Parameter.empty]
    return dataclasses.replace(spec, options={**{name: facts[name] for name in asked}, **spec.options})


OF_ANY_MODEL = ("cut", "weights", "train_only")
"""What a model's table may say of any network, unless its builder has an option of this name."""


def own_options(name: str) -> list[str]:
    """The names of a model's own options.

    Raises:
        ConfigError: there is no such model.
    """
    parameters = inspect.signature(get_model(name)).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "scale"]


def _train_only(train_only: Any, name: str, source: str) -> tuple[str, ...]:
    """Which modules a model's table says are trained; none of them if it does not say."""
    names = [train_only] if isinstance(train_only, str) else train_only
    if names is None:
        return ()
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(one, str) and one for one in names):
        raise ConfigError(
            f"{source}: federation.models: {name}: train_only: found {train_only!r}; expected 'head' or a list of"
            " modules' names"
        )
    return tuple(names)


def _cut(cut: Any, name: str, source: str) -> tuple[str, ...]:
    """Where a model is cut, if its table says so."""
    names = list[Any](cut) if isinstance(cut, (list, tuple)) else [cut]
    if len(names) == 1 or not all(isinstance(one, str) for one in names):
        raise ConfigError(
            f"{source}: federation.models: {name}: cut: found {cut!r}; expected two names or more, of what the"
            f" extractor ends with, and further stages, and of the head; to see them: potluck inspect {name}"
        )
    return tuple(names)


def _table(tree: Tree, name: str, source: str) -> Tree:
    table = tree.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: {name}: expected a table, found {table!r}")
    return table
