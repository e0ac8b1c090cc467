"""What can be configured: frozen dataclasses, whose docstrings explain each key, and the experiment that they make."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Annotated, Any, Literal

import tomli_w
import torch

from potluck.attackers.settings import Attackers
from potluck.core.federation import ClientId
from potluck.core.ground.discovery import config_file, named_file
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import Checked, above, at_least, at_most, below, require
from potluck.core.ground.rng import fold_in
from potluck.core.method import Method
from potluck.core.schema import LARGEST
from potluck.core.tasks.task import Task
from potluck.data.datasets import check_augmentation
from potluck.data.partition import Partition
from potluck.data.tables.columns import Columns
from potluck.engine.client.clipping import Clipping
from potluck.engine.executors.choice import ExecutorName
from potluck.engine.numerics.numerics import PLAIN, Numerics
from potluck.engine.rounds.asynchrony.rules import Asynchrony
from potluck.engine.rounds.engine import OnDivergence
from potluck.experiment.settings.aside import AsideRule
from potluck.experiment.settings.budget import Budget
from potluck.experiment.settings.secure import SecureRule
from potluck.experiment.settings.tables import Tree, without_none
from potluck.experiment.watching.trackers.names import TrackerName
from potluck.models.fitting import FeatureFit, FitKind
from potluck.models.initial import file_digest
from potluck.parts.privacy import SumPrivacy
from potluck.records import experiment_hash
from potluck.twin.devices import Fleet, Twin
from potluck.twin.timeline import Closing, Timeline

Dealing = Literal["turn", "random"]
_Share = Annotated[float, above(0), at_most(1)]
_Part = Annotated[float, at_least(0), below(1)]
_Count = Annotated[int, at_least(1)]
# More are assumed to be a mistake, which would exhaust the machine before it is noticed.
_Processes = Annotated[int, at_least(1), at_most(1024)]
_Clients = Annotated[int, at_least(1), at_most(1_000_000)]
_Side = Annotated[int, at_least(1), at_most(1024)]
_Features = Annotated[int, at_least(1), at_most(65_536)]
_DIGITS = 8  # of a digest in a name


@dataclass(frozen=True)
class FederationConfig(Checked):
    """The federation: its data, clients and models.

    Attributes:
        dataset: a name that `potluck list datasets` shows, a folder of images, an `.npz` file, a table, or
            `FILE.py:FUNCTION`.
            Its training part is divided among the clients, unless they have `data` of their own; its test part is the
            common one.
        data: for each client, its own data set, folder or file instead of a share. Classes are matched by name, or by
            number if they have no names.
        classes: "own" gives every client's network outputs for its own classes alone, those of its training and
            validation examples. They mean the same everywhere by name. A client is tested, on its own part and on the
            common one, on the examples of its classes. The server knows which classes a client has. Default: all
            networks have outputs for all classes of the federation.
        columns: what the columns are, if `dataset` or `data` are tables: `.csv` or `.parquet` files, folders with a
            `train` and a `test` of these, or functions that return a DataFrame.
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
        models: names, `FILE.py:FUNCTION`, or tables (`{ name = "resnet10", width = 16 }`), dealt to the clients. Of any
            network a table may also say `weights`, a file of initial weights, `train_only`, "head" or a list of the
            modules that are trained, and `cut`, where it is split. Default: five depths of one family that suits the
            inputs; one sliceable net for methods that cut widths, and one of many stages for methods that train nets
            in pieces, if `capacities` has its default too.
        dealing: how `models` are dealt: in "turn", or at "random", where each client draws one by itself, with equal
            chances, so that some may be more frequent and one may be missing. `capacities` stay in turn.
        server_model: the common or global model; by default the one of `models` with the fewest parameters.
        feature_width: the number of features that every model's head reads. It changes the models: each gets a layer
            from its own features to this number, and a new linear head on them, so that methods that compare features
            or share heads run across unlike models. Default: every model as it is.
        feature_fit: what that layer is: "linear" learns it, "pool" takes the mean of neighbouring features, without
            weights. Default: "linear", with a `feature_width`.
        capacities: shares of the full model that clients can train, assigned in turn. Default: the method's own, which
            are 1 for methods that ignore them.
        validation_fraction: share of a client's examples that is held out for validation.
        public: public examples: "none", "holdout" (taken from the training set), or another data set.
        public_fraction: share of the training set that is held out for "holdout".
        metrics: further metrics of your own, each `FILE.py:FUNCTION` or `FILE.py:CLASS`.
        public_labels: whether the labels of public examples are public too. Their classes must be the task's.
    """

    dataset: str = "digits"
    columns: Columns | None = None
    augmentation: str | tuple[str, ...] = "standard"
    image_size: _Side | None = None
    train_fraction: _Share = 1.0
    data: tuple[str, ...] | None = None
    classes: Literal["own"] | None = None
    clients: _Clients = 10
    partition: dict[str, Any] = field(default_factory=lambda: {"name": "dirichlet"})
    models: tuple[str | dict[str, Any], ...] | None = None
    dealing: Dealing = "turn"
    server_model: str | dict[str, Any] | None = None
    feature_width: _Features | None = None
    feature_fit: FitKind | None = None
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
        alone = self.feature_fit is not None and self.feature_width is None
        require(not alone, "feature_fit", "none without federation.feature_width", self.feature_fit)
        if self.feature_width is not None and self.feature_fit is None:
            object.__setattr__(self, "feature_fit", "linear")  # so that the configuration says what was done


@dataclass(frozen=True)
class RoundsClose(Checked):
    """When the rounds of a run close, and what happens while too few clients are there.

    A round for which fewer clients than the quorum can be reached is not begun, and one that they leave in the middle
    is undone: the run waits for them, and nothing is counted or recorded.

    Attributes:
        quorum: the least number of clients that must answer each exchange of a round; if fewer are asked, all of them.
        deadline_s: seconds after which an exchange with other machines, or with those of a twin, closes with the
            replies that have come; with fewer than the quorum it stays open. In one process without a twin every client
            is heard to its end.
        patience_s: seconds to wait for a quorum of other machines before the run ends with an error, from which it can
            be resumed; None waits for as long as it takes.
        over_select: share of the cohort that is drawn in addition: an exchange closes as soon as as many clients have
            answered as there would be without them. It needs other machines, or a twin, and failures to be tolerated.
        asynchronous: close without waiting for all that were asked: `{ rule = "fedbuff" }`. It needs other
            machines or a twin, and a method whose round asks clients once, with messages made of its state alone. A
            client is waited for however long it takes, on another machine for ten times `deadline_s` and two minutes.
            None waits.
        set_aside: set clients aside that are late again and again: `{ late = 3, of = 5, rest = 10 }`. It needs failures
            to be tolerated. None sets nobody aside.
    """

    quorum: _Count = 1
    deadline_s: Annotated[float, above(0)] = 600.0
    patience_s: Annotated[float, above(0)] | None = None
    over_select: Annotated[float, at_least(0)] = 0.0
    asynchronous: Asynchrony | None = None
    set_aside: AsideRule | None = None

    def __post_init__(self) -> None:
        alone = self.asynchronous is None
        waits = alone or self.set_aside is None
        require(waits, "set_aside", "none where rounds are asynchronous, and nobody is late", self.set_aside)
        require(alone or self.quorum == 1, "quorum", "1 where rounds are asynchronous", self.quorum)
        require(alone or not self.over_select, "over_select", "0 where rounds are asynchronous", self.over_select)


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
        executor: what carries out the clients' work: this process ("sequential"), or one process for each core
            ("workers") with the same results to the last bit, which can share an accelerator; "stacked" trains similar
            clients as one batched computation, in all processes, which changes last bits; "ray" runs on your own Ray
            cluster, at `RAY_ADDRESS`. "auto" uses all cores, and stacks small nets without convolutions.
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
        twin: devices that the clients have, by a virtual clock beside the run. None has every client there and in time.
        budgets: what clients' devices can do, as `potluck plan --budgets` writes it: the run says of each client
            whether a round took more. One process, or workers, can measure it, and stacked clients cannot.
        keep_every: rounds between those whose models stay in the run's folder, besides the last and the best, so that
            `potluck analyse` draws what they show over rounds. It needs room on the disk for what has changed between
            them. Default: none of them stays. It needs a folder, and clients on this machine.
        attackers: clients that lie, for trying how well the method and its rule bear it. They are not evaluated,
            so that all scores are of honest clients.
        evaluate_clients: how many clients are evaluated, drawn anew for each evaluation. Default: all.
        secure_sums: the server gets sums of clients' tensors alone, of methods that need no more: true, or
            `{ largest = 64.0, bits = 24, least = 3 }`. On one machine it shows what they do to a run and cost.
            It needs the extra flower. Default: none.
        clip_update: the largest L2 norm of a client's update: what it sends less what it was sent, over all tensors of
            which the server takes sums together. A client scales a longer one to it before anything leaves. It needs a
            method that needs no more than sums. Default: none is clipped.
        private_weights: differential privacy of what one client adds to secure sums, by noise that the clients add:
            `{ noise_multiplier = 1.0, delta = 1e-5 }`. It needs `secure_sums`, `clip_update` and a method in which each
            client counts once. Default: none.
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
    twin: Twin | None = None
    budgets: tuple[Budget, ...] | None = None
    keep_every: _Count | None = None
    attackers: Attackers | None = None
    evaluate_clients: _Count | None = None
    secure_sums: SecureRule | bool | None = None
    clip_update: Annotated[float, above(0)] | None = None
    private_weights: SumPrivacy | None = None

    def __post_init__(self) -> None:
        alone = self.threads == 1 or self.executor != "workers"
        require(alone, "threads", "1 with the executor 'workers', which has one thread for each process", self.threads)
        native = self.computing.kernels is None
        require(native or self.threads == 1, "threads", "1 with portable kernels, whose sums they cut up", self.threads)
        sensible = not self.outlier_factor or self.outlier_factor > 1
        require(sensible, "outlier_factor", "more than 1, or 0 to compare nothing", self.outlier_factor)
        over = self.rounds_close.over_select
        require(not over or self.tolerate_failures, "rounds_close.over_select", "0 without run.tolerate_failures", over)
        aside, tolerant = self.rounds_close.set_aside, self.tolerate_failures
        expected = "none without run.tolerate_failures"
        require(aside is None or tolerant, "rounds_close.set_aside", expected, aside)
        if isinstance(self.secure_sums, bool):
            object.__setattr__(self, "secure_sums", SecureRule() if self.secure_sums else None)
        if self.secure_sums is not None:
            self._check_secure()
        if self.private_weights is not None:
            self._check_private()
        if (rule := self.rounds_close.asynchronous) is not None:
            self._check_asynchronous(rule)

    def _check_secure(self) -> None:
        rule, factor = self.rounds_close.asynchronous, self.outlier_factor
        require(rule is None, "rounds_close.asynchronous", "none with secure_sums, which sum whole rounds", rule)
        require(not factor, "outlier_factor", "0 with secure_sums, which show no single replies", factor)
        late = "none with secure_sums, since whoever is late by its clock has been summed"
        require(self.twin is None, "twin", late, self.twin)

    def _check_private(self) -> None:
        bound, sums, ours = self.clip_update, self.secure_sums, "with private_weights"
        require(bound is not None, "clip_update", f"a number {ours}, by which a client moves a sum at most", bound)
        require(sums is not None, "secure_sums", f"true {ours}, whose noise hides nobody outside of sums", sums)

    def _check_asynchronous(self, rule: Asynchrony) -> None:
        factor = self.outlier_factor
        require(not factor, "outlier_factor", "0 where rounds are asynchronous, and no two replies alike", factor)
        everybody = not rule.tiers or self.cohort_fraction == 1
        require(
            everybody, "cohort_fraction", "1 with the rule 'fedat', in whose tiers all take part", self.cohort_fraction
        )

    @property
    def clipping(self) -> Clipping | None:
        """How clients clip what they send; None if they do not."""
        if self.clip_update is None:
            return None
        return Clipping(self.clip_update, self.secure_sums is not None, self.private_weights is not None)

    def check_has_clock(self) -> None:
        """Check that one client can be slower than another, where all are on this machine.

        Raises:
            ConfigError: rounds are asynchronous, and there is no twin.
        """
        rule, where = self.rounds_close.asynchronous, "run.rounds_close.asynchronous"
        without = "none without run.twin, by whose clock one client on this machine is slower than another"
        require(rule is None or self.twin is not None, where, without, rule and rule.rule)

    def cohort_size(self, clients: int) -> int:
        """How many of the clients are drawn each round."""
        needed = max(1, int(self.cohort_fraction * clients + 1e-9))  # so that 0.29 of 100 is 29
        return min(clients, math.ceil(needed * (1 + self.rounds_close.over_select) - 1e-9))

    def needed(self, clients: int) -> int:
        """How many of so many clients must be there: the quorum, or all if failures are not tolerated."""
        return min(self.rounds_close.quorum, clients) if self.tolerate_failures else clients

    def cohort(
        self, ids: Sequence[ClientId], number: int, without: Collection[ClientId] = frozenset()
    ) -> list[ClientId]:
        """A round's clients of these: uniform without replacement, the same for every method under one seed.

        Those in whose place others come, as far as there are any, are named by `without`.
        """
        size = self.cohort_size(len(ids))
        order = self.order(ids, number, None if without else size)
        return sorted([client for client in order if client not in without][:size])

    def order(self, ids: Sequence[ClientId], number: int, first: int | None = None) -> list[ClientId]:
        """These clients, or the first few, in an order of the round's, by which they are drawn."""
        return self._drawn("cohort", ids, number, first)

    def evaluated(self, ids: Sequence[ClientId], number: int) -> Sequence[ClientId]:
        """Those of these clients that are evaluated after a round."""
        if self.evaluate_clients is None:
            return ids
        return sorted(self._drawn("evaluated", ids, number, self.evaluate_clients))

    def _drawn(self, what: str, ids: Sequence[ClientId], number: int, first: int | None) -> list[ClientId]:
        order = torch.randperm(len(ids), generator=fold_in(self.seed, what, number).generator())
        return [ids[index] for index in order[:first].tolist()]

    def course(self, fleet: Fleet) -> Timeline:
        """A run's course by its twin's clock, from the start."""
        twin, close = self.twin or Twin(), self.rounds_close
        closing = Closing(close.deadline_s, close.quorum, close.over_select)
        return Timeline(fleet, closing, twin.starts_at, twin.server_gflops)


TABLES: Mapping[str, type[Any]] = {"federation": FederationConfig, "run": RunConfig}
"""The tables of a configuration whose keys are always the same; those of `method` are its hyper-parameters."""


@dataclass(frozen=True)
class ModelSpec:
    """A model by name with its options; the same text always means the same network.

    Attributes:
        cut: names of the module that the extractor ends with, of those that further stages end with, and of the head,
            for a network that is no staged one and shall not be cut by its dataflow alone, see
            `potluck.core.nets.splitting.make_plan`.
        weights: a file of initial weights, see `potluck.models.initial`.
        train_only: names of the modules that are trained, "head" for the head; all others are frozen. none named
            freeze nothing.
    """

    name: str
    options: Mapping[str, Any]
    cut: tuple[str, ...] = ()
    weights: str | None = None
    train_only: tuple[str, ...] = ()

    def table(self) -> Tree:
        """The model as a configuration has it."""
        lists = {"cut": self.cut, "train_only": self.train_only}
        said = {key: list(names) for key, names in lists.items() if names}
        return {**self.options, **said, **({"weights": self.weights} if self.weights else {}), "name": self.name}

    def entry(self) -> str | Tree:
        """The model as an entry of `federation.models`: a table, or its name if that says all."""
        table = self.table()
        return table if len(table) > 1 else self.name

    @property
    def architecture(self) -> str:
        """The name of the network in a federation: a file of weights by its digest, whatever its place.

        Raises:
            ConfigError: the file cannot be read.
        """
        return str(self if self.weights is None else replace(self, weights=file_digest(self.weights)[:_DIGITS]))

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in sorted(self.table().items()) if key != "name")
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
    def feature_fit(self) -> FeatureFit | None:
        """How every model's features are brought to one width; None if they stay as they are."""
        width, kind = self.federation.feature_width, self.federation.feature_fit
        return None if width is None or kind is None else FeatureFit(width, kind)

    @property
    def named_models(self) -> tuple[ModelSpec, ...]:
        """The clients' models, and the server's if it is named."""
        return self.models if self.server_model is None else (*self.models, self.server_model)

    def model_of(self, client: ClientId) -> ModelSpec:
        """The model that is dealt to a client."""
        return self.models[dealt(client, len(self.models), self.federation.dealing, self.run.seed)]

    def initial_weights(self) -> dict[str, str]:
        """The digests of the models' files of initial weights, by the files as they were typed.

        Raises:
            ConfigError: one cannot be read.
        """
        return {spec.weights: file_digest(spec.weights) for spec in self.named_models if spec.weights is not None}

    @property
    def files(self) -> tuple[str, ...]:
        """The user's files, as they were typed: of method, models, partition, data and metrics, and a tokenizer."""
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
        python = [str(found[0]) for name in parts if (found := named_file(name))]
        configs = [str(found) for spec in self.named_models if (found := config_file(spec.name))]
        tokenizer = federation.columns and federation.columns.tokenizer
        return tuple(dict.fromkeys([*python, *configs, *([tokenizer] if tokenizer else [])]))

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


def _dataclass(value: Any) -> Any:
    if not is_dataclass(value):
        raise ConfigError(f"{type(value).__name__} is not a dataclass; a partition's parameters must be fields")
    return value
