"""The schema of a run's folder, shared by the code that writes it and the code that reads it.

`rounds.jsonl`, `clients.jsonl` and `costs.jsonl` depend on the configuration alone, so that two runs can be compared
byte by byte; everything that depends on a clock goes to `timings.jsonl` and `manifest.json`.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import CheckpointError
from potluck.core.tasks.metric import ACCURACY as ACCURACY
from potluck.core.tasks.metric import Metric as Metric
from potluck.core.tasks.metric import Values

SCHEMA_VERSION = 1
CONFIG, MANIFEST, LOG, LOCK = "config.toml", "manifest.json", "log.txt", "lock"
ROUNDS, CLIENTS, COSTS, TIMINGS = "rounds.jsonl", "clients.jsonl", "costs.jsonl", "timings.jsonl"
RELEASES, TWIN = "releases.json", "twin.jsonl"
PROGRESS, TRACKED = "progress.json", "trackers.json"
PARTITION, BY_CLASS = "partition.json", "classes.json"
BUDGETS = "budgets.json"
CHECKPOINT, LAST, BEST = "checkpoint", "last.json", "best.json"
_KEPT = re.compile(r"round-(\d+)\.json")

CHECKPOINT_SCHEMA = 4
"""The schema of `last.json` and `best.json`. The first had no records and no configuration; the second kept the state
in one file; the third kept each client's state in one."""

Measure = Literal["validation", "personal", "pooled", "common", "global"]
"""Whose predictions, and on what. The clients' models, as means over clients, on their own validation parts, their own
test parts and the common test set; all own test parts as if they were one ("pooled"); the server's model on the common
test set.
"""
TITLES: Mapping[Measure, str] = {
    "personal": "own test parts",
    "common": "common test set",
    "global": "global model",
    "pooled": "all own test parts as one",
    "validation": "validation parts",
}
"""What each measure is called wherever a person reads it. Keys, options and records have the measure's own name."""
TITLES_OF_A_CLIENT: Mapping[Measure, str] = {
    "personal": "own test part",
    "common": "common test set",
    "validation": "validation part",
}
"""The same of a single client."""
MAIN_MEASURES: tuple[Measure, ...] = ("personal", "common", "global")
"""Those that tables and summaries show where there is room for a few."""

_NO_MATTER = ("seed", "rounds", "executor", "workers", "track", "rounds_close", "budgets", "keep_every")
"""Settings of a run that do not make it another experiment. Of `rounds_close` a quorum above 1, over-selecting and
setting clients aside do, and all of it in a run with a twin."""


@dataclass(frozen=True)
class RoundRecord:
    """One line of `rounds.jsonl`.

    The fields named accuracy hold shares between 0 and 1; they are None where nothing was evaluated, and for tasks
    other than classification. `metrics` holds what is measured of any task.

    Attributes:
        round: counted from 1.
        cohort: the clients drawn.
        replied: those that answered.
        failed: by client, why it did not answer.
        bytes_down: payload that the server sent for training, all clients together; `bytes_up` the other way.
        bytes_down_by_entry: the same, by name of the message's entry.
        bytes_evaluation: payload sent for the evaluation after this round.
        loss_local: mean over clients of the mean training loss; None if no client trained on its own examples. It is
            finite: a client whose loss is not has failed.
        accuracy_validation_mean: mean over clients on their own validation parts.
        accuracy_personal_mean: mean over clients on their own test parts; `_std` and `_worst` likewise.
        accuracy_personal_by_architecture: mean over an architecture's clients on their own test parts.
        accuracy_common_mean: mean over clients on the common test set.
        accuracy_common_by_architecture: mean over an architecture's clients on the common test set.
        accuracy_global: the server's model on the common test set.
        metrics: by measure, every metric of the task, None where it is undefined on the data; also `personal_std`, the
            standard deviation over clients, and `personal_worst`, the worst client's, which for a metric of errors is
            the largest. None if nothing was evaluated, and in runs of earlier versions.
        metrics_by_architecture: mean over an architecture's clients, by measure ("personal", "common") and name.
        lost: why the round was lost, that is, changed neither the server's state nor any client's; absent otherwise.
        undone: the number of the round that was undone, with all that it had changed; absent if none was.
        outlier: the client whose reply made all others diverge, so that the round was lost; absent if none is named.
        notes: numbers that the method reported: the server's by name, and as `clients/NAME` the mean over the clients
            that reported it; absent if there are none.
        stale: of an asynchronous round, by client whose reply is stale, how many rounds have closed since it was asked;
            absent if no reply is.
        late: those of the failed whose reply came too late, or who were still at work on what had; absent if none were.
        set_aside: by client, the last round up to which it is not drawn, since it was late again and again; of those
            alone that were set aside after this round, and absent if none were.
        secure: what secure sums came to: numbers `summed`, `local`, since too few clients have them, `lost`, since too
            few of these were there to the end, and `clipped`; exchanges `refused`; `bytes_down` and `bytes_up` of all
            `clients` together; absent without secure sums.
    """

    round: int
    cohort: list[int]
    replied: list[int]
    failed: dict[str, str]
    bytes_down: int
    bytes_up: int
    bytes_down_by_entry: dict[str, int]
    bytes_up_by_entry: dict[str, int]
    bytes_evaluation: int
    loss_local: float | None
    accuracy_validation_mean: float | None
    accuracy_personal_mean: float | None
    accuracy_personal_std: float | None
    accuracy_personal_worst: float | None
    accuracy_personal_by_architecture: dict[str, float] | None
    accuracy_common_mean: float | None
    accuracy_common_by_architecture: dict[str, float] | None
    accuracy_global: float | None
    metrics: dict[str, Values] | None = None
    metrics_by_architecture: dict[str, dict[str, Values]] | None = None
    lost: str | None = None
    undone: int | None = None
    outlier: int | None = None
    notes: dict[str, float] | None = None
    stale: dict[str, int] | None = None
    late: list[int] | None = None
    set_aside: dict[str, int] | None = None
    secure: dict[str, int] | None = None

    @property
    def evaluated(self) -> bool:
        """Whether models were evaluated after this round."""
        return self.metrics is not None or self.accuracy_personal_by_architecture is not None

    def value(self, measure: Measure | Literal["personal_std", "personal_worst"], metric: str) -> float | None:
        """A metric after this round; None if it was not measured. Also reads records of earlier versions."""
        if self.metrics is not None:
            return self.metrics.get(measure, {}).get(metric)
        earlier = {
            "validation": self.accuracy_validation_mean,
            "personal": self.accuracy_personal_mean,
            "personal_std": self.accuracy_personal_std,
            "personal_worst": self.accuracy_personal_worst,
            "common": self.accuracy_common_mean,
            "global": self.accuracy_global,
        }
        return earlier.get(measure) if metric == ACCURACY.name else None

    def by_architecture(self, measure: Measure, metric: str) -> dict[str, float]:
        """A metric's mean over each architecture's clients, where measured. Also reads records of earlier versions."""
        if self.metrics_by_architecture is not None:
            found = self.metrics_by_architecture.get(measure, {}).items()
            return {name: value for name, values in found if (value := values.get(metric)) is not None}
        earlier = {
            "personal": self.accuracy_personal_by_architecture,
            "common": self.accuracy_common_by_architecture,
        }
        return dict(earlier.get(measure) or {}) if metric == ACCURACY.name else {}


@dataclass(frozen=True)
class ClientRecord:
    """One line of `clients.jsonl`: how one client's model did after one evaluated round.

    Attributes:
        accuracy_personal: on the client's own test part, which has the mixture of classes of its training data.
        accuracy_common: on the common test set.
        accuracy_validation: on the part of its own data that is held out of training. All three are None for tasks
            other than classification.
        metrics: by measure ("personal", "common", "validation"; no others), every metric of the task.
    """

    round: int
    client: int
    architecture: str
    examples_train: int
    examples_test: int
    accuracy_personal: float | None
    accuracy_common: float | None
    accuracy_validation: float | None
    metrics: dict[str, Values] | None = None

    def value(self, measure: str, metric: str) -> float | None:
        """A metric of this client's model; None if it was not measured."""
        if self.metrics is not None:
            return self.metrics.get(measure, {}).get(metric)
        return getattr(self, f"accuracy_{measure}", None) if metric == ACCURACY.name else None


@dataclass(frozen=True)
class CostRecord:
    """One line of `costs.jsonl`: what a client's part in an exchange took, or the server's in a round.

    Attributes:
        round: counted from 1.
        exchange: within the round, counted from 1; 0 for the server.
        client: None for the server.
        flops: of what its handler requested; None if it failed, or its machine does not say. Evaluations are left out.
        memory: the most bytes of tensors that were there at once; None likewise.
        bytes_down: payload sent to it.
        bytes_up: payload of its reply; 0 if it failed.
    """

    round: int
    exchange: int
    client: int | None
    flops: int | None
    memory: int | None
    bytes_down: int
    bytes_up: int


@dataclass(frozen=True)
class PartitionRecord:
    """The content of `partition.json`: how the classes are divided among clients.

    Absent if examples have no labels, or if the clients' data are on other machines.

    Attributes:
        train: by client, in ascending order of their ids, the number of its training examples of each class.
    """

    train: list[list[int]]


@dataclass(frozen=True)
class ByClass:
    """The content of `classes.json`: predictions by class after a run's last round.

    Over the examples of all clients' own test parts together, each predicted by its client's model.

    Attributes:
        round: after which the models were evaluated.
        confusion: by actual class, how often each class was predicted; None for tasks whose sums hold no such matrix.
        counts: correct predictions, predictions and occurrences of each class.
    """

    round: int
    confusion: list[list[int]] | None
    counts: list[list[int]]


@dataclass(frozen=True)
class Extent:
    """The extent of a file of records when a checkpoint was written; lines after it do not count.

    Attributes:
        bytes: its length.
        digest: of its content.
        marks: four hex digits for the lines of each round in it, to tell which rounds were damaged later.
    """

    bytes: int
    digest: str
    marks: str


@dataclass(frozen=True)
class Undo:
    """What a checkpoint holds so that its round can be undone, if a reply in it stood out and was believed.

    Attributes:
        state: files of the method's state before the round; none for the initial one.
        outlier: facts about the reply.
    """

    state: tuple[str, ...]
    outlier: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a round; the content of `last.json` and `best.json`.

    Attributes:
        round: the last complete round.
        state: files of the method's state; up to the second schema, a single file.
        clients: by client, the file of its state, up to the third schema; empty since.
        best_validation: the best mean of the primary metric on validation parts so far.
        best_round: the first round with it.
        records: the extent of each file of records; None in a checkpoint of the first schema.
        config: the settings that affect what the run computes; None likewise.
        undo: what its round can be undone with; absent if nothing in it stood out.
        under_way: files of what clients were doing, of a run whose rounds are asynchronous; absent in others.
        states: a digest of all clients' states; empty if there are none. Where they are is in a file of their own.
    """

    round: int
    state: tuple[str, ...]
    clients: dict[int, str]
    best_validation: float | None
    best_round: int | None
    records: Mapping[str, Extent] | None = None
    config: dict[str, Any] | None = field(default=None, compare=False)
    undo: Undo | None = None
    under_way: tuple[str, ...] = ()
    states: str = ""

    @property
    def digest(self) -> str:
        """A digest of everything that the run has computed: equal digests mean equal bits."""
        state = self.state[0] if self.has_whole_state else self.state
        content = [self.round, state, self.states or [list(item) for item in sorted(self.clients.items())]]
        return digest(json.dumps(content).encode())

    @property
    def files(self) -> set[str]:
        """Names of the files that the checkpoint needs, but for those of clients' states since the fourth schema."""
        undo = self.undo.state if self.undo else ()
        return {*self.state, *self.clients.values(), *undo, *self.under_way}

    @property
    def has_whole_state(self) -> bool:
        """Whether the state is one undivided file, as earlier versions wrote it."""
        return len(self.state) == 1 and self.state[0].startswith("state-")

    def sealed(self) -> bytes:
        """The checkpoint as JSON with a seal over its content."""
        clients = {str(client): file for client, file in self.clients.items()}
        content: dict[str, Any] = {"schema": CHECKPOINT_SCHEMA, **asdict(self), "clients": clients}
        for name in ("clients", "undo", "under_way", "states"):
            if not content[name]:
                del content[name]
        return json.dumps({**content, "seal": _seal(content)}, indent=1).encode()

    @classmethod
    def read(cls, path: Path) -> "Checkpoint | None":
        """The checkpoint in a file that `sealed` wrote, or None if there is no file.

        Raises:
            CheckpointError: the file is damaged, or a newer version of Potluck wrote it.
        """
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_bytes())
            seal = content.pop("seal")
            if seal != _seal(content):
                raise ValueError("its content does not match its seal")
            schema = content.pop("schema", 1)
            if schema > CHECKPOINT_SCHEMA:
                raise CheckpointError(
                    f"{path} has schema {schema}; this Potluck reads up to {CHECKPOINT_SCHEMA}: use the newer"
                    " version that wrote it"
                )
            clients = {int(client): file for client, file in content.pop("clients", {}).items()}
            undo = content.pop("undo", None)
            if undo is not None:
                undo = Undo(tuple(undo["state"]), undo["outlier"])
            extents = content.pop("records", None)
            records = None if extents is None else {name: Extent(**extent) for name, extent in extents.items()}
            state = content.pop("state")
            parts = (state,) if isinstance(state, str) else tuple(state)
            under_way = tuple(content.pop("under_way", ()))
            return cls(**content, state=parts, clients=clients, records=records, undo=undo, under_way=under_way)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"{path} is damaged: {reason}; restore it, or run again") from error


@dataclass(frozen=True)
class Progress:
    """How a run stands at a moment; the content of `progress.json`, which is there only while a run goes on.

    Attributes:
        method: the method's name.
        phase: what is done at the moment: the run begins, clients train, the server computes, models are evaluated, or
            the run waits for clients.
        round: the number of the current round; 0 before the first.
        rounds: how many rounds the run has.
        done: how many clients of the current exchange or evaluation are done, of `of`.
        share: the rounds done, the current one in part.
        loss: mean training loss of this round's clients so far; before the first of them, of the last round.
        score: the primary metric in words, mean over clients on their own test parts, at the last evaluation.
        bytes: payload sent for training up to the last round, in both directions.
        seconds_left: an estimate, from the rounds of this process; None before its first client.
    """

    method: str = ""
    phase: Literal["start", "training", "server", "evaluation", "waiting"] = "start"
    round: int = 0
    rounds: int = 0
    done: int = 0
    of: int = 0
    share: float = 0.0
    loss: float | None = None
    score: str | None = None
    bytes: int = 0
    seconds_left: float | None = None

    @property
    def words(self) -> str:
        """What is done at the moment."""
        if self.phase == "training":
            return f"client {self.done}/{self.of}"
        if self.phase == "evaluation":
            return f"evaluating {self.done}/{self.of}"
        if self.phase == "waiting":
            return f"waiting: {self.done} of {self.of} clients are there"
        return "server" if self.phase == "server" else "starting"

    def changed(self, **changes: Any) -> "Progress":
        """A copy with changes."""
        return replace(self, **changes)

    def facts(self) -> dict[str, Any]:
        """The content of the file."""
        return asdict(self)

    @classmethod
    def read(cls, folder: Path) -> "Progress | None":
        """The progress in a run's folder; None if no process notes any, or another version's."""
        try:
            content = json.loads((folder / PROGRESS).read_bytes())
            return cls(**{spec.name: content[spec.name] for spec in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError):
            return None


def duration(seconds: float) -> str:
    """A duration in the units that matter: `8 s`, `3:05 min`, `2:10 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def name_of_kept(number: int) -> str:
    """The name of the file of a kept round's checkpoint."""
    return f"round-{number:06}.json"


def name_of_layout(number: int) -> str:
    """The name of the file that says where clients' states are after a round."""
    return f"states-{number:06}.json"


def kept_rounds(folder: Path) -> dict[int, Path]:
    """By round the files of the kept checkpoints in a folder of checkpoints, in ascending order."""
    found = {int(match[1]): path for path in folder.glob("round-*.json") if (match := _KEPT.fullmatch(path.name))}
    return dict(sorted(found.items()))


def experiment_hash(config: dict[str, Any]) -> str:
    """Eight hex digits shared by all runs of one experiment, whatever their seeds, lengths and executors."""
    run = {key: value for key, value in config["run"].items() if key not in _NO_MATTER}
    close = config["run"].get("rounds_close", {})
    if (quorum := close.get("quorum", 1)) > 1:
        run["quorum"] = quorum
    if over := close.get("over_select", 0):
        run["over_select"] = over
    if rule := close.get("set_aside"):
        run["set_aside"] = rule
    if config["run"].get("twin"):
        run["rounds_close"] = close  # by a virtual clock, whose replies count depends on nothing else
    shared = {**{key: value for key, value in config.items() if key != "preset"}, "run": run}
    return hashlib.blake2b(json.dumps(shared, sort_keys=True).encode(), digest_size=4).hexdigest()


def check_is_run(folder: Path) -> None:
    """Check that `potluck run` made this folder.

    Raises:
        CheckpointError: it lacks a file that every run has.
    """
    missing = [name for name in (CONFIG, MANIFEST) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} is not a run: it has no {' and no '.join(missing)}; expected a folder that `potluck run` made"
        )


def check_schema(path: Path, manifest: Mapping[str, Any]) -> None:
    """Check that the records have this version's schema.

    Args:
        path: of the manifest.
        manifest: its content.

    Raises:
        CheckpointError: their schema is not this version's.
        KeyError: the manifest does not name its schema.
    """
    version = manifest["schema_version"]
    if version != SCHEMA_VERSION:
        writer = (manifest.get("packages") or {}).get("potluck") or "the version that wrote it"
        raise CheckpointError(
            f"{path}: the run has schema version {version}; this Potluck reads version {SCHEMA_VERSION};"
            f" read it with Potluck {writer}"
        )


def _seal(content: dict[str, Any]) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())
