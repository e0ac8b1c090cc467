"""Assembles a federation from a resolved configuration: data, partition, models, capacities."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from potluck.attackers.data import poisoned
from potluck.core.federation import Builder, ClientId, Federation, Site
from potluck.core.ground.digest import digest
from potluck.core.ground.errors import ConfigError, DataError, PotluckError, explained
from potluck.core.ground.inputs import Inputs, InputShape, by_name, count_of, rows_of, shape_of, shown
from potluck.core.ground.machine import check_fits
from potluck.core.ground.rng import Key, fold_in, isolated
from potluck.core.needs import Offer
from potluck.core.nets.scale import cutting_at
from potluck.core.requests.examples import Examples
from potluck.core.tasks.task import Task
from potluck.data.dataset import Dataset, Description, arrays_digest
from potluck.data.datasets import common_reading, describe, load
from potluck.data.federate import MatchedClasses, fingerprint, matching_test_parts, with_validation
from potluck.data.tables.columns import Columns
from potluck.experiment.federation.needs import check_needs, needs_of
from potluck.experiment.federation.own_classes import (
    OwnHeads,
    Parts,
    check_has_classes,
    classes_held,
    of_classes,
)
from potluck.experiment.settings.schema import Experiment, FederationConfig, ModelSpec
from potluck.models import get_model
from potluck.models.contract import StagedNet
from potluck.models.fitting import FeatureFit, fitted
from potluck.models.initial import Begun


@dataclass(frozen=True)
class Assembly:
    """A federation, and the facts about its data for the manifest.

    Attributes:
        data_checksum: of the data set that is divided, or whose test part is the common one.
        partition_fingerprint: of the division of examples among clients.
        classes: their names in the order of their numbers.
        here: whether clients' examples are on this machine.
        initial_weights: digests of the models' files of initial weights, by the files as they were typed.
        names: of the clients, in the order of their numbers; none if they have none.
    """

    federation: Federation
    data_checksum: str
    partition_fingerprint: str
    classes: tuple[str, ...] = ()
    here: bool = True
    initial_weights: Mapping[str, str] = field(default_factory=dict[str, str])
    names: tuple[str, ...] = ()


def assemble(experiment: Experiment, *, checked: bool = False) -> Assembly:
    """Load the data and assign them, with models and capacities, to the clients.

    Args:
        experiment: the experiment.
        checked: whether it is known that the federation offers what method and rounds need, as a node knows whose
            server has checked the whole of which it sees a part.

    Raises:
        ConfigError: the federation lacks what the method needs, or asynchronous rounds a clock; raised before any data
            are loaded.
        DataError: the data are missing or cannot be divided as configured.
    """
    experiment.run.computing.make_ready()
    config = experiment.federation
    matched = matched_classes(experiment)
    task = (matched.width, matched.common.input_shape)
    architectures, server_architecture = architectures_of(experiment, *task)
    assigned = {client: experiment.model_of(client).architecture for client in range(config.clients)}
    offer = Offer(
        input_shape=matched.common.input_shape,
        architectures=architectures,
        assigned=assigned,
        server_architecture=server_architecture,
        public=config.public != "none",
        public_labels=config.public_labels,
        unvalidated=() if config.validation_fraction > 0 else tuple(assigned),
        own_classes=config.classes == "own",
        task=matched.common.task,
        real_inputs=None,
    )
    if not checked:
        experiment.run.check_has_clock()
        check_needs(needs_of(experiment.method), experiment.method_name, offer)
    _check_partition(experiment, matched.common.task)
    if config.classes == "own":
        check_has_classes(matched.common.task)

    dataset = _loaded(experiment, config.dataset, experiment.task)
    if config.data:
        dataset = matched.relabelled(dataset, dataset.name)
    private, public = _private_and_public(experiment, dataset)
    dealt = _own(experiment, matched) if config.data else _dealt(experiment, dataset, private)
    if config.classes == "own":
        heads = own_heads(experiment, *task)
        held = [classes_held(parts) for parts in dealt.parts]
        assigned = {client: heads.named(experiment.model_of(client), held[client]) for client in assigned}
        architectures = {**architectures, **heads.builders}
        dealt = replace(dealt, parts=[of_classes(p, numbers) for p, numbers in zip(dealt.parts, held, strict=True)])
    capacities = list(islice(cycle(config.capacities or (1.0,)), config.clients))
    sites = {
        client: Site(client, assigned[client], *parts, capacity=capacities[client])
        for client, parts in enumerate(dealt.parts)
    }
    if (attackers := experiment.run.attackers) is not None:
        for client in attackers.among(sorted(sites), experiment.run.seed):
            key = fold_in(experiment.run.seed, "attackers", "data", client)
            sites[client] = poisoned(sites[client], attackers, dataset.num_classes, key)
    federation = Federation(
        sites=sites,
        architectures=architectures,
        server_architecture=server_architecture,
        num_classes=dataset.num_classes,
        public=public,
        public_labels=config.public_labels,
        test=dataset.test,
        task=dataset.task,
    )
    facts = (dataset.checksum, dealt.fingerprint, matched.classes)
    return Assembly(federation, *facts, initial_weights=experiment.initial_weights(), names=dealt.names)


def task_of(experiment: Experiment) -> Task:
    """The task that the experiment names, or else that of its data set."""
    config = experiment.federation
    return experiment.task or describe(config.dataset, columns=config.columns).task


def common_of(experiment: Experiment, matched: MatchedClasses) -> tuple[Examples | None, Examples | None]:
    """The public examples and the common test set, on a machine that may not have the data that they are part of.

    Args:
        experiment: the experiment.
        matched: the federation's classes.

    Raises:
        DataError: public examples are needed and missing, or have a class that the federation lacks.
    """
    try:
        dataset = _loaded(experiment, experiment.federation.dataset, experiment.task)
    except DataError:
        if experiment.federation.public != "none":
            raise
        return None, None
    dataset = matched.relabelled(dataset, dataset.name)
    return _private_and_public(experiment, dataset)[1], dataset.test


def assemble_server(experiment: Experiment, matched: MatchedClasses | None = None) -> Federation:
    """The federation of a server whose clients are on other machines.

    Args:
        experiment: the experiment.
        matched: the federation's classes; by default those of its data set.

    Raises:
        ConfigError: there is no such data set, a model cannot be built, models of rounds are to be kept, or there
            is a twin.
        DataError: public examples are needed and missing.
    """
    experiment.run.computing.make_ready()
    if experiment.run.twin is not None:
        raise ConfigError("run.twin: expected none with clients on other machines, whose time is real; leave it out")
    if experiment.run.keep_every is not None:
        raise ConfigError(
            f"run.keep_every: found {experiment.run.keep_every}; expected none with clients on other machines, which"
            " keep their latest state alone; leave it out"
        )
    if experiment.run.attackers is not None:
        raise ConfigError("run.attackers: expected none with clients on other machines; leave it out")
    matched = matched or common_classes(experiment)
    public, test = common_of(experiment, matched)
    architectures, server_architecture = architectures_of(experiment, matched.width, matched.common.input_shape)
    return Federation(
        sites={},
        architectures=architectures,
        server_architecture=server_architecture,
        num_classes=matched.width,
        public=public,
        public_labels=experiment.federation.public_labels,
        test=test,
        task=matched.common.task,
    )


def public_digest(public: Examples | None) -> str | None:
    """Text that identifies the public examples as they are stored; None if there are none."""
    return None if public is None else arrays_digest(*by_name(public.inputs).values())


def _check_partition(experiment: Experiment, task: Task) -> None:
    """Check that a partition by label has labels.

    Raises:
        ConfigError: it has none.
    """
    if experiment.federation.data is None and not task.has_labels and getattr(experiment.partition, "by_label", True):
        name = experiment.federation.partition.get("name", "dirichlet")
        raise ConfigError(
            f"federation.partition: {name} divides examples by label, and those of a {task.name} have none; use"
            " federation.partition=iid, or give each client its own federation.data"
        )


def _private_and_public(experiment: Experiment, dataset: Dataset) -> tuple[Tensor, Examples | None]:
    """Rows of the training set that are divided among clients, and the public examples."""
    config, key = experiment.federation, fold_in(experiment.run.seed, "federation")
    used = _used(dataset, config.train_fraction, key.fold("used"))
    other = None if config.public in ("none", "holdout") else _labelled(experiment, dataset)
    return _public(dataset, used, config, other, key.fold("public"))


@dataclass(frozen=True)
class _Dealt:
    """Each client's training, validation and test examples, a digest of the division, and the clients' names."""

    parts: list[Parts]
    fingerprint: str
    names: tuple[str, ...] = ()


def own_heads(experiment: Experiment, num_classes: int, input_shape: InputShape) -> OwnHeads:
    """The builders of the experiment's models with outputs for some of the classes."""

    def builder_for(spec: ModelSpec, outputs: int) -> Builder:
        return builder_of(spec, outputs, input_shape, experiment.feature_fit)

    return OwnHeads(builder_for, num_classes)


def _dealt(experiment: Experiment, dataset: Dataset, private: Tensor) -> _Dealt:
    """The clients' shares of one data set."""
    config, key = experiment.federation, fold_in(experiment.run.seed, "federation")
    train_labels, test_labels = (dataset.task.labels(of) for of in (dataset.train_targets, dataset.test_targets))
    by = _owners(experiment, dataset) if getattr(experiment.partition, "by_owner", False) else None
    divided, matching = by or (train_labels, test_labels)
    dealt = experiment.partition(divided[private], config.clients, key.fold("partition"))
    parts = [private[part] for part in dealt]
    tests = matching_test_parts(divided, parts, matching, key.fold("test"))
    found: list[Parts] = []
    fraction, settled = config.validation_fraction, dict[int, bool]()
    for client, (part, test) in enumerate(zip(parts, tests, strict=True)):
        train, validation = with_validation(
            part, train_labels, fraction, key.fold("validation", client), dataset.groups, settled
        )
        found.append((dataset.train.take(train), dataset.train.take(validation), dataset.test.take(test)))
    named = dataset.owner_names if by else None
    return _Dealt(found, fingerprint(parts), tuple(named[int(divided[part[0]])] for part in parts) if named else ())


def _owners(experiment: Experiment, dataset: Dataset) -> tuple[Tensor, Tensor]:
    """Whose the training and the test examples are."""
    if dataset.owners is None:
        name = experiment.federation.partition["name"]
        raise DataError(
            f"federation.partition: {name} divides by owner, and {dataset.name} does not say whose its examples are;"
            " name a column of it in federation.columns.by, or give arrays owner_train and owner_test"
        )
    return dataset.owners


def common_classes(experiment: Experiment) -> MatchedClasses:
    """The classes of the experiment's data set, which is not loaded.

    Raises:
        ConfigError: there is no such data set.
        DataError: it cannot be read.
    """
    return MatchedClasses.matching(common_data(experiment))


def matched_classes(experiment: Experiment) -> MatchedClasses:
    """The classes of the data set and of clients' own data on this machine, none of which is loaded.

    Raises:
        ConfigError: there is no such data set.
        DataError: data cannot be read, or their classes cannot be matched.
    """
    places = experiment.federation.data or ()
    common = common_data(experiment)
    own = {named(client, place): _described(experiment, place) for client, place in enumerate(places)}
    return MatchedClasses.matching(common, own)


def common_data(experiment: Experiment) -> Description:
    """The description of the experiment's data set, whose test part is the common one.

    Raises:
        ConfigError: there is no such data set.
        DataError: it cannot be read.
    """
    return _described(experiment, experiment.federation.dataset)


def _described(experiment: Experiment, place: str) -> Description:
    config = experiment.federation
    return describe(place, experiment.task, config.image_size, columns_of(experiment, place))


def columns_of(experiment: Experiment, place: str | Path) -> Columns | None:
    """What the columns of a table are, for one of the experiment's data sets: all are read as the common one is.

    None if the experiment speaks of none.

    Raises:
        DataError: the common data cannot be read.
    """
    config = experiment.federation
    if config.columns is None or config.columns.known is not None or str(place) == config.dataset:
        return config.columns
    reading = common_reading(config.dataset, experiment.task, config.columns)
    return (
        config.columns if reading is None else replace(config.columns, by=None, tokenizer=None, known=reading.table())
    )


def _loaded(experiment: Experiment, place: str | Path, task: Task | None) -> Dataset:
    config = experiment.federation
    columns = columns_of(experiment, place)
    return load(place, augmentation=config.augmentation, image_size=config.image_size, task=task, columns=columns)


def named(client: ClientId, place: str | Path) -> str:
    """A client with data of its own, as messages name it."""
    return f"client {client} ({place})"


def _own(experiment: Experiment, matched: MatchedClasses) -> _Dealt:
    """Each client's own data."""
    places = enumerate(experiment.federation.data or ())
    datasets = [matched.relabelled(load_own(experiment, place), named(client, place)) for client, place in places]
    parts = [own_parts(experiment, client, dataset) for client, dataset in enumerate(datasets)]
    fingerprint = digest(" ".join(dataset.checksum for dataset in datasets).encode())
    return _Dealt(parts, fingerprint, _names_of(experiment.federation.data or ()))


def _names_of(places: Sequence[str]) -> tuple[str, ...]:
    """What clients with data of their own are called: after the files or folders, as far as these differ."""
    short = [Path(place).stem for place in places]
    return tuple(short if len(set(short)) == len(short) else places)


def load_own(experiment: Experiment, place: str | Path) -> Dataset:
    """A client's own data, with their own numbers for classes.

    Raises:
        DataError: they cannot be read.
    """
    return _loaded(experiment, place, task_of(experiment))


def own_parts(experiment: Experiment, client: ClientId, dataset: Dataset) -> Parts:
    """A client's training, validation and test examples, of its own data with the federation's numbers."""
    common = common_data(experiment)
    if dataset.train.input_shape != common.input_shape:
        found, expected = shown(dataset.train.input_shape), shown(common.input_shape)
        raise DataError(
            f"{dataset.name}, of client {client}: inputs of shape {found}; expected {expected}, as in {common.name}"
        )
    draw = fold_in(experiment.run.seed, "federation", "validation", client)
    rows = torch.arange(len(dataset.train_targets))
    fraction, labels = experiment.federation.validation_fraction, dataset.task.labels(dataset.train_targets)
    train, validation = with_validation(rows, labels, fraction, draw, dataset.groups, {})
    return dataset.train.take(train), dataset.train.take(validation), dataset.test


def architectures_of(
    experiment: Experiment, num_classes: int, input_shape: InputShape
) -> tuple[dict[str, Builder], str]:
    """Builders of all models that the experiment names, for a task, and the name of the server's.

    Raises:
        ConfigError: one cannot be built.
    """
    fit = experiment.feature_fit
    builders = {spec.architecture: builder_of(spec, num_classes, input_shape, fit) for spec in experiment.named_models}
    if experiment.server_model is not None:
        return builders, experiment.server_model.architecture
    return builders, min(builders, key=lambda name: _parameters(name, builders[name]))  # the first of equals


def _parameters(name: str, build: Builder) -> int:
    with isolated(Key((name,))):
        return sum(parameter.numel() for parameter in build().parameters())


def builder_of(spec: ModelSpec, num_classes: int, input_shape: InputShape, fit: FeatureFit | None = None) -> Builder:
    """The builder of this model for a task.

    Args:
        spec: the model.
        num_classes: the width of an output.
        input_shape: of one prepared input, or of each of the named ones with its type; models get it as it is.
        fit: how the model's features are brought to one width; None if they stay as they are.

    Raises:
        ConfigError: it cannot be built, or does not fit in this machine's memory, its file of initial weights or its
            `train_only` do not fit it, or its features cannot be brought to one width.
    """
    build, where = partial(get_model(spec.name), num_classes, input_shape, **spec.options), f"federation.models: {spec}"
    cutting_at(build, spec.cut)
    _check_memory(build, where)
    try:
        with isolated(Key((where,))):
            net: object = build()
    except PotluckError:
        raise
    except Exception as error:  # the user's own code, or options of the wrong kind
        raise ConfigError(f"{where}: cannot be built: {explained(error)}") from error
    if not isinstance(net, nn.Module):
        raise ConfigError(f"{where}: returned {type(net).__name__}; expected a torch.nn.Module: return the network")
    if next(net.parameters(), None) is None:
        raise ConfigError(
            f"{where}: {type(net).__name__} has no weights; expected layers, such as nn.Linear, that learn"
        )
    if spec.cut and isinstance(net, StagedNet):
        raise ConfigError(f"{where}: {type(net).__name__} is in stages, which say where it is cut; leave out `cut`")
    lazy = [name for name, tensor in (*net.named_parameters(), *net.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"{where}: {lazy[0]} has no shape yet; give lazy layers their sizes, or pass one batch through the network"
            " before it is returned"
        )
    if spec.weights is not None or spec.train_only:
        named = f"federation.models: {spec.name}"
        with isolated(Key((named,))):
            build = Begun(
                build, net, named, input_shape, weights=spec.weights, train_only=spec.train_only, cut=spec.cut
            )
    return build if fit is None else fitted(build, fit, num_classes, input_shape, where)


class _Unfilled(TorchFunctionMode):
    """Skip the random filling of tensors without storage, for which torch would first load its compiler."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "erfinv_") and args:
            return args[0]
        return func(*args, **(kwargs or {}))


def _check_memory(build: Builder, where: str) -> None:
    """Check, before a network is built, that its weights and gradients fit in this machine's memory."""
    try:
        with isolated(Key((where,))), torch.device("meta"), _Unfilled():
            net = build()
        tensors = [*net.parameters(), *net.buffers(), *(p for p in net.parameters() if p.requires_grad)]
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    except Exception:  # it needs real tensors; any other error is reported when it is built
        return
    check_fits(needed, f"{where}: its weights and gradients", "make it smaller", ConfigError)


def _used(dataset: Dataset, fraction: float, key: Key) -> Tensor:
    """Rows of the training set that are used at all, in order."""
    rows = torch.arange(len(dataset.train_targets))
    if fraction == 1:
        return rows
    count = round(fraction * len(rows))
    if count < 1:
        raise ConfigError(f"federation.train_fraction: {fraction} of {len(rows)} examples is none")
    return rows[torch.randperm(len(rows), generator=key.generator())[:count]].sort().values


def _labelled(experiment: Experiment, dataset: Dataset) -> Dataset:
    """The data set of the public examples, which has the task's classes if their labels are public."""
    config = experiment.federation
    columns = columns_of(experiment, config.public)
    if config.public_labels:
        _check_same_classes(dataset.description, describe(config.public, columns=columns))
    return load(config.public, augmentation="none", image_size=config.image_size, columns=columns)


def _public(
    dataset: Dataset, used: Tensor, config: FederationConfig, other: Dataset | None, key: Key
) -> tuple[Tensor, Examples | None]:
    """Rows of the training set that stay private, and the public examples, without labels unless those are public.

    These are all training examples of the `other` data set, if there is one.
    """
    if config.public == "none":
        return used, None
    if other is None:
        shuffled = used[torch.randperm(len(used), generator=key.generator())]
        count = round(config.public_fraction * len(used))
        if count < 1:
            raise ConfigError(f"federation.public_fraction: {config.public_fraction} of {len(used)} examples is none")
        rows, private = shuffled[:count], shuffled[count:].sort().values
        inputs, targets = rows_of(dataset.train_inputs, rows), dataset.train_targets[rows]
    else:
        private = used
        inputs, targets = _fitted(other.train_inputs, dataset, config.image_size), other.train_targets
    if not config.public_labels:
        targets = torch.zeros(count_of(inputs), dtype=torch.int64)
    return private, Examples(inputs, targets, dataset.preprocess).unaugmented()


def _check_same_classes(task: Description, public: Description) -> None:
    """Check that labels of public examples mean what those of the task mean.

    Raises:
        ConfigError: they do not.
    """
    if public.task.name != task.task.name or public.class_names != task.class_names:
        raise ConfigError(
            f"federation.public_labels: {public.name} has other classes than {task.name}; set it to false, or take"
            " labelled examples from the training set with federation.public=holdout"
        )


def _fitted(inputs: Inputs, dataset: Dataset, image_size: int | None) -> Inputs:
    """Images resized to the task's size and number of channels, so that the task's preprocessing fits them.

    Inputs of any other kind must be of the task's shape, and named ones have the same names.
    """
    like = dataset.train_inputs
    if isinstance(inputs, Mapping) or isinstance(like, Mapping) or inputs.dim() != 4 or like.dim() != 4:
        if shape_of(inputs) == shape_of(like):
            return inputs
        raise ConfigError(
            f"federation.public: it has inputs {shown(shape_of(inputs))}; expected {shown(shape_of(like))}, as in"
            f" {dataset.name}: images are brought to one size, and nothing else is"
        )
    if inputs.shape[1] != like.shape[1]:
        inputs = inputs.float().mean(1, keepdim=True).expand(-1, like.shape[1], -1, -1).to(inputs.dtype)
    enlarged = image_size is not None and min(like.shape[2:]) < image_size  # by the preprocessing, whatever they are
    if inputs.shape[2:] != like.shape[2:] and not enlarged:
        sized = F.interpolate(inputs.float(), size=like.shape[2:], mode="bilinear", antialias=True)
        inputs = sized.round().to(inputs.dtype)
    return inputs
