"""Evaluation of every client's model, on its own test part and on the common test set, and of the global model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from statistics import fmean, pstdev
from typing import Any

from potluck.core.federation import ClientId
from potluck.core.tasks.counting import classes_of
from potluck.core.tasks.metric import ACCURACY, Metric, Values
from potluck.core.tasks.named import CLASSIFICATION
from potluck.core.tasks.task import Sums, Task, added
from potluck.engine.client.runtime import EvalResult, EvaluatedPart, name_of
from potluck.engine.rounds.engine import Engine
from potluck.records import ByClass, ClientRecord, Measure

_MEASURES: Mapping[EvaluatedPart, Measure] = {"own": "personal", "common": "common", "validation": "validation"}


@dataclass(frozen=True)
class Evaluation:
    """All clients' scores after a round, and the global model's on the common test set, if there is one.

    Attributes:
        scores: of the clients that could be evaluated.
        of_global: the global model's metrics by name; None if there is none.
        missing: how many clients could not be evaluated.
        task: the task that defines the metrics.
        pooled: by name, the metrics over all clients' own test parts as if they were one.
        sums: the sums behind `pooled`, such as a confusion matrix; empty if not available.
    """

    scores: list[ClientRecord]
    of_global: Values | None = None
    missing: int = 0
    task: Task = CLASSIFICATION
    pooled: Values | None = None
    sums: Sums = field(default_factory=dict[str, Any], compare=False)

    @property
    def primary(self) -> Metric:
        """The metric in headlines."""
        return self.task.primary

    @property
    def accuracy_global(self) -> float | None:
        """The global model's accuracy; None without a global model, and in a task without accuracy."""
        return self.of_global.get(ACCURACY.name) if self.of_global else None

    def value(self, measure: Measure, metric: str | None = None) -> float | None:
        """A metric, by default the primary one, of one measure; of clients' measures the unweighted mean.

        None if it was not measured.
        """
        name = metric or self.primary.name
        whole = {"global": self.of_global, "pooled": self.pooled}
        if measure in whole:
            return (whole[measure] or {}).get(name)
        values = self._values(measure, name)
        return fmean(values) if values else None

    def mean(self, name: str) -> float | None:
        """Mean over clients of one accuracy, such as "accuracy_common", unweighted; None if no client has it."""
        values = self._values(name.removeprefix("accuracy_"), ACCURACY.name)
        return fmean(values) if values else None

    @property
    def personal_std(self) -> float | None:
        """Standard deviation over clients of the primary metric on their own test parts."""
        return self.spread(self.primary)[0]

    @property
    def personal_worst(self) -> float | None:
        """The worst client's primary metric on its own test part."""
        return self.spread(self.primary)[1]

    def spread(self, metric: Metric) -> tuple[float | None, float | None]:
        """The standard deviation over clients of a metric on their own test parts, and the worst client's value."""
        values = self._values("personal", metric.name)
        return (pstdev(values) if values else None), metric.worst(values)

    def by_architecture(self, measure: str, metric: str | None = None) -> dict[str, float]:
        """A metric's mean over the clients of each architecture.

        Args:
            measure: "personal" or "common"; "accuracy_personal" and "accuracy_common" stand for the accuracy.
            metric: the metric's name; by default the primary one.
        """
        if measure.startswith("accuracy_"):
            measure, metric = measure.removeprefix("accuracy_"), ACCURACY.name
        groups: dict[str, list[float]] = {}
        for score in self.scores:
            if (value := score.value(measure, metric or self.primary.name)) is not None:
                groups.setdefault(score.architecture, []).append(value)
        return {architecture: fmean(values) for architecture, values in groups.items()}

    def by_class(self, round_number: int) -> ByClass | None:
        """The sums by class, over all clients' own test parts; None if the task counts none, or nothing was tested."""
        counts, confusion = classes_of(self.sums), self.sums.get("confusion")
        if counts is None:
            return None
        return ByClass(round_number, None if confusion is None else confusion.tolist(), counts.tolist())

    def _values(self, measure: str, metric: str) -> list[float]:
        return [value for score in self.scores if (value := score.value(measure, metric)) is not None]


def evaluate(
    engine: Engine,
    state: Any,
    *,
    round_number: int = 0,
    common_test: bool = True,
    clients: Sequence[ClientId] | None = None,
) -> Evaluation:
    """Evaluate clients' inference models, and the global model; each distinct one once on the common test set.

    Clients on other machines may lie. Their results count for themselves alone, and the global model is evaluated here.

    Args:
        engine: the run's engine; evaluation traffic is counted apart from training's.
        state: the method's state after the round to evaluate.
        round_number: the round's number, for the records.
        common_test: whether to evaluate each client's model on the common test set too.
        clients: those that are evaluated; None for all.
    """
    federation = engine.federation
    task = federation.task
    common = federation.test if common_test and federation.test is not None and len(federation.test) else None
    trusted = engine.executor.trusted
    parts: tuple[EvaluatedPart, ...] = (
        ("own", "validation") if trusted or not common else ("own", "validation", "common")
    )
    asked = list(federation.sites) if clients is None else list(clients)
    first = engine.evaluate(state, dict.fromkeys(asked, parts))
    by_model = _common_sums(engine, state, first) if common and trusted else {}
    common_values = {model: task.values(sums) for model, sums in by_model.items()}
    scores: list[ClientRecord] = []
    for result in first:
        known = federation.outline(result.client)
        found = {_MEASURES[part]: task.values(sums) for part, sums in result.sums.items()}
        if result.model in common_values:
            found["common"] = common_values[result.model]
        accuracies = found if task.has_classes else {}
        scores.append(
            ClientRecord(
                round=round_number,
                client=result.client,
                architecture=federation.base_of(known.architecture),
                examples_train=known.train,
                examples_test=known.test,
                accuracy_personal=accuracies.get("personal", {}).get(ACCURACY.name),
                accuracy_common=accuracies.get("common", {}).get(ACCURACY.name),
                accuracy_validation=accuracies.get("validation", {}).get(ACCURACY.name),
                metrics={measure: found[measure] for measure in _MEASURES.values() if measure in found},
            )
        )
    own = [result.sums["own"] for result in first if "own" in result.sums]
    pooled = reduce(added, own) if own else {}
    return Evaluation(
        scores=scores,
        of_global=_of_global(engine, state, by_model),
        missing=len(asked) - len(first),
        task=task,
        pooled=task.values(pooled) if pooled else None,
        sums=pooled,
    )


def _common_sums(engine: Engine, state: Any, results: list[EvalResult]) -> dict[str, Sums]:
    """The sums over the common test set by model fingerprint; one client evaluates for all with an equal model.

    If it fails, the next one does.
    """
    found: dict[str, Sums] = {}
    while results:
        speakers = {result.model: result.client for result in reversed(results)}
        said = engine.evaluate(state, dict.fromkeys(speakers.values(), ("common",)), book=False)
        found |= {result.model: result.sums["common"] for result in said if "common" in result.sums}
        asked = set(speakers.values())
        results = [result for result in results if result.model not in found and result.client not in asked]
    return found


def _of_global(engine: Engine, state: Any, by_model: Mapping[str, Sums]) -> Values | None:
    """The sums of the server's model on the common test set; reused if a client's equal model was evaluated on it."""
    model, test = engine.global_model(state), engine.federation.test
    if model is None or test is None or len(test) == 0:
        return None
    name = name_of(model)
    return engine.federation.task.values(by_model[name] if name in by_model else engine.sums(model, test))
