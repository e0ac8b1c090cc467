"""A run as an object: its records as data frames, its last evaluation, and the models that it has trained."""

import html
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from potluck.analysis.read import StoredRun, read_run
from potluck.api.analyse import Analysis, Scope, analysis_of
from potluck.api.attack import Attack, Effort, attack_on
from potluck.api.export import Exported, export
from potluck.api.frames import clients_frame, rounds_frame
from potluck.core.federation import ClientId
from potluck.core.ground.errors import CheckpointError, ConfigError, PotluckWarning
from potluck.experiment.federation.assemble import task_of
from potluck.experiment.folder.code import as_started
from potluck.experiment.folder.folder import open_folder
from potluck.experiment.folder.trained import Trained, trained_in
from potluck.experiment.results.evaluate import Evaluation
from potluck.experiment.settings.resolve import resolve
from potluck.records import TITLES, ClientRecord, Measure, Metric, RoundRecord

if TYPE_CHECKING:
    import pandas as pd

Whose = ClientId | Literal["global"]
"""A client's number, or "global" for the server."""


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run: what `potluck.run` returns, and what `potluck.open_run` makes of a folder.

    Attributes:
        method: the method's name.
        dataset: the data set's name.
        seed: of every draw in the run.
        metric: the task's primary metric.
        rounds: one record for each round, as in `rounds.jsonl`.
        scores: one record for each client and evaluated round, as in `clients.jsonl`.
        folder: of the run; None if it was run without one.
        digest: of all that the run has computed: equal digests mean equal bits. None without a folder.
        privacy: the privacy spent, as text; None if the method makes no such claim.
    """

    method: str
    dataset: str
    seed: int
    metric: Metric
    rounds: tuple[RoundRecord, ...]
    scores: tuple[ClientRecord, ...]
    folder: Path | None = None
    digest: str | None = None
    privacy: str | None = None
    _evaluate: Callable[[], Evaluation] | None = field(default=None, repr=False)
    _train: Callable[[], Trained] | None = field(default=None, repr=False)

    @cached_property
    def records(self) -> "pd.DataFrame":
        """One row for each round.

        Its columns are round, cohort, replied and failed (numbers of clients), bytes_down, bytes_up, bytes_evaluation,
        loss_local, lost, and MEASURE_METRIC, such as personal_accuracy; see `potluck.records.RoundRecord`.
        """
        return rounds_frame(self.rounds)

    @cached_property
    def clients(self) -> "pd.DataFrame":
        """One row for each client and evaluated round.

        Its columns are round, client, architecture, examples_train, examples_test, and MEASURE_METRIC, such as
        common_accuracy; see `potluck.records.ClientRecord`.
        """
        return clients_frame(self.scores)

    @cached_property
    def evaluation(self) -> Evaluation:
        """The last one. A folder's has no `sums`, such as a confusion matrix, since records do not hold them.

        Raises:
            CheckpointError: nothing was evaluated.
            DataError: of a folder, the data set, whose task is needed, is missing.
        """
        return self._evaluate() if self._evaluate else _stored_evaluation(self)

    def model(self, whose: Whose, *, chosen: bool = False) -> nn.Module:
        """The network that a client predicts with, in evaluation mode; or with "global" the server's.

        It is the one that is evaluated, also where that is more than the client's own network. It reads prepared inputs
        (batch, ...), as `fl.predict` gives them. Of a folder the data are loaded for it, once.

        Args:
            whose: a client's number, or "global".
            chosen: whether after the round that is best on validation parts instead of the last; needs a folder.

        Raises:
            ConfigError: there is no such client, or the method has no global model.
            CheckpointError: the folder's checkpoint is damaged, or its data or code have changed.
            DataError: its data are missing.
        """
        trained = self._trained(chosen)
        return trained.global_model() if _client(whose) is None else trained.model(int(whose))

    def export(self, whose: Whose, to: str | Path, *, format: str | None = None, chosen: bool = False) -> Exported:
        """Write that network to a file that works without the run.

        Args:
            whose: a client's number, or "global".
            to: the file. Its ending says the format: .pt, .pth and .safetensors hold the weights, .pt2, .ts and .onnx a
                program.
            format: "state-dict", "exported", "torchscript" or "onnx", whatever the file's ending.
            chosen: as in `model`.

        Returns:
            The file's path, format and provenance, which is also in the file, or in FILE.json beside one of torch.

        Raises:
            ConfigError: as `model`, or the format cannot hold this network.
            StorageError: the file cannot be written.
        """
        facts = {"run": self.folder.resolve().name if self.folder else None, "digest": self.digest}
        facts |= {"method": self.method, "dataset": self.dataset, "seed": self.seed}
        return export(self._trained(chosen), _client(whose), Path(to), format, facts)

    def analyse(
        self,
        *others: "str | Path | RunResult",
        measure: Measure = "personal",
        chosen: bool = False,
        alone: str | None = None,
        target: float | None = None,
        clients: int = 10,
        examples: int = 512,
        bins: int = 15,
        by: str | None = None,
        map_class: int | None = None,
    ) -> Analysis:
        """What `potluck analyse` finds of this run beside others, as data frames; `write` makes its page.

            local.analyse(fedavg, "runs/older").frames["gains"]

        Args:
            others: further runs, or folders of runs; one of the method `local` lets it say who profits.
            measure: on what the clients' models are scored: "personal", "common" or "validation".
            chosen: whether after the rounds that are best on validation parts instead of the last.
            alone: name of the experiment that stands for training alone; by default the one of the method `local`.
            target: adds what it took to reach this value of the metric.
            clients: of how many at most the networks are compared, of each architecture in turn.
            examples: of the common test set at most, on which they are compared.
            bins: of confidence, for the calibration.
            by: a column of the runs' tables, also one that is no input, by whose values test examples are divided into
                groups: what each gains, and how sure its predictions are.
            map_class: the class whose examples alone the map of features shows, a number from 0; None for all.

        Raises:
            ConfigError: a run has no folder, or a value is wrong.
            DataError: data are no tables, or lack the column `by`.
            CheckpointError: a folder is not a run, or all runs are damaged.
        """
        scope = Scope(measure, chosen, alone, target, clients, examples, bins, by, map_class)
        return analysis_of(folders_of([self, *others]), scope)

    def attack(
        self,
        *,
        images: int = 16,
        steps: int = 2000,
        canaries: int = 512,
        seed: int = 0,
        lpips: str | Path | None = None,
        chosen: bool = False,
        tell: Callable[[str], None] = lambda words: None,
    ) -> Attack:
        """What `potluck attack` finds: what a server that is curious learns of the clients from one more round.

        The round is run in memory, with all clients; a folder stays as it is.

        Args:
            images: how many examples are looked for in features, over all clients.
            steps: of the search for each.
            canaries: examples of which a private release is audited; more show a larger epsilon.
            seed: of the attacker's draws.
            lpips: a file of the weights of LPIPS; without it they are random, and the number has another name.
            chosen: as in `model`.
            tell: is called with what is being done.

        Raises:
            ConfigError: a value is wrong.
            CheckpointError: the folder's checkpoint is damaged, or its data or code have changed.
            DataError: its data are missing.
            ClientFailure: a client fails in that round.
        """
        effort = Effort(images, steps, canaries, seed, Path(lpips) if lpips is not None else None)
        title = f"{self.method} on {self.dataset}, seed {self.seed}"
        return attack_on(self._trained(chosen), title, self.metric, effort, tell)

    def __repr__(self) -> str:
        last = next((record for record in reversed(self.rounds) if record.evaluated), None)
        value = last.value("personal", self.metric.name) if last else None
        reached = f": {self.metric.label} {self.metric.text(value)}" if value is not None else ""
        place = f", in {self.folder}" if self.folder else ""
        rounds = f"{len(self.rounds)} round{'' if len(self.rounds) == 1 else 's'}"
        return f"<run of {self.method} on {self.dataset}, seed {self.seed}, {rounds}{reached}{place}>"

    def __str__(self) -> str:
        rows = self._table()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if not place else cell.rjust(width) for place, (cell, width) in enumerate(found)
            )
            for found in (list(zip(row, widths, strict=True)) for row in rows)
        ]
        return "\n".join([repr(self)[1:-1], "", *lines, *self._remarks()])

    def _repr_html_(self) -> str:
        head, *body = [[html.escape(cell) for cell in row] for row in self._table()]
        title = html.escape(repr(self)[1:-1])
        lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
        lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body]
        remarks = "".join(f"<div>{html.escape(line)}</div>" for line in self._remarks())
        return f"<div><b>{title}</b><table>{''.join(lines)}</table>{remarks}</div>"

    def _table(self) -> list[list[str]]:
        """The primary metric by architecture, and over all clients, after the last evaluated round."""
        when = max((score.round for score in self.scores), default=0)
        scores = [score for score in self.scores if score.round == when]
        names = dict.fromkeys(score.architecture for score in scores)
        groups = {name: [score for score in scores if score.architecture == name] for name in names}
        rows = [["architecture", "clients", TITLES["personal"], TITLES["common"]]]
        for name, members in {**groups, "all clients": scores}.items():
            cells = [self.metric.text(_mean(members, measure, self.metric)) for measure in ("personal", "common")]
            rows.append([name, str(len(members)), *cells])
        return rows

    def _remarks(self) -> list[str]:
        """What else there is to say: means, the global model, what was lost, privacy, folder, digest."""
        last = next((record for record in reversed(self.rounds) if record.evaluated), None)
        value = last.value("global", self.metric.name) if last else None
        failed = sum(len(record.failed) for record in self.rounds)
        lost = sum(record.lost is not None for record in self.rounds)
        found = {
            f"{self.metric.label} on held-out examples, means over clients": True,
            f"{TITLES['global']} on the {TITLES['common']}: {self.metric.text(value)}": value is not None,
            f"{failed} client calls failed": failed,
            f"{lost} rounds were lost and changed nothing": lost,
            f"privacy: {self.privacy}": self.privacy,
            f"records: {self.folder}": self.folder,
            f"digest: {self.digest}": self.digest,
        }
        return [text for text, says in found.items() if says]

    def _trained(self, chosen: bool) -> Trained:
        if self._train and not chosen:
            return self._train()
        if self.folder is None:
            raise ConfigError("chosen: a run without a folder keeps the models of its last round alone; give it to=...")
        return self._opened[chosen]

    @cached_property
    def _opened(self) -> "_Opened":
        assert self.folder is not None
        return _Opened(self.folder)


class _Opened(dict[bool, Trained]):
    """A folder's models after the last round, and after the chosen one; read when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, chosen: bool) -> Trained:
        self[chosen] = trained_in(self._folder, chosen=chosen)
        return self[chosen]


def open_run(folder: str | Path) -> RunResult:
    """The run in a folder that `potluck run`, or `potluck.run` with `to`, has made; also one that is not finished yet.

    Raises:
        CheckpointError: it is not a run, has no finished round, or is damaged.
    """
    run = read_run(Path(folder))
    if run.unchecked:
        warnings.warn(f"{folder}: {run.unchecked}", PotluckWarning, stacklevel=2)
    return of_stored(run)


def folders_of(runs: Iterable[str | Path | RunResult]) -> list[Path]:
    """The folders of runs.

    Raises:
        ConfigError: one has none.
    """
    found: list[Path] = []
    for one in runs:
        folder = one.folder if isinstance(one, RunResult) else Path(one)
        if folder is None:
            raise ConfigError(f"{one!r} has no folder to read; run it with to='runs'")
        found.append(folder)
    return found


def of_stored(
    run: StoredRun,
    evaluate: Callable[[], Evaluation] | None = None,
    train: Callable[[], Trained] | None = None,
) -> RunResult:
    """The result of a stored run; evaluation and models are read from its folder unless they are at hand."""
    return RunResult(
        method=run.method,
        dataset=run.dataset,
        seed=run.seed,
        metric=run.metric,
        rounds=run.rounds,
        scores=run.clients,
        folder=run.folder,
        digest=run.digests.get("checkpoint"),
        privacy=run.manifest.get("privacy"),
        _evaluate=evaluate,
        _train=train,
    )


def _client(whose: Whose) -> ClientId | None:
    if whose == "global":
        return None
    if isinstance(whose, bool) or not hasattr(whose, "__index__"):
        raise ConfigError(f"model: found {whose!r}; expected a client's number, or 'global'")
    return int(whose)


def _mean(scores: list[ClientRecord], measure: str, metric: Metric) -> float | None:
    values = [value for score in scores if (value := score.value(measure, metric.name)) is not None]
    return sum(values) / len(values) if values else None


def _stored_evaluation(result: RunResult) -> Evaluation:
    """The last evaluation, from the records of a folder."""
    assert result.folder is not None
    last = next((record for record in reversed(result.rounds) if record.evaluated), None)
    if last is None:
        raise CheckpointError(f"{result.folder}: no round was evaluated yet")
    manifest = open_folder(result.folder)
    config: Mapping[str, Any] = tomllib.loads((result.folder / "config.toml").read_text(encoding="utf-8"))
    with as_started(result.folder, manifest):
        task = task_of(resolve(dict(config), str(result.folder)))
    scores = [score for score in result.scores if score.round == last.round]
    metrics = last.metrics or {}
    return Evaluation(
        scores=scores,
        of_global=metrics.get("global"),
        missing=config["federation"]["clients"] - len(scores),
        task=task,
        pooled=metrics.get("pooled"),
    )
