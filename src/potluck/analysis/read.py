"""Reading stored runs: the content of a run's folder, checked while it is read, and the two headline rounds."""

import json
import warnings
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from potluck.analysis.names import dataset_in, method_in
from potluck.core.ground.digest import digest
from potluck.core.ground.errors import CheckpointError, PotluckWarning
from potluck.records import (
    ACCURACY,
    BY_CLASS,
    CHECKPOINT,
    CLIENTS,
    CONFIG,
    COSTS,
    LAST,
    MANIFEST,
    PARTITION,
    ROUNDS,
    TIMINGS,
    TWIN,
    ByClass,
    Checkpoint,
    ClientRecord,
    CostRecord,
    Metric,
    PartitionRecord,
    RoundRecord,
    check_is_run,
    check_schema,
    experiment_hash,
)
from potluck.seals import read_sealed

Record = TypeVar("Record")
_LAST = f"{CHECKPOINT}/{LAST}"
_FEW = 4


@dataclass(frozen=True)
class StoredRun:
    """A run, read from its folder.

    Attributes:
        folder: its path.
        name: the folder's name.
        method: the method's name.
        dataset: the data set's name; for your own data, the name of the file or folder.
        seed: of every draw in the run.
        experiment_id: of the configuration without seed and length: equal for runs of one experiment.
        config: the tables of `config.toml`.
        manifest: code, data and machine.
        rounds: the finished rounds, from the first on.
        clients: one record for each client and evaluated round.
        digests: of each file of records, and of the last checkpoint if there is one.
        metrics: the task's metrics, the primary one first.
        unchecked: why it cannot be told whether configuration and records are as the run wrote them; None if they are.
    """

    folder: Path
    name: str
    method: str
    dataset: str
    seed: int
    experiment_id: str
    config: dict[str, Any]
    manifest: dict[str, Any]
    rounds: tuple[RoundRecord, ...]
    clients: tuple[ClientRecord, ...]
    digests: dict[str, str]
    metrics: tuple[Metric, ...] = (ACCURACY,)
    unchecked: str | None = None

    @property
    def metric(self) -> Metric:
        """The primary metric, in headlines, by which the best round is chosen."""
        return self.metrics[0]

    @property
    def client_count(self) -> int:
        """How many clients the federation has."""
        return self.config["federation"]["clients"]

    @property
    def client_names(self) -> tuple[str, ...]:
        """What the clients are called, in the order of their numbers; none if they have only these."""
        names = self.manifest.get("client_names") or ()
        return tuple(names) if len(names) == self.client_count else ()

    def client_name(self, client: int) -> str:
        """What a client is called."""
        return self.client_names[client] if self.client_names else f"client {client}"

    @property
    def rounds_planned(self) -> int:
        """How many rounds the configuration asks for."""
        return self.config["run"]["rounds"]


@dataclass(frozen=True)
class Seconds:
    """The time of a round: of clients' work, of the server's, and of the evaluation after it.

    Attributes:
        joules: that the machine's processors took, evaluation apart; None if the machine does not tell.
    """

    local: float
    server: float
    evaluation: float
    joules: float | None = None


@dataclass(frozen=True)
class Reading:
    """What could be read of some folders.

    Attributes:
        runs: those whose configuration and records are as they were written, as far as it can be told.
        damaged: what is wrong with each of the others, which are left out.
    """

    runs: tuple[StoredRun, ...]
    damaged: tuple[str, ...] = ()

    def and_also(self, other: "Reading") -> "Reading":
        """These and others."""
        return Reading((*self.runs, *other.runs), tuple(dict.fromkeys((*self.damaged, *other.damaged))))

    @property
    def remarks(self) -> list[str]:
        """What a reader of the runs' numbers must know: which runs are left out, and which could not be checked."""
        unchecked: dict[str, list[str]] = {}
        for run in self.runs:
            if run.unchecked:
                unchecked.setdefault(run.unchecked, []).append(run.name)
        found = [f"Left out: {problem}" for problem in self.damaged]
        return [*found, *(f"Not checked: {_listed(names)}: {reason}" for reason, names in unchecked.items())]


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Folders of all runs that have begun, each once; those inside one folder by name, so by date.

    A run whose records are gone is among them, so that whoever reads it says so.

    Args:
        paths: each a run, or a folder whose folders are runs.

    Raises:
        CheckpointError: a path does not exist, or there is no run with a finished round at all.
    """
    paths = list(paths)
    found = [run for path in paths for run in _runs_at(path) if _has_rounds(run)]
    if not found:
        places = ", ".join(str(path) for path in paths) or "no folder"
        raise CheckpointError(
            f"{places}: found no run with a finished round; expected a folder that `potluck run` made,"
            " or a folder of such"
        )
    return list({run.resolve(): run for run in found}.values())


def read_runs(folders: Iterable[Path]) -> Reading:
    """The runs in these folders; those that are damaged are left out, which a warning says with what is wrong.

    Raises:
        CheckpointError: all are damaged.
    """
    runs: list[StoredRun] = []
    damaged: list[str] = []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged and not runs:
        others = f"; nor can the other {len(damaged) - 1} runs be read" if len(damaged) > 1 else ""
        raise CheckpointError(f"{damaged[0]}{others}")
    reading = Reading(tuple(runs), tuple(damaged))
    for remark in reading.remarks:
        warnings.warn(remark, PotluckWarning, stacklevel=2)
    return reading


def read_run(folder: Path) -> StoredRun:
    """The run in a folder, checked against its last checkpoint.

    Raises:
        CheckpointError: it is not a run, has no finished round, is damaged or was changed, or has another version's
            schema.
    """
    check_is_run(folder)
    manifest = _manifest(folder / MANIFEST)
    sealed = read_sealed(folder)
    config, checkpoint = sealed.config, sealed.checkpoint
    rounds = _finished(folder / ROUNDS, sealed.records[ROUNDS], checkpoint)
    clients = _lines(folder / CLIENTS, sealed.records[CLIENTS], ClientRecord)
    digests = {name: digest(content) for name, content in sealed.records.items() if (folder / name).is_file()}
    return StoredRun(
        folder=folder,
        name=folder.resolve().name,
        method=method_in(config),
        dataset=dataset_in(config),
        seed=config["run"]["seed"],
        experiment_id=experiment_hash(config),
        config=config,
        manifest=manifest,
        rounds=tuple(rounds),
        clients=tuple(line for line in clients if line.round <= len(rounds)),
        digests={**digests, **({"checkpoint": checkpoint.digest} if checkpoint else {})},
        metrics=_metrics(folder / MANIFEST, manifest),
        unchecked=sealed.unchecked,
    )


def last(run: StoredRun) -> RoundRecord | None:
    """The last evaluated round; None if no round was evaluated."""
    return next((record for record in reversed(run.rounds) if record.evaluated), None)


def chosen(run: StoredRun) -> RoundRecord | None:
    """The first round with the best mean of the primary metric on validation parts; None if there are none.

    Test examples have no influence on it.
    """
    best, best_value = None, None
    for record in run.rounds:
        value = record.value("validation", run.metric.name)
        if value is not None and run.metric.better(value, best_value):
            best, best_value = record, value
    return best


def seconds(run: StoredRun) -> dict[int, float]:
    """By round, the seconds that it took without its evaluation, where they are known."""
    return {number: spent.local + spent.server for number, spent in timings(run).items()}


def joules(run: StoredRun) -> dict[int, float]:
    """By round, the energy that the machine's processors took without its evaluation, where it is known."""
    return {number: spent.joules for number, spent in timings(run).items() if spent.joules is not None}


def timings(run: StoredRun) -> dict[int, Seconds]:
    """By round, its seconds by kind; a run that was ended between two writes may lack those of a round."""
    try:
        lines = (run.folder / TIMINGS).read_bytes().split(b"\n")[:-1]
    except OSError:
        return {}
    known = dict(filter(None, map(_seconds, lines)))
    return {record.round: known[record.round] for record in run.rounds if record.round in known}


def _seconds(line: bytes) -> tuple[int, Seconds] | None:
    """The round and its seconds that a line holds; None for one that is damaged."""
    try:
        found = json.loads(line)
        kinds = found["seconds_local"], found["seconds_server"], found.get("seconds_evaluation", 0.0)
        energy = found.get("joules")
        return int(found["round"]), Seconds(*map(float, kinds), joules=None if energy is None else float(energy))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def costs(run: StoredRun) -> list[CostRecord]:
    """What each client's part in each exchange of the finished rounds took; none in a run of an earlier version.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = run.folder / COSTS
    content = path.read_bytes() if path.is_file() else b""
    done = {record.round for record in run.rounds}
    return [record for record in _lines(path, content, CostRecord) if record.round in done]


def courses(run: StoredRun) -> list[dict[str, Any]]:
    """The lines of the finished rounds of a run with a twin; none of another run.

    Raises:
        CheckpointError: the file is damaged.
    """
    path, done = run.folder / TWIN, {record.round for record in run.rounds}
    lines = path.read_bytes().splitlines() if path.is_file() else []
    try:
        found = [json.loads(line) for line in lines]
        return [record for record in found if record["round"] in done]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def partition(run: StoredRun) -> PartitionRecord | None:
    """How the classes are divided among clients; None if the run's folder does not say.

    Raises:
        CheckpointError: the file is damaged.
    """
    content = _table(run.folder / PARTITION, PartitionRecord)
    if content and len(content.train) != run.client_count:
        raise _damaged(run.folder / PARTITION, ValueError(f"it has {len(content.train)} clients"))
    return content


def by_class(run: StoredRun) -> ByClass | None:
    """The last evaluation's counts by class; None if the run's folder has none of its last evaluated round.

    Raises:
        CheckpointError: the file is damaged.
    """
    content, record = _table(run.folder / BY_CLASS, ByClass), last(run)
    return content if content and record and content.round == record.round else None


def _table(path: Path, kind: type[Record]) -> Record | None:
    """The content of a file of tables of whole numbers; None if there is no file."""
    try:
        content = kind(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path, error) from error
    for spec in fields(kind):  # pyright: ignore[reportArgumentType]
        table = getattr(content, spec.name)
        if isinstance(table, list) and not _is_table(cast(list[Any], table)):
            raise _damaged(path, ValueError(f"{spec.name} is not a table of counts"))
    return content


def _is_table(rows: list[Any]) -> bool:
    """Whether these are rows of equally many whole numbers."""
    if not all(isinstance(row, list) for row in rows):
        return False
    return len({len(row) for row in rows}) <= 1 and all(type(count) is int for row in rows for count in row)


def _runs_at(path: Path) -> list[Path]:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; expected a run, or a folder of runs")
    if any((path / name).is_file() for name in (CONFIG, MANIFEST, ROUNDS)):
        return [path]
    return sorted(child for child in path.iterdir() if _is_run(child))


def _is_run(folder: Path) -> bool:
    """Whether this looks like a run, or like what is left of one."""
    whole = all((folder / name).is_file() for name in (CONFIG, MANIFEST))
    return whole or any((folder / name).is_file() for name in (ROUNDS, _LAST))


def _has_rounds(folder: Path) -> bool:
    """Whether a run has a finished round, or says that it has."""
    path = folder / ROUNDS
    return (folder / _LAST).is_file() or (path.is_file() and b"\n" in path.read_bytes()) or _says_finished(folder)


def _says_finished(folder: Path) -> bool:
    try:
        return json.loads((folder / MANIFEST).read_bytes())["status"] == "finished"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
        check_schema(path, manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    return manifest


def _metrics(path: Path, manifest: dict[str, Any]) -> tuple[Metric, ...]:
    """A run's metrics; for runs of earlier versions, accuracy alone."""
    try:
        facts = manifest["task"]["metrics"] if "task" in manifest else [ACCURACY.facts()]
        return tuple(Metric.of(metric) for metric in facts)
    except (KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def _finished(path: Path, content: bytes, checkpoint: Checkpoint | None) -> list[RoundRecord]:
    """The rounds up to the checkpoint: a killed run may have recorded one more."""
    recorded = _lines(path, content, RoundRecord)
    if [record.round for record in recorded] != list(range(1, len(recorded) + 1)):
        raise CheckpointError(f"{path} is damaged: its rounds are not 1, 2, 3 and so on; restore it, or run again")
    if checkpoint and checkpoint.round > len(recorded):
        raise CheckpointError(
            f"{path} is damaged: it ends with round {len(recorded)} and the checkpoint has {checkpoint.round};"
            " restore it, or run again"
        )
    finished = recorded[: checkpoint.round] if checkpoint else recorded
    if not finished:
        raise CheckpointError(f"{path}: the run has no finished round yet; expected at least one; let it run on")
    return finished


def _lines(path: Path, content: bytes, kind: type[Record]) -> list[Record]:
    """One record for each line of a file; an incomplete last one, still being written or interrupted, is ignored."""
    *lines, _ = content.split(b"\n")
    known = fields(kind)  # pyright: ignore[reportArgumentType]
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            has = [spec.name for spec in known if spec.default is MISSING or spec.name in values]
            records.append(kind(**{name: values[name] for name in has}))
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(path, error, line=number) from error
    return records


def _listed(names: list[str]) -> str:
    """Some names, and how many more there are."""
    more = [f"and {len(names) - _FEW} more"] if len(names) > _FEW else []
    return ", ".join([*names[:_FEW], *more])


def _damaged(path: Path, error: Exception, line: int | None = None) -> CheckpointError:
    place = f"{path}, line {line}," if line else f"{path}"
    reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return CheckpointError(f"{place} is damaged: {reason}; restore it, or run again")
