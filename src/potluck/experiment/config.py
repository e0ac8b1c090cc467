"""Configuration: frozen dataclasses define it, TOML files set it, dotted keys on the command line override it.

Nothing is coerced and nothing unknown is ignored: a wrong key or value is a `ConfigError` that names the file
or argument, the dotted key, what was found and what was expected.
"""

import copy
import dataclasses
import inspect
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date, time
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import tomli_w
from pydantic import TypeAdapter, ValidationError

from potluck.core.discovery import named_file
from potluck.core.errors import ConfigError, nearest
from potluck.core.federation import ClientId
from potluck.core.fields import Checked, above, at_least, at_most, below, require
from potluck.core.fit import LocalTraining
from potluck.core.method import Method
from potluck.core.needs import Need
from potluck.core.own_metrics import with_metrics
from potluck.core.rng import fold_in
from potluck.core.schema import LARGEST
from potluck.core.task import Task, task_named
from potluck.data.datasets import check_augmentation, describe, list_datasets
from potluck.data.partition import Partition, get_partition
from potluck.engine.engine import OnDivergence
from potluck.engine.executors.choice import ExecutorName
from potluck.engine.numerics.numerics import PLAIN, Numerics
from potluck.experiment.keys import settings_of
from potluck.experiment.trackers.names import TrackerName
from potluck.methods import get_method
from potluck.models import get_model
from potluck.records import experiment_hash

Tree = dict[str, Any]
T = TypeVar("T")
_STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
Dealing = Literal["turn", "random"]
_Share = Annotated[float, above(0), at_most(1)]
_Part = Annotated[float, at_least(0), below(1)]
_Count = Annotated[int, at_least(1)]
# More are assumed to be a mistake, which would exhaust the machine before it is noticed.
_Processes = Annotated[int, at_least(1), at_most(1024)]
_Clients = Annotated[int, at_least(1), at_most(1_000_000)]
_Side = Annotated[int, at_least(1), at_most(1024)]
_PLACES = {"dataset", "public", "data", "partition", "models", "server_model", "metrics"}
_LISTS = ("federation.models", "federation.data", "federation.capacities", "federation.metrics")
_FAMILY = ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26")
_SMALL_FAMILY = ("cnn2", "cnn3", "cnn4", "cnn5", "cnn6")
_SMALL_IMAGE = 16


@dataclass(frozen=True)
class FederationConfig(Checked):
    """The federation: its data, clients and models.

    Attributes:
        dataset: a name that `potluck list datasets` shows, a folder of images, an `.npz` file, or `FILE.py:FUNCTION`.
            Its training part is divided among the clients, unless they have `data` of their own; its test part is the
            common one.
        data: for each client, its own data set, folder or file instead of a share. Classes are matched by name, or by
            number if they have no names.
        augmentation: of training images: "standard" as is usual for the data set, "none", or a list of steps, which
            are applied in this order: "crop" pads by an eighth of the side and crops at random, "flip" swaps left and
            right of half of the images, "cutout" sets a square of half the side to 0 after normalisation.
        image_size: the side in pixels to which images are brought, of training, test and public examples and of
            clients' own data: smaller once, each pixel the mean over the area that it covers, rounded as the images are
            stored; larger batch by batch, bilinearly. Default: as they are.
        train_fraction: share of the training set that is used at all, drawn at random, for small trials.
        clients: the number of clients.
        task: what targets mean: "classification", "binary", "multilabel", "regression", "next_token" or
            "token_classification", or a table with the name and options (`{ name = "classification", scores = true }`).
            Default: the data set's task, which for your own data is a classification.
        partition: a scheme of `potluck list partitions`, or `FILE.py:FUNCTION`, and its parameters. Default: Dirichlet,
            or IID for a named task whose examples have no label.
        models: names, `FILE.py:FUNCTION`, or tables (`{ name = "resnet10", width = 16 }`), dealt to the clients.
            Default: five depths of one family that suits the inputs; one sliceable net for methods that cut widths, and
            one of many stages for methods that train nets in pieces, if `capacities` has its default too.
        dealing: how `models` are dealt: in "turn", or at "random", where each client draws one by itself, with equal
            chances, so that some may be more frequent and one may be missing. `capacities` stay in turn.
        server_model: the common or global model; by default the one of `models` with the fewest parameters.
        capacities: shares of the full model that clients can train, assigned in turn. Default: the method's own, which
            are 1 for methods that ignore them.
        validation_fraction: share of a client's examples that is held out for validation.
        public: public examples: "none", "holdout" (taken from the training set), or another data set.
        public_fraction: share of the training set that is held out for "holdout".
        metrics: further metrics of your own, each `FILE.py:FUNCTION` or `FILE.py:CLASS`.
        public_labels: whether the labels of public examples are public too. Their classes must be the task's.
    """

    dataset: str = "digits"
    augmentation: str | tuple[str, ...] = "standard"
    image_size: _Side | None = None
    train_fraction: _Share = 1.0
    data: tuple[str, ...] | None = None
    clients: _Clients = 10
    partition: dict[str, Any] = field(default_factory=lambda: {"name": "dirichlet"})
    models: tuple[str | dict[str, Any], ...] | None = None
    dealing: Dealing = "turn"
    server_model: str | dict[str, Any] | None = None
    capacities: tuple[_Share, ...] | None = None
    validation_fraction: _Part = 0.1
    public: str = "none"
    public_fraction: _Part = 0.1
    public_labels: bool = False
    task: str | dict[str, Any] | None = None
    metrics: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_augmentation(self.augmentation)
        own = self.data is None or len(self.data) == self.clients
        require(own, "data", f"one for each of the {self.clients} clients", len(self.data or ()))
        known = not self.public_labels or self.public != "none"
        require(known, "public_labels", "false without federation.public", self.public_labels)
        require(self.models is None or len(self.models) > 0, "models", "at least one", self.models)


@dataclass(frozen=True)
class RoundsClose(Checked):
    """When the rounds of a run close, and what happens while too few clients are there.

    A round for which fewer clients than the quorum can be reached is not begun, and one that they leave in the middle
    is undone: the run waits for them, and nothing is counted or recorded.

    Attributes:
        quorum: the least number of clients that must answer each exchange of a round; if fewer are asked, all of them.
        deadline_s: seconds after which an exchange with other machines closes with the replies that have come; with
            fewer than the quorum it stays open. In one process every client is heard to its end.
        patience_s: seconds to wait for a quorum of other machines before the run ends with an error, from which it can
            be resumed; None waits for as long as it takes.
    """

    quorum: _Count = 1
    deadline_s: Annotated[float, above(0)] = 600.0
    patience_s: Annotated[float, above(0)] | None = None


_ROUNDS_CLOSE = RoundsClose()


@dataclass(frozen=True)
class RunConfig(Checked):
    """How the federation is run.

    Attributes:
        rounds: the number of rounds.
        cohort_fraction: share of the clients drawn each round; at least one is.
        seed: the seed of every draw in the run.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        common_test: whether each client's model is also evaluated on the common test set.
        executor: what carries out the clients' work: this process ("sequential"), or one forked process for each core
            ("workers") with the same results to the last bit; "stacked" trains similar clients as one batched
            computation, in all processes, which changes last bits; "ray" runs on your own Ray cluster, at
            `RAY_ADDRESS`. "auto" uses all cores, and stacks small nets without convolutions.
        workers: the number of processes; by default one for each core.
        computing: the device, precision and memory layout.
        threads: torch's threads, in one process. More than one changes the last bits of the results.
        memory_gib: the most memory for clients' states; the rest goes to disk.
        tolerate_failures: continue without a client that fails, or whose reply is refused, and record it.
        rounds_close: when a round closes, and what happens while too few clients are there.
        lost_rounds: how many rounds in a row may be lost before the run ends; only if failures are tolerated. A round
            is lost if a quorum was there, but fewer clients, or too few for the method, gave a reply that counts. A
            round that is undone as often in a row, since clients leave it in the middle, ends the run too.
        on_divergence: what to do about a client whose loss or reply is NaN, infinite or too large: "stop" the run, or
            "drop" the reply and continue. None means "drop" if failures are tolerated, else "stop".
        largest_value: the largest number in a reply; a larger one counts as divergence.
        outlier_factor: refuse a reply in which a tensor was moved, from what was sent, so many times as far as by the
            median of five or more clients, or is so many times as large as the median, if it was not sent; a client
            may exceed it further by its number of examples. Of fewer clients, a round is undone if a reply that stands
            out makes all others diverge. 0 compares nothing, as None does; `potluck serve` takes 100 for None.
        track: where each round's numbers go besides the run's folder: "tensorboard", "mlflow", "wandb" or "trackio", or
            several of them. Each needs the extra of its name: `pip install 'potluck[tensorboard]'`.
    """

    rounds: _Count = 20
    cohort_fraction: _Share = 1.0
    seed: Annotated[int, at_least(0)] = 0
    evaluate_every: _Count = 1
    common_test: bool = True
    executor: ExecutorName = "auto"
    workers: _Processes | None = None
    computing: Numerics = PLAIN
    threads: _Processes = 1
    memory_gib: Annotated[float, at_least(0)] = 4.0
    tolerate_failures: bool = False
    rounds_close: RoundsClose = _ROUNDS_CLOSE
    lost_rounds: _Count = 10
    on_divergence: OnDivergence | None = None
    largest_value: Annotated[float, above(0), below(1e38)] = LARGEST
    outlier_factor: Annotated[float, at_least(0)] | None = None
    track: TrackerName | tuple[TrackerName, ...] = ()

    def __post_init__(self) -> None:
        alone = self.threads == 1 or self.executor != "workers"
        require(alone, "threads", "1 with the executor 'workers', which has one thread for each process", self.threads)
        sensible = not self.outlier_factor or self.outlier_factor > 1
        require(sensible, "outlier_factor", "more than 1, or 0 to compare nothing", self.outlier_factor)

    def cohort_size(self, clients: int) -> int:
        """How many of the clients are drawn each round."""
        return max(1, int(self.cohort_fraction * clients + 1e-9))  # so that 0.29 of 100 is 29


TABLES: Mapping[str, type[Any]] = {"federation": FederationConfig, "run": RunConfig}
"""The tables of a configuration whose keys are always the same; those of `method` are its hyper-parameters."""


@dataclass(frozen=True)
class ModelSpec:
    """A model by name with its options; the same text always means the same network."""

    name: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        return f"{self.name}({shown})" if shown else self.name


@dataclass(frozen=True)
class Experiment:
    """A resolved configuration: every default filled in, everything checked that can be without the data.

    Attributes:
        preset: by dotted key, the defaults that a preset, such as the demonstration's, has replaced.
        task: what targets mean; None for the data set's own.
    """

    federation: FederationConfig
    partition: Partition
    models: tuple[ModelSpec, ...]
    server_model: ModelSpec | None
    method_name: str
    method: Method[Any]
    run: RunConfig
    preset: Mapping[str, Any] = field(default_factory=dict[str, Any])
    task: Task | None = None

    @property
    def named_models(self) -> tuple[ModelSpec, ...]:
        """The clients' models, and the server's if it is named."""
        return self.models if self.server_model is None else (*self.models, self.server_model)

    def model_of(self, client: ClientId) -> ModelSpec:
        """The model that is dealt to a client."""
        return self.models[dealt(client, len(self.models), self.federation.dealing, self.run.seed)]

    @property
    def files(self) -> tuple[str, ...]:
        """The user's Python files, as they were typed: of method, models, partition, data and metrics."""
        federation = self.federation
        parts = (
            self.method_name,
            *(spec.name for spec in self.named_models),
            str(federation.partition.get("name", "")),
            federation.dataset,
            federation.public,
            *(federation.data or ()),
            *(federation.metrics or ()),
        )
        return tuple(dict.fromkeys(str(found[0]) for name in parts if (found := named_file(name))))

    def settings(self) -> Tree:
        """Every setting as nested tables; None for those not set."""
        federation = dataclasses.asdict(self.federation)
        federation["partition"] = {
            **self.federation.partition,
            **dataclasses.asdict(_dataclass(self.partition)),
        }
        method = {"name": self.method_name, **dataclasses.asdict(self.method)}
        return {"federation": federation, "method": method, "run": dataclasses.asdict(self.run)}

    def tree(self) -> Tree:
        """The configuration as nested tables that resolve to the same experiment."""
        preset = {"preset": dict(self.preset)} if self.preset else {}
        return without_none({**preset, **self.settings()})

    def toml(self) -> str:
        """The configuration as a TOML file."""
        words = self.preset_words
        comment = f"# {words}; [preset] holds the defaults that they replace.\n" if words else ""
        return comment + tomli_w.dumps(self.tree())

    @property
    def preset_words(self) -> str | None:
        """The changes of a preset, as text; None if there are none."""
        changed: list[str] = []
        for key, default in self.preset.items():
            value: Any = self.settings()
            for name in key.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            if value != default:
                changed.append(f"{key} {value} (default {default})")
        return f"preset of {self.federation.dataset}: {', '.join(changed)}" if changed else None

    @property
    def experiment_id(self) -> str:
        """Eight hex digits shared by runs of one experiment with different seeds and lengths."""
        return experiment_hash(self.tree())


def dealt(client: ClientId, count: int, dealing: Dealing, seed: int) -> int:
    """Which of so many models a client is dealt; each client's draw has a key of its own, whatever others there are."""
    return client % count if dealing == "turn" else fold_in(seed, "federation", "dealing", client).seed % count


def read_toml(path: Path) -> Tree:
    """The tables of a TOML file.

    Raises:
        ConfigError: there is no such file, or it is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error


Assignments = Sequence[str] | Mapping[str, Any]
"""Values for dotted keys: text `dotted.key=value`, in which a value is TOML or else text, or Python values by key."""


def read_experiment(path: Path) -> Tree:
    """The tables of a user's TOML file, in which relative paths may start in the file's own folder.

    A path that leads to a file or folder there is taken from there, and any other from the current folder.

    Raises:
        ConfigError: there is no such file, or it is not TOML.
    """
    tree, folder = read_toml(path), path.parent
    federation, method = tree.get("federation"), tree.get("method")
    if isinstance(federation, dict):
        for key in _PLACES & federation.keys():
            federation[key] = _from_folder(federation[key], folder)
    if isinstance(method, dict) and "name" in method:
        method["name"] = _from_folder(method["name"], folder)
    return tree


def _from_folder(value: Any, folder: Path) -> Any:
    """A path, or a table or list of them, as from the current folder."""
    if isinstance(value, list):
        return [_from_folder(one, folder) for one in value]
    if isinstance(value, dict) and "name" in value:
        return {**value, "name": _from_folder(value["name"], folder)}
    if not isinstance(value, str) or value in list_datasets():
        return value
    file, inside = named_file(value) or (Path(value), "")
    there = folder / file
    if file.is_absolute() or folder == Path(".") or not there.exists():
        return value
    return f"{there}:{inside}" if inside else str(there)


def override(tree: Tree, assignments: Assignments) -> Tree:
    """The tables with assignments applied.

    The last assignment to a key counts; otherwise their order does not matter: tables are applied before keys in them.

    Raises:
        ConfigError: an assignment has no `=`, or leads through something that is not a table.
    """
    tree, assigned = copy.deepcopy(tree), _assigned(assignments)
    for key, value in sorted(assigned.items(), key=lambda item: item[0].count(".")):
        *tables, last = key.split(".")
        place = tree
        for name in tables:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{key}: {name} is not a table; give it whole, as {'.'.join(tables)}=...")
        if last == "partition" and isinstance(value, str):
            same = isinstance(place.get(last), dict) and place[last].get("name") == value
            place[last] = place[last] if same else {"name": value}
        else:
            place[last] = value
        if last == "epochs" and ".".join([*tables, "steps"]) not in assigned:
            place.pop("steps", None)  # as in `merged`
        if isinstance(replaced := tree.get("preset"), dict):
            replaced.pop(key, None)  # it is no longer the preset's choice
    return tree


def _assigned(assignments: Assignments) -> Tree:
    """The assigned values by dotted key."""
    if isinstance(assignments, Mapping):
        return dict(assignments)
    found: Tree = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            torn = (
                '; quotes keep a value with spaces whole: "key=[1, 2]"' if assignment.endswith(("]", "}", ",")) else ""
            )
            raise ConfigError(f"{assignment!r}: expected key=value, such as run.rounds=10{torn}")
        found[key.strip()] = _listed(text) if key.strip() in _LISTS else _value(text)
    return found


def _listed(text: str) -> Any:
    """The value of a key that holds a list; on the command line its brackets and quotes may be left out."""
    value = _value(text)
    if isinstance(value, list):
        return value
    inside = _value(f"[{text}]")
    return inside if isinstance(inside, list) else [part.strip() for part in text.split(",")]


def merged(base: Tree, changes: Tree) -> Tree:
    """The tables of `base` with those of `changes` laid over them.

    Steps in `base`, which decide how long a training is, do not outlive epochs in `changes`.
    """
    laid = {key: value for key, value in base.items() if key != "steps" or "epochs" not in changes}
    for key, value in changes.items():
        inner = base.get(key)
        laid[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return laid


def resolve(tree: Tree, source: str = "configuration") -> Experiment:
    """Check the tables and fill in every default.

    Raises:
        ConfigError: something in them is unknown, of the wrong type, or out of range.
    """
    _known(tree, (*TABLES, "method", "preset"), "", source, tree)
    method_tree = {"name": "fedin", **_table(tree, "method", source)}
    method_name = method_tree.pop("name")
    if not isinstance(method_name, str):
        raise ConfigError(f"{source}: method.name: expected text, found {method_name!r}")
    method = typed(get_method(method_name), method_tree, "method", source)
    run = typed(RunConfig, _table(tree, "run", source), "run", source)
    federation_tree = dict(_table(tree, "federation", source))
    if isinstance(federation_tree.get("partition"), str):
        federation_tree["partition"] = {"name": federation_tree["partition"]}
    federation = typed(FederationConfig, federation_tree, "federation", source)
    cohort, quorum = run.cohort_size(federation.clients), run.rounds_close.quorum
    require(quorum <= cohort, f"{source}: run.rounds_close.quorum", f"at most the {cohort} of a cohort", quorum)
    task = _task(federation, source)
    if task is not None and not task.has_labels and "partition" not in federation_tree:
        federation = dataclasses.replace(federation, partition={"name": "iid"})
    partition_tree = dict(federation.partition)
    partition_name = partition_tree.pop("name", "dirichlet")
    if not isinstance(partition_name, str):
        raise ConfigError(f"{source}: federation.partition.name: expected a name; all: potluck list partitions")
    partition = typed(get_partition(partition_name), partition_tree, "federation.partition", source)
    federation = _with_defaults(federation, method, task)
    models = tuple(_model(model, source) for model in federation.models or ())
    server_model = None if federation.server_model is None else _model(federation.server_model, source)
    preset = _table(tree, "preset", source)
    return Experiment(federation, partition, models, server_model, method_name, method, run, preset, task)


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
    return with_metrics(task or describe(federation.dataset).task, federation.metrics)


def _with_defaults(federation: FederationConfig, method: Method[Any], task: Task | None) -> FederationConfig:
    """Default models and capacities, if the configuration gives none."""
    slices = Need.WIDTH_SLICES in method.needs()
    models, capacities = federation.models, federation.capacities
    if models is None:
        shape = describe(federation.dataset, task, federation.image_size).input_shape
        in_pieces = capacities is None and not slices and min(method.default_capacities) < 1
        models = _models_of_many_stages(shape) if in_pieces else _default_models(shape, slices)
    if capacities is None:
        capacities = method.default_capacities
    return dataclasses.replace(federation, models=models, capacities=capacities)


def _default_models(shape: tuple[int, ...], slices: bool) -> tuple[str | Tree, ...]:
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
    parameters = inspect.signature(get_model(name)).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "scale"]
    _known(options, known, "federation.models", f"{source}: {name}")
    return ModelSpec(name, options)


def typed(cls: type[T], tree: Tree, where: str, source: str) -> T:
    """A dataclass from a table, strictly; only lists are accepted for tuples, as in JSON mode.

    A table for a field that is itself a dataclass sets the keys that it names and leaves the others at their defaults.
    """
    _without_dates(tree, where, source)
    try:
        return _adapter(cls).validate_json(json.dumps(_over_defaults(cls, tree)), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explained(error, cls, where)}") from error
    except TypeError as error:  # from a plug-in's own checks
        raise ConfigError(f"{source}: {where}: {error}") from error


@lru_cache(maxsize=256)
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """The strict checks of a dataclass, which take some hundredths of a second to make."""
    _make_strict(cls)
    return TypeAdapter(cls)


def _without_dates(node: Any, where: str, source: str) -> None:
    """Check that there are no TOML dates or times, which no setting is; the error names the first."""
    if isinstance(node, date | time):
        raise ConfigError(f"{source}: {where}: found a date or time, {node}; expected a number or text, in quotes")
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        _without_dates(value, f"{where}.{key}", source)


def _over_defaults(cls: type[Any], tree: Tree) -> Tree:
    """The tables laid over the defaults of those fields that are dataclasses."""
    laid = dict(tree)
    for spec in fields(cls):
        table = tree.get(spec.name)
        if is_dataclass(spec.default) and not isinstance(spec.default, type) and isinstance(table, dict):
            laid[spec.name] = merged(without_none(dataclasses.asdict(spec.default)), table)
    return laid


def _make_strict(cls: type[Any]) -> None:
    """Have pydantic refuse unknown keys in this dataclass and in nested ones."""
    if "__pydantic_config__" not in dir(cls):
        cls.__pydantic_config__ = _STRICT
    for hint in get_type_hints(cls).values():
        if inner := _dataclass_in(hint):
            _make_strict(inner)


def _explained(error: ValidationError, cls: type[Any], where: str) -> str:
    """The first problem on one line: dotted key, what was expected, what was found."""
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"] if not _is_kind(part)]
    key = ".".join([where, *place])
    if problem["type"] == "unexpected_keyword_argument":
        near = [".".join([where, *place[:-1], name]) for name in nearest(place[-1], _names_at(cls, place[:-1]))]
        inside = [f"{where}.{one.key}" for one in settings_of(cls) if one.key.endswith(f".{place[-1]}")]
        near = inside or keys_called(place[-1]) or near
        return f"unknown key {key}; nearest: {', '.join(near)}" if near else f"unknown key {key}; it has no options"
    if problem["type"] == "value_error":
        return f"{'.'.join([where, *place])}.{problem['msg'].removeprefix('Value error, ')}"
    hint = f"; write [{json.dumps(problem['input'])}]" if problem["type"] in ("tuple_type", "list_type") else ""
    return f"{key}: {problem['msg'][0].lower()}{problem['msg'][1:]}, found {problem['input']!r}{hint}"


def _is_kind(part: int | str) -> bool:
    """Whether a part of the place of a problem is a type that the value could have had, which is no key."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "float", "bool"))


def _names_at(cls: type[Any], place: list[str]) -> list[str]:
    for name in place:
        hints = get_type_hints(cls)
        if name not in hints:  # of a list or a table of tables, the number or the key of one
            continue
        inner = _dataclass_in(hints[name])
        if inner is None:
            return []
        cls = inner
    return [spec.name for spec in fields(cls)]


def _dataclass_in(hint: Any) -> type[Any] | None:
    """The dataclass of a type hint `X` or `X | None`."""
    kinds = [hint, *get_args(hint)]
    return next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)


def _known(tree: Tree, names: Sequence[str], where: str, source: str, table: Tree | None = None) -> None:
    """Check that the tree has these keys alone; `table` is the whole configuration, whose method has keys too."""
    for key, value in tree.items():
        if key not in names:
            dotted = f"{where}.{key}" if where else key
            near = [f"{where}.{name}" if where else name for name in nearest(key, names)]
            asked = f"{key}.{next(iter(value))}" if isinstance(value, dict) and value else key
            elsewhere = keys_called(asked, _method_in(table or {})) or keys_called(key)
            hint = f"; nearest: {', '.join(elsewhere or near)}" if names else "; it has no options"
            raise ConfigError(f"{source}: unknown key {dotted}{hint}")


def keys_called(name: str, method: type[Any] | None = None) -> list[str]:
    """The dotted keys that end in this name, the shortest first, without those that lie deep below the first.

    Of the method's they are those that every method has, unless a method is given.

    Args:
        name: a key's last part, or several of them, such as `training.lr`.
        method: whose hyper-parameters count too.
    """
    known = [f"{table}.{one.key}" for table, cls in TABLES.items() for one in settings_of(cls)]
    known += [f"federation.partition.{one.key}" for one in settings_of(get_partition("dirichlet"))]
    known += [f"method.training.{one.key}" for one in settings_of(LocalTraining)]
    known += [f"method.{one.key}" for one in settings_of(method)] if method is not None else []
    found = sorted((key for key in dict.fromkeys(known) if key.endswith(f".{name}")), key=_depth)
    return [key for key in found if _depth(key) <= _depth(found[0]) + 1]


def _depth(key: str) -> int:
    return key.count(".")


def _method_in(tree: Tree) -> type[Any] | None:
    """The method that a configuration names, if it does so rightly."""
    table = tree.get("method", {})
    try:
        return get_method(str(table.get("name", "fedin"))) if isinstance(table, dict) else None
    except ConfigError:  # which is reported once the keys are right
        return None


def _table(tree: Tree, name: str, source: str) -> Tree:
    table = tree.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: {name}: expected a table, found {table!r}")
    return table


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def without_none(node: Any) -> Any:
    """The tree in TOML's types: no nulls, no tuples."""
    if isinstance(node, dict):
        return {key: without_none(value) for key, value in node.items() if value is not None}
    return [without_none(value) for value in node] if isinstance(node, (list, tuple)) else node


def _dataclass(value: Any) -> Any:
    if not is_dataclass(value):
        raise ConfigError(f"{type(value).__name__} is not a dataclass; a partition's parameters must be fields")
    return value
